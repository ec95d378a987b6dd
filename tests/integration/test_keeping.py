"""Embedded servers that leave their pool to the next one in the same process, or say why they do not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, SettingsError
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.pool.adopting import Adopting
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import until

pytestmark = pytest.mark.skipif(native is None, reason="adoption needs the C extension")
NAMESPACE = Namespace("model", Layout("uint8", (16384,)))
KEYS = [number.to_bytes(32, "big") for number in range(40)]
SOURCES = [bytes([number + 1]) * 16384 for number in range(40)]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Embedded servers of one name, populated when this returns; the caller stops them."""
    name = f"t{uuid4().hex[:10]}"
    with ExitStack() as stack:
        stack.callback(segment_path(name).unlink, missing_ok=True)

        def make(**values: Any) -> Server:
            l1 = {"size_bytes": 4 << 20, "keep_pool": True, **values.pop("l1", {})}
            return stack.enter_context(embedded_server(tmp_path, name=name, l1=l1, drain_s=0.2, **values))

        yield make


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
    free = first.parts.kernel.free_cleared
    with first.connect() as client:
        assert client.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)
        monkeypatch.setattr(
            first.parts.kernel, "free_cleared", lambda now: free(now) if first.parts.loop.stopping else 0
        )
        client.links.current().channel.start(m.Clear(0, NAMESPACE.id))
        client.ping()  # it has begun
        assert first.parts.kernel.clearing
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
    step = Adopting.step
    may: list[bool] = []
    monkeypatch.setattr(Adopting, "step", lambda self, now: bool(may) and step(self, now))
    second = serve()
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


def test_who_only_looks_has_a_link_to_the_next_server_before_its_next_call(serve: Callable[..., Server]) -> None:
    first = serve()
    client = Client.connect(first.parts.settings.name, runtime_dir=first.parts.settings.runtime_dir)
    assert client.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)
    assert client.look()
    first.stop()
    until(lambda: not client.look(), "the loss")
    serve()
    until(client.look, "the next server")
    client.close()


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
        # The loop's own answer: between two steps of a plan, other threads find no object waiting.
        until(lambda: client.status()["tiers"]["tiers"][0]["objects"] == len(KEYS))
        client.clear(NAMESPACE)
        adapter.set_faults("load hang")
        loads = next(lane for lane in tier.lanes if lane.name == "bad-load")

        def hangs() -> int:  # on a busy machine a load may be late before it begins
            found = client.lookup(KEYS[:1], namespace=NAMESPACE, wait_s=0.05)
            assert found.statuses[0] is not Status.HIT
            return loads.running

        until(hangs)
        with caplog.at_level(logging.WARNING):
            first.stop()
    assert "is not kept" in caplog.text
    assert "a tier's call has not returned" in caplog.text
    assert not segment_path(first.parts.settings.name).exists()
    adapter.set_faults()
    second = serve()
    with second.connect() as client:
        assert client.status()["pool"]["adopted"] is None
        assert client.lookup(KEYS[:1], namespace=NAMESPACE).hits == 0


def test_a_pool_without_a_name_cannot_be_kept() -> None:
    with pytest.raises(SettingsError, match="keep_pool needs a named pool"):
        make_settings(load_plugins(), l1={"backing": "memfd", "keep_pool": True})


def cleared_elsewhere(server: Server, namespace: int | None = NAMESPACE.id) -> None:
    """What another server does that shares the epochs."""
    Epochs(server.parts.settings.state_dir / f"{server.parts.settings.name}.epochs").move(namespace)


def test_what_another_server_has_cleared_is_not_stored_again_from_this_pool(serve: Callable[..., Server]) -> None:
    server = serve(l2={"m": {"type": "mock"}})
    other = Namespace("another model", Layout("uint8", (16384,)))
    with server.connect() as client:
        client.store(KEYS, SOURCES, namespace=NAMESPACE)
        client.store(KEYS[:3], SOURCES[:3], namespace=other)
        assert client.wait_stored([*KEYS], namespace=NAMESPACE)
        cleared_elsewhere(server)
        until(lambda: client.lookup(KEYS, namespace=NAMESPACE, tiers=[]).hits == 0, "the pool to be cleared")
        until(lambda: client.status()["tiers"]["tiers"][0]["objects"] <= 3, "the tier to be cleared")
        assert client.lookup(KEYS[:3], namespace=other, tiers=[]).hits == 3, "another namespace stays"
        assert client.lookup(KEYS, namespace=NAMESPACE).hits == 0
        assert client.store(KEYS[:5], SOURCES[5:10], namespace=NAMESPACE).stored == 5


def test_a_pool_that_is_older_than_a_clear_of_its_tiers_starts_empty(serve: Callable[..., Server]) -> None:
    tiers = {"m": {"type": "mock"}}
    first = serve(l2=tiers)
    with first.connect() as client:
        client.clear(NAMESPACE, tiers=True)
        client.store(KEYS, SOURCES, namespace=NAMESPACE)
    first.stop()
    second = serve(l2=tiers)
    with second.connect() as client:
        assert client.lookup(KEYS, namespace=NAMESPACE, tiers=[]).hits == len(KEYS), "of the epoch after the clear"
    second.stop()
    cleared_elsewhere(second)
    third = serve(l2=tiers)
    with third.connect() as client:
        assert client.lookup(KEYS, namespace=NAMESPACE).hits == 0
        until(lambda: client.status()["l1"]["used_bytes"] == 0, "the pool to be freed")
        assert client.store(KEYS, SOURCES, namespace=NAMESPACE).stored == len(KEYS)
