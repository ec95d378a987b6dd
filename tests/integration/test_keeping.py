"""Embedded servers that leave their pool to the next one in the same process, or say why they do not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, SettingsError
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace

pytestmark = pytest.mark.skipif(native is None, reason="adoption needs the C extension")
NAMESPACE = Namespace("model", Layout("uint8", (16384,)))
KEYS = [number.to_bytes(32, "big") for number in range(40)]
SOURCES = [bytes([number + 1]) * 16384 for number in range(40)]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Embedded servers of one name, populated when this returns; the caller stops them."""
    name = f"t{uuid4().hex[:10]}"
    servers = []

    def make(**values: Any) -> Server:
        registry = load_plugins()
        l1 = {"size_bytes": 4 << 20, "keep_pool": True, **values.pop("l1", {})}
        settings = make_settings(
            registry,
            name=name,
            l1=l1,
            runtime_dir=str(tmp_path / "run"),
            state_dir=str(tmp_path / "state"),
            drain_s=0.2,
            **values,
        )
        servers.append(Server(settings, registry).start())
        assert servers[-1].populator.wait(60)
        return servers[-1]

    yield make
    for server in servers:
        if not server.loop.ended:
            server.stop()
    segment_path(name).unlink(missing_ok=True)


def test_a_stopped_server_leaves_its_pool_to_the_next_in_this_process(serve: Callable[..., Server]) -> None:
    first = serve()
    with first.connect() as client:
        assert client.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)
    first.stop()
    second = serve()
    with second.connect() as client:
        into = [bytearray(16384) for _ in KEYS]
        assert client.retrieve(KEYS, into, namespace=NAMESPACE).hits == len(KEYS)
        assert [bytes(each) for each in into] == SOURCES
        usage = client.status()["l1"]
        assert usage["used_bytes"] == usage["bytes_by_state"]["ready"] == len(KEYS) * 16384


def test_what_a_clear_had_yet_to_free_when_time_ran_out_is_not_found_by_the_next_server(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = serve()
    free = first.kernel.free_cleared
    with first.connect() as client:
        assert client.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)
        monkeypatch.setattr(first.kernel, "free_cleared", lambda now: free(now) if first.loop.stopping else 0)
        client.links.current().channel.start(lambda rid: m.Clear(rid, NAMESPACE.id))
        client.ping()  # it has begun
        assert first.kernel.clearing
        first.stop()
    with serve().connect() as client:
        assert client.lookup(KEYS, namespace=NAMESPACE).hits == 0


def test_a_lease_of_the_former_server_keeps_its_slot_while_it_is_in_use(serve: Callable[..., Server]) -> None:
    first = serve()
    client = first.connect()
    lease = client.prepare_store(KEYS[:3], namespace=NAMESPACE)
    view = lease.view(0)
    first.stop()
    second = serve()
    view[:] = b"w" * 16384  # nobody else has it
    with second.connect() as other:
        assert other.status()["l1"]["objects_by_state"]["quarantined"] == 3
        assert other.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)
        with pytest.raises(DisconnectedError):
            lease.commit()
        client.close()
        deadline = time.monotonic() + 60
        while other.status()["l1"]["objects_by_state"]["quarantined"]:
            assert time.monotonic() < deadline
        into = [bytearray(16384) for _ in KEYS]
        assert other.retrieve(KEYS, into, namespace=NAMESPACE).hits == len(KEYS)
        assert [bytes(each) for each in into] == SOURCES


def test_a_new_worker_does_not_pass_for_the_former_one_whose_row_is_free_again(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = serve()
    former = first.connect()
    former.ping()
    first.stop()  # in good order, so that no row says whose it was; its life lock does
    second = serve()
    adopting = second.adopting
    assert adopting is not None
    step = adopting.step
    may: list[bool] = []
    monkeypatch.setattr(adopting, "step", lambda now: bool(may) and step(now))
    former.close()
    with second.connect() as other:
        assert other.status()["pool"]["adopted"]["waiting_for_workers"] == 1
        may.append(True)
        deadline = time.monotonic() + 60
        while other.status()["pool"]["adopted"]["waiting_for_workers"]:
            assert time.monotonic() < deadline
        with second.connect() as third:  # and its own row is still its own
            third.ping()
        assert other.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)


def test_a_pool_that_a_hung_lane_may_write_to_is_not_kept_and_the_log_says_so(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lmcache_mock")
    first = serve(l2={"bad": {"type": "mock"}})
    assert first.tiering is not None
    (tier,) = first.tiering.tiers
    adapter: Any = tier.adapter
    with first.connect() as client:
        assert client.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)
        deadline = time.monotonic() + 60
        while not first.tiering.drained:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        client.clear(NAMESPACE)
        adapter.set_faults("load hang")
        deadline = time.monotonic() + 60
        loads = next(lane for lane in tier.lanes if lane.name == "bad-load")
        while not loads.running:  # on a busy machine it may be late before it begins
            assert time.monotonic() < deadline
            found = client.lookup(KEYS[:1], namespace=NAMESPACE, wait_s=0.05)
            assert found.statuses[0] is not Status.HIT
        with caplog.at_level(logging.WARNING):
            first.stop()
    assert "is not kept" in caplog.text
    assert "a tier's call has not returned" in caplog.text
    assert not segment_path(first.settings.name).exists()
    adapter.set_faults()
    second = serve()
    with second.connect() as client:
        assert client.status()["pool"]["adopted"] is None
        assert client.lookup(KEYS[:1], namespace=NAMESPACE).hits == 0


def test_a_pool_without_a_name_cannot_be_kept() -> None:
    with pytest.raises(SettingsError, match="keep_pool needs a named pool"):
        make_settings(load_plugins(), l1={"backing": "memfd", "keep_pool": True})
