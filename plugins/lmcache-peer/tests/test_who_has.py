"""The two ways to know who has what keep the same promises: a reader finds what is there, asks nobody for what is not,
and nothing of a node that is gone."""

from __future__ import annotations

import os
import signal

import pytest

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
