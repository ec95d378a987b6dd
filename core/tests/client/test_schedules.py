"""Interrupts and switches of threads at every line of what keeps leases: nothing leaks, and no slot is in two hands.

An interrupt comes where the interpreter would raise one. After the last line of a `with` block it raises none before
`__exit__` runs, so none is injected there. A storm raises one more at the third line that follows, in the clean-up.
"""

from __future__ import annotations

import dis
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link.link import Link
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

NBYTES = 4096
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(6)]
STORED, FRESH = KEYS[:3], KEYS[3:]
ROOMS = tuple(
    str(Path("client", f"{name}.py"))
    for name in (
        "client",
        "link/channel",
        "link/occupancy",
        "link/reconnecting",
        "move/copying",
        "move/leases",
        "move/retrieving",
    )
)
BUDGET_S = 3.0  # for each test: a machine that is not busy comes to every line
NONE = {"promise": 0, "read": 0, "write": 0}


def store(client: Client) -> None:
    client.store(FRESH, [b"n" * NBYTES] * len(FRESH), namespace=SPACE)


def retrieve(client: Client) -> None:
    client.retrieve(STORED, [bytearray(NBYTES) for _ in STORED], namespace=SPACE)


def write_in_place(client: Client) -> None:
    with client.prepare_store(FRESH, namespace=SPACE) as lease:
        for position in lease.granted:
            lease.view(position)[:] = b"w" * NBYTES
        lease.commit()


def read_in_place(client: Client) -> None:
    with client.prepare_retrieve(STORED, namespace=SPACE) as lease:
        assert [bytes(lease.view(position)) for position in lease.granted] == [b"o" * NBYTES] * len(STORED)


WORK = [store, retrieve, write_in_place, read_in_place]


def steps(code: CodeType) -> dict[int, list[int]]:
    """For each line, the offset that begins it the first time: later ones are ways back to a `with`, to leave it."""
    found: dict[int, list[int]] = {}
    for offset, line in dis.findlinestarts(code):
        if line is not None:
            found.setdefault(line, []).append(offset)
    return found


class Injector:
    """Raises at the n-th line that the rooms run in this thread, and once more `again` lines after that."""

    def __init__(self, at: int, again: int) -> None:
        self.lines = 0
        self.raised = 0
        self.where: list[str] = []
        self._targets = {at, at + again} if again else {at}
        self._withs: dict[CodeType, dict[int, list[int]]] = {}

    def __enter__(self) -> Injector:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(ROOMS) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "line" and not self._leaves_a_with(frame):
            self.lines += 1
            if self.lines in self._targets:
                self.raised += 1
                self.where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return self._line

    def _leaves_a_with(self, frame: FrameType) -> bool:
        lines = self._withs.get(frame.f_code)
        if lines is None:
            lines = self._withs[frame.f_code] = steps(frame.f_code)
        starts = lines.get(frame.f_lineno, [])
        return len(starts) > 1 and frame.f_lasti != starts[0]


def settled(watcher: Client, client: Client) -> bool:
    client.noop()
    return bool(watcher.status()["l1"]["leases_by_kind"] == NONE)


@pytest.mark.parametrize("storm", [0, 3], ids=["once", "storm"])
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_an_interrupt_at_any_line_leaks_no_lease_and_loses_no_connection(
    server: Server, work: Callable[[Client], None], storm: int
) -> None:
    with server.connect("watcher") as watcher, server.connect(use_index=False) as client:
        assert watcher.store(STORED, [b"o" * NBYTES] * len(STORED), namespace=SPACE).stored == len(STORED)
        client.register_layout(SPACE)
        link: Link = client.links.current()
        with Injector(0, 0) as injector:
            work(client)
        assert injector.lines > 50
        lines = list(range(1, injector.lines + 1))
        random.Random(storm).shuffle(lines)
        watcher.clear(SPACE)
        watcher.store(STORED, [b"o" * NBYTES] * len(STORED), namespace=SPACE)
        until_s = time.monotonic() + BUDGET_S
        for at in lines:
            if time.monotonic() > until_s:
                break
            with suppress(KeyboardInterrupt), Injector(at, storm) as injector:
                work(client)
            if not settled(watcher, client):
                pytest.fail(f"a lease has leaked: {work.__name__}, interrupted at {injector.where}")
            watcher.clear(SPACE)
            watcher.store(STORED, [b"o" * NBYTES] * len(STORED), namespace=SPACE)
        assert client.links.current() is link


def test_no_lock_is_taken_where_an_interrupt_could_leave_it_taken(server: Server) -> None:
    """`threading.Condition`, and what is made of it, takes its lock in Python code: an interrupt before that has
    returned leaves it taken, and the next thread waits for ever. What is written in C comes back with or without it."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "__enter__":
            entered.append(str(frame.f_code))

    with server.connect("watcher") as watcher:
        watcher.store(STORED, [b"o" * NBYTES] * len(STORED), namespace=SPACE)
        client = server.connect(use_index=False)
        sys.setprofile(note)
        try:
            for work in WORK:
                work(client)
            client.free_lookup_locks(client.lookup(STORED, namespace=SPACE, hold=True).promise)
            client.lookup_nowait(STORED, namespace=SPACE, hold=True).cancel()
            client.end_session()
            client.close()
        finally:
            sys.setprofile(None)
    assert not entered


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_switch_at_any_line_and_are_closed_meanwhile_write_into_nobodys_slots(
    server: Server, seed: int
) -> None:
    """Two threads store over one client, which a third closes; a watcher takes every slot that is given back."""
    rng = random.Random(seed)
    until_s = time.monotonic() + BUDGET_S
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    turns = 0
    try:
        with server.connect("watcher") as watcher:
            while time.monotonic() < until_s:
                turns += 1
                client = server.connect()
                threads = [
                    threading.Thread(target=_busy, args=(client, rng.randrange(1 << 30), number), daemon=True)
                    for number in range(2)
                ]
                for thread in threads:
                    thread.start()
                for _ in range(rng.randrange(40)):
                    watcher.noop()
                if rng.random() < 0.5:
                    client.end_session(timeout_s=rng.choice([0.0, 5.0]))
                client.close(timeout_s=rng.choice([0.0, 5.0]))
                mine = [bytes([number, turns % 256]) * 16 for number in range(100, 140)]
                result = watcher.store(mine, [bytes([number]) * NBYTES for number in range(40)], namespace=SPACE)
                for thread in threads:
                    thread.join(60)
                    assert not thread.is_alive()
                into = [bytearray(NBYTES) for _ in mine]
                read = watcher.retrieve(mine, into, namespace=SPACE, prefix=False)
                for number, (stored, status) in enumerate(zip(result.statuses, read.statuses, strict=True)):
                    if stored is Status.STORED and status is Status.HIT:
                        assert into[number] == bytes([number]) * NBYTES
                watcher.clear(SPACE)
    finally:
        sys.setswitchinterval(former)
    assert turns


def _busy(client: Client, seed: int, number: int) -> None:
    rng = random.Random(seed)

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        if rng.random() < 0.05:
            time.sleep(0)  # another thread's turn
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.endswith(ROOMS) else None

    sys.settrace(call)
    try:
        for turn in range(20):
            key = bytes([number, turn]) * 16
            client.store([key], [b"x" * NBYTES], namespace=SPACE)
            with client.prepare_store([b"in place" + key[8:]], namespace=SPACE) as lease:
                for position in lease.granted:
                    lease.view(position)[:] = b"y" * NBYTES
    except (CacheError, ValueError) as error:
        if not any(word in str(error) for word in ("closed", "ended", "released", "aborted")):
            raise
    finally:
        sys.settrace(None)
