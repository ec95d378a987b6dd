"""What a turn of the loop costs while the server has more to do than one turn may take."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from lmcache_core.clock import Clock
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

from .conftest import keys

MIB = 1 << 20
SMALL = Namespace("small", Layout("uint8", (4096,)))
LARGE = Namespace("large", Layout("uint8", (64 * MIB,)))
POOL_BYTES = 512 * MIB
ROUNDS = 4
TRIES = 5  # what else the machine does makes a turn dearer, and never cheaper
TURN_CPU_S = 2e-3


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The loop's CPU seconds at each turn. The collector is left to the host of an embedded server; `serve` keeps it
    short."""
    begin, times = Clock.turn, list[float]()

    def noted(clock: Clock) -> float:
        times.append(time.thread_time())
        return begin(clock)

    monkeypatch.setattr(Clock, "turn", noted)
    gc.disable()
    yield times
    gc.enable()


def undo_much(server: Server, turns: list[float], first: int) -> list[float]:
    """Beside a client that asks for one key at a time: a large object in the place of 16,384 small ones, the end of a
    worker with 16,384 slots and promises of a quarter of the pool, and a clear. CPU seconds of the turns meanwhile."""
    slots, granted = server.parts.segment.info.data_bytes // 4096, 1 << 14
    with server.connect("judge") as judge, server.connect("filler") as filler:
        guest = server.connect("guest")
        lease = guest.prepare_store(keys(granted, first), namespace=SMALL)
        named = keys(slots - granted, first + granted)
        filler.store(named, [bytes(4096)] * len(named), namespace=SMALL)
        promised = guest.lookup(named[-(slots // 4) :], namespace=SMALL, hold=True, prefix=False)
        done = threading.Event()

        def undo() -> None:
            filler.store(keys(1, first), [bytes(64 * MIB)], namespace=LARGE)
            guest.close()
            filler.clear(namespace=SMALL)
            done.set()

        began = len(turns)
        thread = threading.Thread(target=undo)
        thread.start()
        while not done.is_set():
            judge.lookup(keys(1, first), namespace=SMALL)
        thread.join()
        assert lease.statuses
        assert promised.promise
        filler.clear(namespace=LARGE)
        return [after - before for before, after in pairwise(turns[began:])]


@pytest.mark.slow
def test_a_turn_stays_below_two_milliseconds_whatever_has_to_be_undone(
    turns: list[float], start: Callable[..., Server]
) -> None:
    server = start(l1={"size_bytes": POOL_BYTES, "watermark": 1.0})
    worst: list[float] = []
    for attempt in range(TRIES):
        costs: list[float] = []
        for number in range(ROUNDS):
            costs += undo_much(server, turns, (attempt * ROUNDS + number) << 18)
        worst.append(sorted(costs)[int(len(costs) * 0.999)])
        if worst[-1] < TURN_CPU_S:
            break
    with server.connect("looker") as looker:
        status = looker.status()
    assert status["stores_prepared"] == len(worst) * ROUNDS, "each large object had to wait for its slabs"
    assert status["longest_turn"]["objects"] > 0
    assert status["longest_turn"]["ms"] > 0
    assert min(worst) < TURN_CPU_S, (
        f"one turn in a thousand took over {[f'{1e3 * each:.2f}' for each in worst]} ms of CPU"
    )
