"""What a turn of the loop raises is logged and counted, and the next turn comes."""

from __future__ import annotations

import os
import select
import threading

import pytest

from lmcache_core.server.loop import Loop


def test_a_tick_a_call_or_a_handler_that_raises_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    ticks: list[float] = []

    def tick(now: float) -> float | None:
        ticks.append(now)
        if len(ticks) == 1:
            raise RuntimeError("a fault of the tick")
        return None

    def handler(mask: int) -> None:
        os.read(reading, 1)
        handled.set()
        raise RuntimeError("a fault of a handler")

    def call() -> None:
        raise RuntimeError("a fault of a call")

    loop = Loop(tick)
    reading, writing = os.pipe()
    handled, later = threading.Event(), threading.Event()
    loop.add(reading, select.EPOLLIN, handler)
    thread = threading.Thread(target=loop.run, daemon=True)
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


def test_what_was_called_for_before_the_first_turn_runs_before_it() -> None:
    order: list[str] = []

    def tick(now: float) -> float | None:
        order.append("tick")
        loop.stop()
        return None

    loop = Loop(tick)
    loop.call(lambda: order.append("call"))
    loop.run()
    loop.close()
    assert order == ["call", "tick"]
