"""The kernel's decisions reach the pool, whatever goes wrong on the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.server.status import describe
from lmcache_core.settings.compose import make_settings

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
def test_what_follows_a_fault_is_carried_out_with_the_next_decisions(tmp_path: Path) -> None:
    settings = make_settings(
        name=f"l{os.urandom(4).hex()}", runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"),
        l1={"size_bytes": 4 << 20}, drain_s=0.1,
    )  # fmt: skip
    server = Server(settings, load_plugins())
    kernel, l1 = server.kernel, server.l1
    kernel.add_memory(server.segment.info.data_bytes)
    l1.add_layout(1, LAYOUT)
    former = _store(server, key(1))
    l1.apply()
    assert _state(server, key(1)) == "ready"

    _store(server, key(2))
    kernel.drop(SPACE, [key(1)], 0.0, Reason.DROPPED)
    tiers = FaultyTiers()
    l1.tiering = cast("Any", tiers)
    with pytest.raises(RuntimeError, match="have a fault"):
        l1.apply()
    l1.apply()
    l1.tiering = None
    assert tiers.told == 1  # what failed is not tried again
    assert _state(server, key(1)) == "gone"
    assert _state(server, key(2)) == "ready"
    assert _store(server, key(3)) == former  # its slot, which nobody finds the old object in
    server.start().stop()


def test_status_calls_populated_what_can_be_handed_out(tmp_path: Path) -> None:
    settings = make_settings(
        name=f"l{os.urandom(4).hex()}", runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"),
        l1={"size_bytes": 4 << 20}, drain_s=0.1,
    )  # fmt: skip
    server = Server(settings, load_plugins())
    assert server.populator.wait(60)  # on its own thread; the loop, which hears of it, does not run
    assert describe(server)["pool"]["populated_bytes"] == 0
    with server, server.connect() as client:
        assert client.status()["pool"]["populated_bytes"] == server.segment.info.data_bytes


def _store(server: Server, name: bytes) -> int:
    """Write and commit one object; the offset of its slot. Nothing is carried out yet."""
    grants = server.kernel.prepare_store(SERVER_SESSION, SPACE, 1, [name], 0.0)
    server.kernel.commit_store(SERVER_SESSION, grants.lease_id, 0.0)
    return grants.offsets[0]


def _state(server: Server, name: bytes) -> str:
    """What the index says of an object."""
    assert server.l1.index is not None
    entry = server.l1.index.index.entry(SPACE, name)
    return "" if entry is None else str(entry["state"])
