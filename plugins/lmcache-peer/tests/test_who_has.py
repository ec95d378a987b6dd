"""The two ways to know who has what keep the same promises: a reader finds what is there, asks nobody for what is not,
and nothing of a node that is gone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, closing

import pytest

from lmcache_core.protocol.hostport import HostPort
from lmcache_core.tiers.object.format import tier_key
from lmcache_peer import __main__ as helper
from lmcache_peer import holders
from lmcache_peer.admission import Admission
from lmcache_peer.directory import directory_of
from lmcache_peer.holders import KeyEntries
from lmcache_peer.node import Node
from lmcache_peer.serving import Door
from lmcache_peer.settings import ServingSettings
from lmcache_testing.waiting import until

from .conftest import NAMESPACE, StartNode, TestNode, key
from .test_directory import RedisProcess
from .test_directory import redis_process as redis_process


@pytest.fixture(params=["digests", "entries"])
def cluster(redis_process: RedisProcess, request: pytest.FixtureRequest) -> dict[str, object]:
    return {**redis_process.settings, "who_has": request.param}


def _two(node: StartNode, cluster: dict[str, object], *objects: int) -> tuple[TestNode, TestNode]:
    a, b = node("a", serve=cluster), node("b", tier=cluster)
    a.store(*objects)
    b.sees("a", len(objects))
    return a, b


def test_what_a_node_has_is_found_and_what_nobody_has_is_asked_of_nobody(
    node: StartNode, cluster: dict[str, object]
) -> None:
    a, b = _two(node, cluster, 1, 2, 3)
    assert b.load(1, 2, 3) == [1, 2, 3]
    asked = b.peer("a")["lookups"]
    assert b.load(*range(100, 150)) == []
    figures = b.peer("a")
    assert figures["lookups"] - asked <= figures["false_hits"], "only false hits cost a question"
    until(lambda: a.held == 0, "nothing to be held")


def test_what_was_evicted_is_soon_asked_of_nobody(node: StartNode, cluster: dict[str, object]) -> None:
    a, b = _two(node, cluster, 1, 2)
    a.drop(1)
    assert b.load(1) == []
    b.sees("a", 1)

    def asks_nobody() -> bool:
        asked = b.peer("a")["lookups"]
        assert b.load(1) == []
        return bool(b.peer("a")["lookups"] == asked)

    until(asks_nobody, "the reader to know")
    assert b.load(2) == [2]


def test_a_node_that_was_restarted_is_found_again(node: StartNode, cluster: dict[str, object]) -> None:
    a, b = _two(node, cluster, 1, 2)
    assert b.load(1) == [1]
    os.kill(a.helper, signal.SIGKILL)
    until(lambda: b.load(2) == [2], "its next helper to be asked")


def test_nothing_is_asked_of_a_node_that_is_gone(node: StartNode, cluster: dict[str, object]) -> None:
    a, b = _two(node, cluster, 1)
    a.server.stop()
    until(lambda: b.tier["adapter"]["nodes"] == 0, "nobody to be left")
    assert b.load(1) == []


def test_without_redis_entries_find_nothing_new_and_digests_do(
    node: StartNode, cluster: dict[str, object], redis_process: RedisProcess
) -> None:
    _, b = _two(node, cluster, 1, 2)
    assert b.load(1) == [1]
    redis_process.stop()
    found = b.load(2)
    assert found == ([2] if cluster["who_has"] == "digests" else [])
    redis_process.start()
    until(lambda: b.client.lookup([key(2)], namespace=NAMESPACE, wait_s=5.0).hits, "it to be found")


def test_a_node_that_has_more_to_tell_than_a_round_has_time_for_registers_in_between(
    node: StartNode, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ENTRIES_AT_ONCE", 1), ("ENTRIES_ROUND_S", 0.0)):  # a round has time for one exchange
        monkeypatch.setattr(holders, name, value)
    for name in ("DIGEST_PERIOD_S", "DIRECTORY_PERIOD_S", "DIGEST_SHARE"):
        monkeypatch.setattr(helper, name, 0)
    a, numbers = node("a"), (1, 2, 3)
    a.store(*numbers)
    settings = ServingSettings.model_validate({**redis_process.settings, "who_has": "entries", "port": 0})
    with ExitStack() as stack:
        directory = stack.enter_context(closing(directory_of(settings, "peer")))
        entries = stack.enter_context(closing(KeyEntries(settings, "peers")))
        own = Node(a.server.parts.settings.name, a.server.parts.settings.runtime_dir, None)
        stack.enter_context(closing(own.client))
        door = stack.enter_context(closing(Door(HostPort("127.0.0.1", 0), "a", 7, own, Admission(settings))))
        keeper = helper._Keeper(settings, door, directory)

        def told_after_a_round() -> int:
            redis_process.expire("a")
            keeper.round()
            assert redis_process.value("a") is not None, "it has registered"
            names = [tier_key(key(each), NAMESPACE.id, 0) for each in numbers]
            return entries.boots(names, time.monotonic() + 10).count([door.boot])

        assert [told_after_a_round() for _ in range(4)] == [1, 2, 3, 3]
        a.drop(1)
        a.drop(2)
        assert [told_after_a_round() for _ in range(3)] == [2, 1, 1]
        redis_process.door.flushall()
        assert [told_after_a_round() for _ in range(2)] == [1, 1]
