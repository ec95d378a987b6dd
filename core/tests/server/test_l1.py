"""The kernel's decisions reach the pool, whatever goes wrong on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.tables import SlotState
from lmcache_core.server.server import Server
from lmcache_core.server.status import describe
from lmcache_core.settings.model import Settings
from lmcache_testing.embedded import server_settings

LAYOUT = Layout("uint8", (4096,))
SPACE = 5


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class FaultyTiers:
    """Tiers that fail with the first that they are told."""

    told = 0

    def on_committed(self, objects: Any) -> None:
        self.told += 1
        raise RuntimeError("the tiers have a fault")


@pytest.mark.skipif(native is None, reason="the index is kept by the C extension alone")
def test_what_follows_a_fault_is_carried_out_all_the_same(tmp_path: Path) -> None:
    server = Server(_settings(tmp_path))
    kernel, l1 = server.parts.kernel, server.parts.l1
    kernel.add_memory(server.parts.segment.info.data_bytes)
    l1.add_layout(1, LAYOUT)
    former = _store(server, key(1))
    l1.apply()
    assert _state(server, key(1)) == "ready"

    _store(server, key(2))
    kernel.drop(SPACE, [key(1)], 0.0, Reason.DROPPED)
    tiers = FaultyTiers()
    l1.tiering = cast("Any", tiers)
    l1.apply()
    l1.tiering = None
    assert l1.counters["apply_faults"] == 1
    assert tiers.told == 1  # what failed is not tried again
    assert _state(server, key(1)) == "gone"
    assert _state(server, key(2)) == "ready"
    assert _store(server, key(3)) == former  # its slot, which nobody finds the old object in
    server.start().stop()


@pytest.mark.skipif(native is None, reason="the index is kept by the C extension alone")
def test_who_only_listens_and_fails_keeps_nothing_from_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(_settings(tmp_path, subscribers={"log": {}}), load_plugins())
    kernel, l1 = server.parts.kernel, server.parts.l1
    kernel.add_memory(server.parts.segment.info.data_bytes)
    l1.add_layout(1, LAYOUT)
    _store(server, key(1))
    l1.apply()

    def fails(effect: Any) -> None:
        raise RuntimeError("the tap has a fault")

    monkeypatch.setattr(l1.observer, "effect", fails)
    _store(server, key(2))
    kernel.drop(SPACE, [key(1)], 0.0, Reason.DROPPED)
    l1.apply()
    assert _state(server, key(1)) == "gone"
    assert _state(server, key(2)) == "ready"
    assert l1.counters["apply_faults"] > 0
    assert l1.counters["committed"] == 2
    server.start().stop()


@pytest.mark.skipif(native is None, reason="the index is kept by the C extension alone")
def test_a_removal_that_fails_is_finished_before_its_slot_is_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(_settings(tmp_path), load_plugins())
    kernel, l1 = server.parts.kernel, server.parts.l1
    kernel.add_memory(server.parts.segment.info.data_bytes)
    l1.add_layout(1, LAYOUT)
    slots = [_store(server, key(number)) for number in range(3)]
    l1.apply()
    assert l1.index is not None
    remove, failing = l1.index.remove, [True, True, False]

    def removes(objects: Any, reason: Reason) -> None:
        if len(objects) > 1 or failing.pop():
            raise MemoryError("no memory for a batch")
        remove(objects, reason)

    monkeypatch.setattr(l1.index, "remove", removes)
    kernel.drop(SPACE, [key(number) for number in range(3)], 0.0, Reason.DROPPED)
    l1.apply()
    assert l1.counters["apply_faults"] == 3  # the batch, and two of its objects
    assert "ready" not in [_state(server, key(number)) for number in range(3)]
    monkeypatch.undo()
    assert sorted(_store(server, key(number)) for number in range(3, 6)) == sorted(slots)
    server.start().stop()


def test_a_notice_that_ends_a_peer_finds_all_that_was_decided_carried_out(tmp_path: Path) -> None:
    server = Server(_settings(tmp_path), load_plugins())
    kernel, l1 = server.parts.kernel, server.parts.l1
    kernel.add_memory(server.parts.segment.info.data_bytes)
    l1.add_layout(1, LAYOUT)
    offset = _store(server, key(1))
    kernel.prepare_store(SERVER_SESSION, SPACE, 1, [key(2)], 0.0, ttl_s=1.0)
    l1.apply()
    seen = []

    def ends_a_peer(effect: object) -> None:
        seen.append(server.parts.segment.tables.slot(offset)[0])
        kernel.drop(SPACE, [key(3)], 2.0, Reason.DROPPED)
        l1.apply()  # as `SessionTable.lost` does
        seen.append(list(kernel.effects))

    l1.notify = ends_a_peer
    kernel.expire(2.0)  # the notice comes first …
    kernel.drop(SPACE, [key(1)], 2.0, Reason.DROPPED)  # … and this after it
    l1.apply()
    assert seen == [SlotState.FREE, []]
    server.start().stop()


def test_status_calls_populated_what_can_be_handed_out(tmp_path: Path) -> None:
    server = Server(_settings(tmp_path))
    assert server.parts.populator.wait(60)  # on its own thread; the loop, which hears of it, does not run
    assert describe(server)["pool"]["populated_bytes"] == 0
    with server, server.connect() as client:
        assert client.status()["pool"]["populated_bytes"] == server.parts.segment.info.data_bytes


def _settings(tmp_path: Path, **more: Any) -> Settings:
    return server_settings(tmp_path, l1={"size_bytes": 4 << 20}, drain_s=0.1, **more)


def _store(server: Server, name: bytes) -> int:
    """Write and commit one object; the offset of its slot. Nothing is carried out yet."""
    grants = server.parts.kernel.prepare_store(SERVER_SESSION, SPACE, 1, [name], 0.0)
    server.parts.kernel.commit_store(SERVER_SESSION, grants.lease_id, 0.0)
    return grants.offsets[0]


def _state(server: Server, name: bytes) -> str:
    """What the index says of an object."""
    assert server.parts.l1.index is not None
    entry = server.parts.l1.index.index.entry(SPACE, name)
    return "" if entry is None else str(entry["state"])
