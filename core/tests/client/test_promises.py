"""Promises: whoever was told of one has it; one that nobody was told of is freed."""

from __future__ import annotations

import dis
import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

import lmcache_core.client.find.lookups as lookups_room
from lmcache_core.client.client import Client
from lmcache_core.client.promises import Promise, frames_of
from lmcache_core.errors import LeaseExpiredError
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

NBYTES = 4096
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as client:
        client.store(KEYS, [bytes(NBYTES)] * len(KEYS), namespace=SPACE)
        yield client


def promises(client: Client) -> int:
    return int(client.status()["l1"]["leases_by_kind"]["promise"])


@pytest.mark.parametrize("way", ["dropped", "cancelled", "dropped when it has come", "cancelled when it has come"])
def test_a_handle_that_nobody_read_frees_its_promise(client: Client, way: str) -> None:
    for _ in range(10):
        handle: Any = client.lookup_nowait(KEYS, namespace=SPACE, hold=True)
        if way.endswith("come"):
            until(lambda handle=handle: handle.done, "the answer")  # type: ignore[misc]
        if way.startswith("cancelled"):
            handle.cancel()
        handle = None
    gc.collect()
    client.noop()
    assert promises(client) == 0


def test_the_promise_of_a_handle_that_was_read_is_its_readers(client: Client) -> None:
    handle: Any = client.lookup_nowait(KEYS, namespace=SPACE, hold=True)
    result = handle.wait(WAIT_S)
    handle = None
    client.noop()
    assert promises(client) == 1
    assert client.free_lookup_locks(result.promise) == 1


def test_an_interrupted_lookup_leaves_no_promise_and_the_connection_as_it_is(client: Client) -> None:
    """The signal comes while the answer is waited for, and the server answers all the same."""
    link = client.links.current()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for turn in range(300):
            held: Promise | None = None
            try:
                signal.setitimer(signal.ITIMER_REAL, 10e-6 + turn * 1e-6)
                held = client.lookup(KEYS, namespace=SPACE, hold=True).promise
                signal.setitimer(signal.ITIMER_REAL, 0)
                client.free_lookup_locks(held)
            except KeyboardInterrupt:
                interrupted += 1
                client.free_lookup_locks(held)  # of what it was told
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    client.noop()
    assert interrupted
    assert client.links.current() is link
    assert promises(client) == 0


class AtChecks:
    """Raises at the n-th place of a room at which the interpreter looks for interrupts: where a function begins, a
    loop goes back, or a call into C has ended."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.raised = False
        self._names: dict[CodeType, dict[int, str]] = {}
        self._before = ""  # the instruction before this one, if it is of the same function, and nothing else ran since

    def __enter__(self) -> AtChecks:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._before = ""
        if not frame.f_code.co_filename.endswith(f"{os.sep}lookups.py"):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "opcode":
            code = frame.f_code
            if code not in self._names:
                self._names[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
            now, before = self._names[code][frame.f_lasti], self._before
            self._before = now
            if now == "RESUME" or before.startswith(("CALL", "JUMP_BACKWARD")):
                self._left -= 1
                if self._left == 0:
                    self.raised = True
                    raise KeyboardInterrupt
        else:  # a return: of Python code, after which nobody looks
            self._before = ""
        return self._opcode


def test_wherever_an_interrupt_comes_a_lookup_of_many_pages_is_told_of_all_its_promises_or_of_none(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups_room, "BATCH_KEYS_MAX", 2)  # so that there are several pages
    at, told = 1, 0
    while True:
        held: Promise | None = None
        try:
            with AtChecks(at) as checks:
                held = client.lookup(KEYS, namespace=SPACE, hold=True).promise
        except KeyboardInterrupt:
            told += bool(held)
        client.noop()
        assert promises(client) == (len(held.numbers) if held else 0), f"interrupted at check {at}"
        client.free_lookup_locks(held)
        if not checks.raised:
            break
        at += 1
    assert at > 20


@pytest.mark.parametrize("maps_pool", [True, False])
def test_promises_outlive_the_connection_of_their_client(client: Client, server: Server, maps_pool: bool) -> None:
    with server.connect("scheduler", maps_pool=maps_pool) as scheduler:
        held = scheduler.lookup(KEYS, namespace=SPACE, hold=True).promise
        link = scheduler.links.current()
        link.channel.close("the test ended it")
        until(lambda: sum(each["connected"] for each in client.status()["sessions"]) == 1, "the end of the connection")
        assert promises(client) == 1
        scheduler.noop()
        assert scheduler.links.current() is not link
        assert promises(client) == 1
        assert scheduler.free_lookup_locks(held) == 1  # it is this client's, in the new session as in the old
    assert promises(client) == 0


def test_the_promises_of_a_client_that_ends_end_with_it(client: Client, server: Server) -> None:
    with server.connect("scheduler", maps_pool=False) as scheduler:
        scheduler.lookup(KEYS, namespace=SPACE, hold=True)
        assert promises(client) == 1
    assert promises(client) == 0


# --- what a promise is ------------------------------------------------------------------------------------------


def test_a_promise_says_when_it_ends_and_is_renewed(client: Client) -> None:
    began = time.monotonic()
    promise = client.lookup(KEYS, namespace=SPACE, hold=True).promise
    assert promise is not None
    assert promise.keys == tuple(KEYS)
    assert promise.expires_at > began
    later = client.renew(promise)
    assert later.expires_at > promise.expires_at
    assert (later.ids, later.keys) == (promise.ids, promise.keys)
    assert client.free_lookup_locks(later) == 1
    with pytest.raises(LeaseExpiredError):
        client.renew(promise)
    assert client.free_lookup_locks(promise) == 0


def test_slices_are_redeemed_by_those_whom_they_were_given_to(client: Client, server: Server) -> None:
    found = client.lookup(KEYS, namespace=SPACE, hold=True)
    assert found.promise is not None
    handed_on: Promise = pickle.loads(pickle.dumps(found.promise))
    assert handed_on == found.promise
    for first in (0, 2):
        part = handed_on.slice(first, first + 2)
        assert promises(client) == 1
        with server.connect("worker", use_index=False) as worker:
            into = [bytearray(NBYTES) for _ in range(2)]
            assert worker.retrieve(KEYS[first : first + 2], into, namespace=SPACE, promise=part).hits == 2
    assert promises(client) == 0, "the last slice was redeemed"


def test_a_lookup_of_any_length_has_one_promise(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = b"?" * 32
    monkeypatch.setattr(lookups_room, "BATCH_KEYS_MAX", 3)  # so that there are two pages
    promise = client.lookup([*KEYS, absent], namespace=SPACE, hold=True, prefix=False).promise
    assert promise is not None
    assert len(promise.numbers) == 2
    assert promise.keys == (*KEYS, absent)
    into = [bytearray(NBYTES) for _ in range(3)]
    assert client.retrieve(KEYS[1:], into, namespace=SPACE, promise=promise.slice(1, 4)).hits == 3
    assert client.free_lookup_locks(promise) == 1, "what was not redeemed is left of the first page"
    assert client.lookup([absent], namespace=SPACE, hold=True).promise is None


def test_keys_are_cut_where_another_number_keeps_them() -> None:
    keys = [bytes([number]) * 32 for number in range(6)]
    promise = Promise((7, 7, 8, 8, 8, 0), tuple(keys), 1.0)
    assert list(frames_of(keys, promise, 2)) == [(0, 2, 7), (2, 4, 8), (4, 5, 8), (5, 6, 0)]
    assert list(frames_of(keys[::-1], promise, 9)) == [(0, 1, 0), (1, 4, 8), (4, 6, 7)]
    assert list(frames_of([keys[0], keys[0]], promise, 9)) == [(0, 2, 7)]
    assert list(frames_of([b"?" * 32], promise, 9)) == [(0, 1, 0)]
    assert list(frames_of(keys, None, 4)) == [(0, 4, 0), (4, 6, 0)]
    assert not promise.slice(5, 6)
    assert Promise.joined([promise.slice(5, 6)]) is None
