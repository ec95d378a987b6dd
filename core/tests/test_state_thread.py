from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core import state_thread
from lmcache_core.errors import SettingsError
from lmcache_core.limits import STATE_CALL_S, STATE_CALLS_MAX, STATE_THREADS_LEFT_MAX
from lmcache_core.state_thread import StateThread, remove_name, within
from lmcache_testing.waiting import until


class Turns:
    """The loop: runs what is posted, when the test says."""

    def __init__(self) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.answers: list[tuple[object, Exception | None]] = []

    def answer(self, result: object, error: Exception | None) -> None:
        self.answers.append((result, error))

    def turn(self) -> None:
        self.posted.get(timeout=60)()


def test_a_call_is_answered_on_the_loops_thread_with_what_it_returned_or_raised() -> None:
    turns = Turns()
    state = StateThread(turns.posted.put)
    error = OSError("no disk")

    def fails() -> None:
        raise error

    state.ask(lambda: "kept", turns.answer)
    state.ask(fails, turns.answer)
    turns.turn()
    turns.turn()
    state.close()
    assert turns.answers == [("kept", None), (None, error)]


def test_a_call_that_hangs_is_answered_as_late_once_and_those_behind_it_never_begin() -> None:
    turns, gate, hangs, begun = Turns(), threading.Event(), threading.Event(), []
    state = StateThread(turns.posted.put)

    def hang() -> None:
        hangs.set()
        gate.wait()

    state.ask(hang, turns.answer)
    hangs.wait()
    state.ask(lambda: begun.append("second"), turns.answer)
    state.step(time.monotonic() + STATE_CALL_S + 1.0)
    assert [str(error)[:40] for _, error in turns.answers] == ["the state directory has not answered for"] * 2
    gate.set()
    state.ask(lambda: "third", turns.answer)
    turns.turn()  # of the first, which comes too late
    turns.turn()
    state.close()
    assert begun == []
    assert turns.answers[2:] == [("third", None)]


def test_a_call_that_never_returns_is_left_behind_and_others_go_on_in_another_thread(tmp_path: Path) -> None:
    turns, gate, hangs, renewed, wrote = Turns(), threading.Event(), threading.Event(), [], []
    state = StateThread(turns.posted.put, tmp_path)
    state.on_left.append(lambda: renewed.append(1))

    def hang() -> None:
        hangs.set()
        gate.wait()
        state_thread.check_not_left()
        wrote.append("an old line")

    state.ask(hang, turns.answer)
    hangs.wait()
    state.step(time.monotonic() + STATE_CALL_S + 1.0)
    assert (len(renewed), state.status()) == (1, {"waiting": 0, "hung": 1})
    state.ask(lambda: wrote.append("a new line"), turns.answer)
    turns.turn()
    assert turns.answers[-1] == (None, None)
    gate.set()
    turns.turn()  # of the one that was left behind: nobody is answered twice
    assert (wrote, len(turns.answers)) == (["a new line"], 2)
    until(lambda: not state.status()["hung"])
    state.close()


@pytest.mark.parametrize("starts", [True, False])
def test_a_thread_that_returns_while_another_takes_over_takes_no_call(
    monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """Also where the other one cannot be started: then the next step tries again."""
    turns, gate, hangs = Turns(), threading.Event(), threading.Event()
    state = StateThread(turns.posted.put)
    former, threads = state._thread, [state._thread]
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        threads.append(thread)  # type: ignore[arg-type]
        if len(threads) == 2:
            gate.set()
            former.join(1.0)  # at any moment of the start
            if not starts:
                raise RuntimeError("can't start new thread")
        start(thread)

    def hang() -> None:
        hangs.set()
        gate.wait()

    state.ask(hang, turns.answer)
    assert hangs.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(state_thread._StateWorker, "start", start_late)
        for _ in range(3):
            state.step(time.monotonic() + STATE_CALL_S + 1.0)
    assert not former.is_alive()
    turns.answers.clear()
    for _ in range(3):
        state.ask(lambda: state_thread.check_not_left() or threading.current_thread(), turns.answer)
    for _ in range(4):
        turns.turn()
    state.close()
    assert turns.answers == [(threads[-1], None)] * 3
    assert threads[-1] is not former


def test_what_the_next_thread_uses_is_renewed_before_it_takes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, gate, hangs, owner = Turns(), threading.Event(), threading.Event(), ["former"]
    state = StateThread(turns.posted.put)
    state.on_left.append(lambda: owner.append("next"))
    start = threading.Thread.start

    def start_and_run(thread: threading.Thread) -> None:
        start(thread)
        turns.turn()  # the new thread's first call ends before its start returns

    def hang() -> None:
        hangs.set()
        gate.wait()

    state.ask(hang, turns.answer)
    assert hangs.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(state_thread._StateWorker, "start", start_and_run)
        made = time.monotonic()
        patched.setattr(time, "monotonic", lambda: made + STATE_CALL_S + 1.0)
        state.ask(lambda: owner[-1], turns.answer)  # in time
        state.step(made + STATE_CALL_S + 1.0)
    assert turns.answers[-1] == ("next", None)
    gate.set()
    state.close()


def test_threads_that_are_left_behind_are_bounded(tmp_path: Path) -> None:
    turns, gate = Turns(), threading.Event()
    state = StateThread(turns.posted.put, tmp_path)
    hangs = threading.Semaphore(0)

    def hang() -> None:
        hangs.release()
        gate.wait()

    for _ in range(STATE_THREADS_LEFT_MAX + 1):
        state.ask(hang, turns.answer)
        assert hangs.acquire(timeout=60)
        state.step(time.monotonic() + STATE_CALL_S + 1.0)
    assert state.status()["hung"] == STATE_THREADS_LEFT_MAX + 1
    state.step(time.monotonic() + STATE_CALL_S + 1.0)
    state.ask(lambda: "kept", turns.answer)
    gate.set()
    until(lambda: turns.posted.qsize() == STATE_THREADS_LEFT_MAX + 2)
    for _ in range(STATE_THREADS_LEFT_MAX + 2):
        turns.turn()
    assert turns.answers[-1] == ("kept", None)
    state.close()


def test_nobody_takes_over_before_the_directory_answers() -> None:
    turns, gates, looks = Turns(), [threading.Event(), threading.Event()], threading.Event()

    class Directory:
        def iterdir(self) -> list[str]:
            looks.set()
            gates[1].wait()
            return []

    directory = Directory()
    state, begun = StateThread(turns.posted.put, directory), threading.Event()
    state.ask(lambda: begun.set() or gates[0].wait(), turns.answer)
    assert begun.wait(60)
    state.step(time.monotonic() + STATE_CALL_S + 1.0)
    assert looks.wait(60)
    state.ask(lambda: "too late", turns.answer)
    state.step(time.monotonic() + STATE_CALL_S + 1.0)
    assert state.status()["hung"] == 1, "no third thread: the second one still looks"
    gates[1].set()
    state.ask(lambda: "kept", turns.answer)
    turns.turn()
    assert turns.answers[-1] == ("kept", None)
    gates[0].set()
    state.close()


def test_a_start_does_not_wait_for_a_state_directory_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_thread, "START_STEP_S", 0.05)
    monkeypatch.setattr(state_thread, "STATE_END_S", 0.0)
    gate = threading.Event()
    state = StateThread(lambda function: None)
    with pytest.raises(SettingsError, match="see whether its disk or mount hangs"):
        state.wait(gate.wait)
    gate.set()
    state.close()


def test_changes_beyond_the_limit_are_refused_while_the_directory_hangs() -> None:
    gate = threading.Event()
    state = StateThread(lambda function: None)
    for _ in range(STATE_CALLS_MAX):
        state.ask(gate.wait, lambda result, error: None)
    with pytest.raises(SettingsError, match="does not answer"):
        state.ask(gate.wait, lambda result, error: None)
    gate.set()
    state.close()


def test_a_call_of_its_own_thread_is_undone_if_it_comes_too_late() -> None:
    gate, undone = threading.Event(), queue.Queue[str]()

    def slow() -> str:
        gate.wait()
        return "made"

    with pytest.raises(SettingsError, match="too late"):
        within(0.01, slow, SettingsError("too late"), undone.put)
    gate.set()
    assert undone.get(timeout=60) == "made"


def test_a_call_of_its_own_thread_returns_or_raises_what_it_would_have(tmp_path: Path) -> None:
    late = SettingsError("too late")
    assert within(60.0, lambda: "made", late) == "made"
    with pytest.raises(FileNotFoundError):
        within(60.0, (tmp_path / "none").read_bytes, late)


def test_a_name_whose_directory_hangs_is_left_behind_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_thread, "NAME_REMOVE_S", 0.01)
    gate = threading.Event()
    remove_name(tmp_path / "socket", gate.wait)
    gate.set()
    assert "socket is left behind" in caplog.text
