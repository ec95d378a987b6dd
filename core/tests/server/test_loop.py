"""What a turn of the loop raises is logged and counted, and the next turn comes."""

from __future__ import annotations

import os
import resource
import select
import socket
import threading
from pathlib import Path

import pytest

from lmcache_core.clock import Clock
from lmcache_core.pool.backing import Access
from lmcache_core.server.peers.lifeline import LifelineListener
from lmcache_core.server.process.loop import Loop


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_tick_a_call_or_a_handler_that_raises_does_not_end_the_loop(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    ticks: list[float] = []

    def tick() -> float | None:
        ticks.append(loop.clock.now)
        if len(ticks) == 1:
            raise error("a fault of the tick")
        return None

    def handler(mask: int) -> None:
        os.read(reading, 1)
        handled.set()
        raise error("a fault of a handler")

    def call() -> None:
        raise error("a fault of a call")

    loop = Loop(Clock())
    reading, writing = os.pipe()
    handled, later = threading.Event(), threading.Event()
    loop.add(reading, select.EPOLLIN, handler)
    thread = threading.Thread(target=loop.run, args=(tick,), daemon=True)
    thread.start()
    loop.call(call)
    os.write(writing, b"x")
    assert handled.wait(60)
    loop.call(later.set)
    assert later.wait(60)
    loop.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert loop.faults == 3
    assert all(f"a fault of {what}" in caplog.text for what in ("the tick", "a call", "a handler"))
    loop.remove(reading)
    loop.close()
    os.close(reading)
    os.close(writing)


def test_what_a_descriptor_had_to_say_is_not_heard_by_whoever_gets_its_number() -> None:
    """In one turn: both are ready, and the handler of the first closes the other, and opens one of the same number."""
    loop = Loop(Clock())
    pipes = [os.pipe(), os.pipe()]
    heard: list[int] = []
    opened: list[int] = []

    def closes(other: int) -> None:
        if not opened:
            loop.remove(other)
            os.close(other)
            opened.extend(os.pipe())
            assert opened[0] == other
            loop.add(other, select.EPOLLIN, heard.append)
            loop.stop()

    for (ours, writing), (other, _) in (pipes, pipes[::-1]):
        loop.add(ours, select.EPOLLIN, lambda mask, other=other: closes(other))  # type: ignore[misc]
        os.write(writing, b"x")
    loop.run(lambda: None)
    assert heard == []
    loop.close()
    for fd in {*pipes[0], *pipes[1], *opened}:
        os.close(fd)


def test_what_was_called_for_before_the_first_turn_runs_before_it() -> None:
    order: list[str] = []

    def tick() -> float | None:
        order.append("tick")
        loop.stop()
        return None

    loop = Loop(Clock())
    loop.call(lambda: order.append("call"))
    loop.run(tick)
    loop.close()
    assert order == ["call", "tick"]


def test_the_time_of_a_turn_is_that_after_the_wait() -> None:
    now = 100.0
    seen: list[float] = []

    def tick() -> float | None:
        seen.append(loop.clock.now)
        return None

    def handler(mask: int) -> None:
        os.read(reading, 1)
        seen.append(loop.clock.now)
        loop.stop()

    clock = Clock(lambda: now)
    loop = Loop(clock)
    reading, writing = os.pipe()
    loop.add(reading, select.EPOLLIN, handler)
    waits = threading.Event()
    loop.call(waits.set)
    thread = threading.Thread(target=loop.run, args=(tick,), daemon=True)
    thread.start()
    assert waits.wait(60)
    now = 107.0  # what comes now comes at this time, however long ago the wait for it began
    os.write(writing, b"x")
    thread.join(60)
    assert not thread.is_alive()
    loop.remove(reading)
    loop.close()
    os.close(reading)
    os.close(writing)
    assert seen[-2:] == [107.0, 107.0], "the handler and the tick after it"


def test_a_thread_that_wakes_a_loop_while_it_closes_writes_to_nobody_elses_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(Clock())
    closing = threading.Thread(target=loop.close)
    write = os.eventfd_write

    def slow_write(fd: int, value: int) -> None:
        closing.start()
        closing.join(0.2)  # as far as it comes meanwhile
        write(fd, value)  # raises where it is closed

    monkeypatch.setattr(os, "eventfd_write", slow_write)
    loop.wake()
    closing.join(60)
    assert loop.ended


def test_a_child_forked_while_another_thread_wakes_the_loop_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(Clock())
    wakes, done = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "eventfd_write", lambda *_: (wakes.set(), done.wait()))
    threading.Thread(target=loop.wake, daemon=True).start()
    assert wakes.wait(60)  # and it does not come back
    child = threading.Thread(target=lambda: (loop.after_fork_in_child(), done.set()), daemon=True)
    child.start()
    assert done.wait(60)
    assert loop.ended


def descriptors() -> set[int]:
    """What this process has open, but for the listing itself."""
    return {int(each.name) for each in list(Path("/proc/self/fd").iterdir()) if each.is_symlink()}


def test_a_connection_that_can_neither_be_accepted_nor_turned_away_waits_and_does_not_turn_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(Clock())
    listener = LifelineListener(tmp_path, loop, Access.OWNER, ())
    accepted: list[socket.socket] = []
    listener.serve(accepted.append)
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    close, taken, turns, sweeps = os.close, [], 0, 0

    def close_and_lose(fd: int) -> None:  # another thread takes the number at once
        close(fd)
        taken.append(os.open(os.devnull, os.O_RDONLY))

    def tick() -> float:
        nonlocal turns, sweeps
        turns += 1
        if loop.clock.now >= tick_at[0]:
            sweeps += 1
            tick_at[0] = loop.clock.now + 0.02
            if sweeps == 10:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                listener.resume()
            if len(accepted) == 2:
                loop.stop()
        return tick_at[0]

    tick_at = [0.0]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    close(free)  # the next number: all below it are taken
    monkeypatch.setattr("lmcache_core.server.peers.lifeline.os.close", close_and_lose)
    try:
        for client in clients:
            client.connect(str(listener.path))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        loop.run(tick)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        monkeypatch.undo()
    assert len(accepted) == 2
    assert turns < 50, "most of them for the sweeps"
    for each in (*accepted, *clients):
        each.close()
    for number in taken:
        close(number)
    listener.close()
    loop.close()


def test_a_child_forked_after_a_listener_was_closed_closes_nobody_elses_descriptor(tmp_path: Path) -> None:
    loop, other = Loop(Clock()), os.open(os.devnull, os.O_RDONLY)
    before = descriptors()
    listener = LifelineListener(tmp_path, loop, Access.OWNER, ())
    opened = descriptors() - before
    listener.close()
    assert not descriptors() & opened
    for number in opened:
        os.dup2(other, number)  # it is somebody else's now
    listener.after_fork_in_child()
    for number in (other, *opened):
        os.close(number)  # raises where it was closed
    loop.close()
