"""What a real server tells, from outside: a file that it writes beside serving."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.observe.events import EVENTS
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json, server_settings

SPACE = Namespace("model", Layout("uint8", (4096,)))
KEYS = [bytes([number + 1]) * 32 for number in range(8)]
DATA = [bytes([number]) * 4096 for number in range(8)]


class Watched:
    """A server with a file of events."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.path = tmp_path / "events.jsonl"
        settings = {"l1": {"backing": "memfd"}, "subscribers": {"jsonl": {"path": str(self.path)}}, **settings}
        self.server = Server(server_settings(tmp_path, **settings)).start(wait=True)

    @property
    def events(self) -> list[Json]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def named(self, *names: str) -> list[Json]:
        return [event for event in self.events if event["event"] in names]

    def until(self, *names: str, count: int = 1) -> list[Json]:
        end = time.monotonic() + 60
        while len(found := self.named(*names)) < count:
            assert time.monotonic() < end, f"there are {len(found)} of {names}: {self.events}"
            time.sleep(0.005)
        return found


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(**settings: Any) -> Watched:
        made.append(Watched(tmp_path, **settings))
        return made[-1]

    yield start
    for each in made:
        each.server.stop()


def test_what_becomes_of_objects_is_told_in_its_order(watch: Callable[..., Watched]) -> None:
    watched = watch()
    with watched.server.connect("teller") as client:
        assert client.store(KEYS, DATA, namespace=SPACE).stored == 8
        client.clear(SPACE, tiers=True)
    watched.server.stop()
    names = [event["event"] for event in watched.events]
    assert names == ["session_opened", "admitted", "cleared", "removed", "session_ended", "drain"]
    admitted, removed = watched.named("admitted")[0], watched.named("removed")[0]
    assert admitted["keys"] == [key.hex() for key in KEYS]
    assert admitted["nbytes"] == 8 * 4096
    assert sorted(removed["keys"]) == [key.hex() for key in KEYS]
    assert removed["reason"] == "cleared"
    assert watched.named("session_opened")[0]["client"] == "teller"
    assert watched.named("session_ended")[0]["how"] == "goodbye"
    assert f"{SPACE.id:016x}" == watched.named("cleared")[0]["namespace"] == admitted["namespace"]


def test_evictions_name_their_policy(watch: Callable[..., Watched]) -> None:
    watched = watch(l1={"size_bytes": 4 << 20, "backing": "memfd"})
    with watched.server.connect() as client:
        for first in range(0, 2000, 100):
            keys = [number.to_bytes(32, "big") for number in range(first, first + 100)]
            client.store(keys, [DATA[0]] * 100, namespace=SPACE)
        evicted = client.status()["l1"]["counters"]["evictions"]
    assert evicted > 0
    watched.server.stop()
    told = watched.named("evicted")
    assert sum(len(event["keys"]) for event in told) >= evicted
    assert {event["policy"] for event in told} == {"lru"}


def test_a_lookup_that_misses_says_why(watch: Callable[..., Watched]) -> None:
    watched = watch()
    with watched.server.connect() as client:
        client.store(KEYS[:2], DATA[:2], namespace=SPACE)
        client.lookup(KEYS, namespace=SPACE)
        client.clear(SPACE)
        client.lookup(KEYS[:1], namespace=SPACE)
    first, second = watched.until("lookup", count=2)
    # What the index has is no question to the server.
    assert (first["keys"] + first["hits"], first["hits"]) in ((6, 0), (10, 2))
    assert first["reasons"] == {"never_stored": 1, "behind_a_miss": 5}
    assert second["reasons"] == {"cleared": 1}


def test_tiers_tell_what_they_have(watch: Callable[..., Watched]) -> None:
    pytest.importorskip("lmcache_mock", reason="needs the mock tier")
    watched = watch(l2={"cold": {"type": "mock"}})
    with watched.server.connect() as client:
        client.store(KEYS, DATA, namespace=SPACE)
        stored = watched.until("tier_stored")
        assert {event["tier"] for event in stored} == {"cold"}
        watched.until("tier_stored")
        end = time.monotonic() + 60
        while sum(len(event["keys"]) for event in watched.named("tier_stored")) < 8:
            assert time.monotonic() < end, f"not all was stored: {watched.events}"
            time.sleep(0.005)
        client.clear(SPACE)
        found = client.lookup(KEYS, namespace=SPACE, wait_s=30.0)
        assert found.hits == 8
        client.tiers_drain("cold")
    assert sum(len(event["keys"]) for event in watched.until("loaded")) > 0
    assert watched.until("tier_changed")[0]["action"] == "drain"
    told = watched.until("lookup")[-1]
    assert (told["hits"], told["loaded"], told["tiers"]) == (8, 8, True)


def test_without_subscribers_there_is_no_bus_and_no_thread(tmp_path: Path) -> None:
    import threading

    watched = Watched(tmp_path, subscribers={})
    try:
        assert watched.server.parts.observer.events is None
        with watched.server.connect() as client:
            assert client.status()["events"] is None
        assert not [thread for thread in threading.enumerate() if thread.name == "lmcache-events"]
    finally:
        watched.server.stop()


def test_an_expired_lease_is_reported_to_subscribers(watch: Callable[..., Watched]) -> None:
    watched = watch(lease={"write_ttl_s": 0.05, "read_ttl_s": 0.05})
    with watched.server.connect("slow") as client:
        lease = client.prepare_store(KEYS[:1], namespace=SPACE)
        (told,) = watched.until("lease_expired")
        assert (told["kind"], told["lease"]) == ("write", lease.id)


def test_every_event_has_a_name_of_its_own() -> None:
    names = [str(kind.__struct_config__.tag) for kind in EVENTS]
    assert len(set(names)) == len(names)
