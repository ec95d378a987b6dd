"""`adopt.verify = "background"`: what a server checks beside serving, and what it must not do meanwhile."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_core.client.results import Status
from lmcache_core.clock import Clock
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import VERIFY_STEP_BYTES, VERIFY_STEP_LOOKS, VERIFY_STEP_OBJECTS
from lmcache_core.native import native
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.server.pool import verifying
from lmcache_core.server.pool.verifying import Checked, Verifying
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import WAIT_S

from .conftest import MIB, buffers, keys_of, payload

pytestmark = pytest.mark.skipif(native is None, reason="adoption needs the C extension")

OBJECTS = 100
SMALL = Namespace("small", Layout("uint8", (5000,)))


class Gate:
    """Stands before the reading of each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open, self.through = threading.Event(), threading.Event(), threading.Event()
        self.steps: list[tuple[int, int, str]] = []  # objects, bytes, who read them
        read, finish = Verifying._read, Verifying._finish

        def gated(self_: Verifying, step: Sequence[Checked]) -> None:
            nbytes = sum(each.nbytes for each in step)
            self.steps.append((len(step), nbytes, threading.current_thread().name))
            self.reached.set()
            assert self.open.wait(WAIT_S)
            read(self_, step)

        def finishing(self_: Verifying) -> None:
            finish(self_)
            self.through.set()

        monkeypatch.setattr(Verifying, "_read", gated)
        monkeypatch.setattr(Verifying, "_finish", finishing)

    def finished(self, server: Server) -> Verifying:
        """Let it go on, and wait for its end."""
        self.open.set()
        assert self.through.wait(WAIT_S)
        assert server.parts.adopting is not None
        assert server.parts.adopting.verifying is not None
        return server.parts.adopting.verifying


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def successor(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """A server that goes on with a pool of OBJECTS objects; `start` it."""
    settings = server_settings(tmp_path, l1={"size_bytes": 4 * MIB, "keep_pool": True})
    l1 = {"size_bytes": 4 * MIB, "adopt": {"verify": "background"}}
    try:
        with Server(settings) as former, former.connect() as client:
            assert former.parts.populator.wait(WAIT_S)
            keys, sources = keys_of(*range(OBJECTS)), [payload(SMALL, number) for number in range(OBJECTS)]
            assert client.store(keys, sources, namespace=SMALL).stored == OBJECTS
        yield lambda: Server(server_settings(tmp_path, name=settings.name, l1=l1))
    finally:
        segment_path(settings.name).unlink(missing_ok=True)


def slot_of(server: Server, number: int) -> int:
    """Where an object lies, by the index."""
    assert server.parts.l1.index is not None
    (key,) = keys_of(number)
    entry = server.parts.l1.index.index.entry(SMALL.id, key)
    assert entry is not None
    return int(entry["offset"])


def test_everybody_is_served_while_a_step_s_bytes_are_read(gate: Gate, successor: Callable[[], Server]) -> None:
    with successor() as server, server.connect() as client:
        assert gate.reached.wait(WAIT_S)
        for _ in range(20):
            client.ping()
        assert client.retrieve(keys_of(7), buffers(SMALL, 1), namespace=SMALL).statuses == [Status.HIT]
        fresh = Namespace("fresh", SMALL.layout)
        assert client.store(keys_of("new"), [payload(fresh, 3)], namespace=fresh).stored == 1
        report = client.status()["pool"]["adopted"]["checked"]
        assert report == {"verified": 0, "verified_bytes": 0, "damaged": 0, "verified_s": None}
        check = gate.finished(server)
        assert (check.verified, check.damaged) == (OBJECTS, 0), "what was stored since needs no check"
        assert {who for _, _, who in gate.steps} == {"lmcache-verify"}


def test_no_turn_of_the_loop_picks_or_settles_more_than_one_step(
    gate: Gate, successor: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "VERIFY_STEP_OBJECTS", 8)
    monkeypatch.setattr(verifying, "VERIFY_STEP_LOOKS", 64)
    server = successor()
    turns = 0
    picked: Counter[int] = Counter()
    settled: Counter[int] = Counter()
    turn, settle, walk = Clock.turn, server.parts.kernel.settle_verified, server.parts.kernel.allocator.walk

    def counted_turn(clock: Clock) -> float:
        nonlocal turns
        turns += clock is server.parts.clock
        return turn(clock)

    def counted_settle(sound: object, damaged: object, now: float) -> object:
        settled[turns] += len(sound) + len(damaged)
        return settle(sound, damaged, now)

    def counted_walk() -> object:
        for item in walk():
            picked[turns] += 1
            yield item

    monkeypatch.setattr(Clock, "turn", counted_turn)
    monkeypatch.setattr(server.parts.kernel, "settle_verified", counted_settle)
    monkeypatch.setattr(server.parts.kernel.allocator, "walk", counted_walk)
    with server:
        check = gate.finished(server)
    assert check.verified == OBJECTS
    assert check.steps == math.ceil(OBJECTS / 8) == len(settled), "one step was settled in one turn"
    assert max(settled.values()) == 8
    assert max(picked.values()) <= 64, "looks in one turn"


def test_a_step_has_no_more_objects_and_bytes_than_its_limits(gate: Gate, successor: Callable[[], Server]) -> None:
    with successor() as server:
        unverified = server.parts.kernel.adoption.unverified
        gate.finished(server)
        assert unverified(VERIFY_STEP_OBJECTS, VERIFY_STEP_BYTES, VERIFY_STEP_LOOKS) is None
    assert [objects for objects, _, _ in gate.steps] == [OBJECTS]
    assert OBJECTS < VERIFY_STEP_OBJECTS


def test_bytes_end_a_step_before_objects_do(
    gate: Gate, successor: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_bytes = 8192
    monkeypatch.setattr(verifying, "VERIFY_STEP_BYTES", 3 * slot_bytes - 1)
    with successor() as server:
        assert gate.finished(server).verified == OBJECTS
    assert {objects for objects, _, _ in gate.steps} == {3, 1}


@pytest.mark.parametrize("use_index", [True, False])
def test_who_reads_before_the_check_checks_by_itself(
    gate: Gate, successor: Callable[[], Server], use_index: bool
) -> None:
    server = successor()
    offset = slot_of(server, 5)
    server.parts.segment.buffer[offset + 17] ^= 1
    with server, server.connect(use_index=use_index) as client:
        assert gate.reached.wait(WAIT_S)
        found = client.retrieve(keys_of(4, 5), buffers(SMALL, 2), namespace=SMALL, prefix=False)
        assert found.statuses == [Status.HIT, Status.MISS]
        assert found.reasons[1] is Reason.DAMAGED
        check = gate.finished(server)
        assert (check.verified, check.damaged) == (OBJECTS - 1, 0), "its reader had it deleted"


def test_what_is_evicted_while_it_is_read_is_not_called_damaged(gate: Gate, successor: Callable[[], Server]) -> None:
    with successor() as server, server.connect() as client:
        assert gate.reached.wait(WAIT_S)
        client.clear(SMALL)
        again = [payload(SMALL, number + 1) for number in range(OBJECTS)]  # others' bytes in the slots that are read
        assert client.store(keys_of(*range(OBJECTS)), again, namespace=SMALL).stored == OBJECTS
        check = gate.finished(server)
        assert (check.verified, check.damaged) == (0, 0)
        into = buffers(SMALL, OBJECTS)
        assert client.retrieve(keys_of(*range(OBJECTS)), into, namespace=SMALL).hits == OBJECTS
        assert into == again


def test_entries_say_that_nobody_needs_to_check_them_unless_they_were_scribbled_over(
    gate: Gate, successor: Callable[[], Server]
) -> None:
    with successor() as server:
        assert gate.reached.wait(WAIT_S)
        assert server.parts.l1.index is not None
        index = server.parts.l1.index.index
        entries = [index.entry(SMALL.id, key) for key in keys_of(*range(OBJECTS))]
        assert all(entry is not None and entry["unverified"] for entry in entries)
        numbers = server.parts.segment.index_numbers
        row = numbers["index_offset"] + -(-numbers["entries"] * 2 // 4096) * 4096 + entries[9]["place"] * 128
        server.parts.segment.buffer[row + 9 * 8] ^= 1  # its checksum
        gate.finished(server)
        after = [index.entry(SMALL.id, key) for key in keys_of(*range(OBJECTS))]
        assert [at for at, entry in enumerate(after) if entry is not None and entry["unverified"]] == [9]
        assert [entry["generation"] for entry in entries] == [entry["generation"] for entry in after]


def test_a_server_that_ends_does_not_wait_for_the_whole_check(
    gate: Gate, successor: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "VERIFY_STEP_OBJECTS", 8)
    server = successor()
    with server:
        assert gate.reached.wait(WAIT_S)
        server.parts.loop.call(gate.open.set)
    assert len(gate.steps) <= 2
    assert server.end_faults == 0
    assert server.parts.adopting is not None
    assert server.parts.adopting.verifying is not None
    assert not [each for each in threading.enumerate() if each.name == "lmcache-verify"]
