"""A clear of much stalls nobody, and its answer is the last thing that comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link.channel import Channel, Pending
from lmcache_core.kernel.fence import STEP_OBJECTS
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

from .conftest import keys

SMALL = Namespace("small", Layout("uint8", (4096,)))
OBJECTS = 8 * STEP_OBJECTS


def fill(client: Client, count: int = OBJECTS) -> None:
    stored = client.store(keys(count), [bytes(4096)] * count, namespace=SMALL)
    assert stored.stored == count


class Turns:
    """Holds the loop's steps of a clear back, so that a test decides what comes in between."""

    def __init__(self, server: Server, patch: pytest.MonkeyPatch) -> None:
        self._go = threading.Semaphore(0)
        self._free = False
        step = server.parts.kernel.free_cleared

        def stepped(now: float, objects_max: int = STEP_OBJECTS) -> int:
            return step(now, objects_max) if self._free or self._go.acquire(blocking=False) else 0

        patch.setattr(server.parts.kernel, "free_cleared", stepped)

    def one(self) -> None:
        self._go.release()

    def all(self) -> None:
        self._free = True


@pytest.fixture
def turns(server: Server, monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(server, monkeypatch)


def begin(client: Client) -> tuple[Channel, Pending]:
    channel = client.links.current().channel
    return channel, channel.start(m.Clear(0, SMALL.id, False))


def test_others_are_served_between_the_steps_and_the_answer_comes_last(
    server: Server, client: Client, turns: Turns
) -> None:
    fill(client)
    channel, pending = begin(client)
    with server.connect() as other:
        assert other.lookup(keys(OBJECTS), namespace=SMALL).hits == 0, "it is gone at once"
        assert other.status()["l1"]["objects_by_state"]["ready"] == OBJECTS
        for _ in range(3):
            turns.one()
            other.noop()
        assert channel.poll(pending) is None
        assert other.store(keys(2), [b"\1" * 4096] * 2, namespace=SMALL).stored == 2, "anew, while the old ones wait"
        turns.all()
        cleared = channel.wait(pending, WAIT_S)
        assert (cleared.objects, cleared.nbytes, cleared.doomed) == (OBJECTS, OBJECTS * 4096, 0)
        into = [bytearray(4096), bytearray(4096)]
        assert other.retrieve(keys(2), into, namespace=SMALL).hits == 2
        assert into == [b"\1" * 4096] * 2
        assert other.status()["l1"]["objects_by_state"]["ready"] == 2


def test_a_pool_counts_as_cleared_once_nothing_is_left_of_what_another_server_has_cleared(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies before that leaves a pool that the next one clears again."""
    pytest.importorskip("lmcache_mock")
    server = start(l2={"m": {"type": "mock"}})
    turns, parts = Turns(server, monkeypatch), server.parts
    with server.connect() as client:
        fill(client)
        Epochs(parts.settings.state_dir / f"{parts.settings.name}.epochs").move(SMALL.id)
        turns.one()
        until(lambda: client.lookup(keys(OBJECTS), namespace=SMALL, tiers=[], prefix=False).hits < OBJECTS)
        assert parts.kernel.clearing
        assert parts.segment.clears == 0
        turns.all()
        until(lambda: parts.segment.clears != 0)
        assert not parts.kernel.clearing


def test_a_second_clear_is_answered_after_the_first(server: Server, client: Client, turns: Turns) -> None:
    fill(client)
    channel, first = begin(client)
    with server.connect() as other:
        other.store(keys(3), [bytes(4096)] * 3, namespace=SMALL)
        other_channel, second = begin(other)
        nothing_left = other_channel.start(m.Clear(0, None, False))
        other.noop()
        assert other_channel.poll(second) is None
        turns.all()
        assert channel.wait(first, WAIT_S).objects == OBJECTS
        assert other_channel.wait(second, WAIT_S).objects == 3
        assert other_channel.wait(nothing_left, WAIT_S).objects == 0
    assert client.status()["l1"]["used_bytes"] == 0


def test_the_clear_goes_on_when_the_session_that_asked_is_gone(server: Server, client: Client, turns: Turns) -> None:
    with server.connect() as asker:
        fill(asker)
        begin(asker)
    client.noop()
    turns.all()
    while client.status()["l1"]["used_bytes"]:
        client.noop()
    assert not server.parts.kernel.clearing


def test_no_reader_finds_in_the_index_what_a_clear_has_answered_for(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    if server.parts.l1.index is None:
        pytest.skip("without the C extension there is no index")
    with server.connect() as client:
        fill(client)
        assert server.parts.l1.index.index.ready == OBJECTS
        client.clear(SMALL)
        assert server.parts.l1.index.index.ready == 0


def test_a_server_that_is_told_to_end_finishes_its_clears_first(tmp_path: Path) -> None:
    name, run = f"t{os.urandom(5).hex()}", tmp_path / "run"
    argv = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--name", name, "--runtime_dir", str(run)]
    argv += ["--state_dir", str(tmp_path / "state"), "--l1.size_bytes", "128MiB", "--l1.backing", "memfd"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with Client.connect(name, runtime_dir=run) as client:
            count = 20_000  # some eighty steps
            while client.store(keys(count), [bytes(4096)] * count, namespace=SMALL).stored < count:
                pass  # the pool is still being populated
            channel, pending = begin(client)
            process.send_signal(signal.SIGTERM)
            cleared = channel.wait(pending, WAIT_S)
            assert cleared.objects == count
        assert process.wait(WAIT_S) == 0
