"""Lanes, breaker, retries, parallel calls, epochs: each by itself."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.errors import SettingsError, TierError
from lmcache_core.limits import ERROR_CHARS_MAX
from lmcache_core.protocol.requests import LookupOptions
from lmcache_core.tiers.contract import Outcome, Result, StoreItem
from lmcache_core.tiers.flow.jobs import TierLookup, select
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.retry import ask_batch, call_batch
from lmcache_core.tiers.tier.breaker import Breaker
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING, WAITED_FOR, WARM_UP, WRITE_BACK, Call, Lane
from lmcache_core.tiers.tier.parallel import Parallel
from lmcache_core.tiers.tier.trouble import Trouble
from lmcache_testing.waiting import until

from .conftest import FunctionCall

SAFETY_S = 60.0


class Posts:
    """Where a lane posts; `wait(n)` waits for so many."""

    def __init__(self) -> None:
        self.ended: deque[Call] = deque()
        self._news = threading.Condition()

    def __call__(self, call: Call) -> None:
        with self._news:
            self.ended.append(call)
            self._news.notify_all()

    def wait(self, count: int) -> list[Call]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.ended) >= count, SAFETY_S)
            return list(self.ended)


def _call(work: Any, deadline: float = 1e18, priority: Any = WAITED_FOR) -> Call:
    return FunctionCall(work, deadline, priority)


def _signal_and_wait(started: threading.Event, gate: threading.Event) -> None:
    started.set()
    assert gate.wait(SAFETY_S)


# --- lanes ------------------------------------------------------------------------------------------------
def test_a_waiting_request_goes_before_warm_up_and_first_come_first_served_within() -> None:
    posts, gate, order = Posts(), threading.Event(), []
    lane = Lane("t", 1, posts)
    lane.submit(_call(lambda: gate.wait(SAFETY_S)))
    for name, priority in [("w1", WARM_UP), ("h", HOUSEKEEPING), ("r1", WAITED_FOR), ("b", WRITE_BACK),
                           ("w2", WARM_UP), ("r2", WAITED_FOR)]:  # fmt: skip
        lane.submit(_call(lambda name=name: order.append(name), priority=priority))
    gate.set()
    posts.wait(7)
    assert order == ["r1", "r2", "b", "w1", "w2", "h"]
    assert lane.close()


def test_a_call_that_expires_in_the_queue_never_runs() -> None:
    posts, gate, ran = Posts(), threading.Event(), []
    lane = Lane("t", 1, posts)
    started = threading.Event()
    running = _call(lambda: _signal_and_wait(started, gate), deadline=10.0)
    queued = _call(lambda: ran.append(1), deadline=5.0)
    lane.submit(running)
    assert started.wait(SAFETY_S)
    lane.submit(queued)
    assert lane.expire(4.0) == []
    assert (lane.expire(6.0), queued.state) == ([queued], CallState.EXPIRED)
    assert (lane.expire(11.0), running.state, lane.hung) == ([running], CallState.LATE, 1)
    assert lane.expire(12.0) == [], "each is reported once"
    gate.set()
    assert posts.wait(1) == [running]
    assert (running.was_late, lane.hung, ran) == (True, 0, [])
    assert lane.close()


def _threads_of(lane: Lane) -> int:
    return sum(each.name == f"lane-{lane.name}" for each in threading.enumerate())


def test_a_lane_has_no_more_threads_than_it_may_and_replaces_hung_ones_a_few_times_only() -> None:
    posts, gate = Posts(), threading.Event()
    lane = Lane("t", 2, posts)
    hang = lambda: gate.wait(SAFETY_S)  # noqa: E731
    for running, now in ((2, 1.0), (4, 2.0), (4, 3.0)):
        for _ in range(5):
            lane.submit(_call(hang, deadline=now))
        until(lambda running=running: lane.running == running)
        lane.expire(now)
        assert (lane.hung, lane.queued) == (running, 0)
    lane.submit(_call(lambda: None))
    assert (lane.running, lane.queued) == (4, 1), "no more replacements: it waits"
    gate.set()
    until(lambda: lane.running == 0 and lane.queued == 0 and _threads_of(lane) <= 2)
    assert lane.hung == 0
    lane.close()


def test_a_lane_that_gets_no_thread_loses_no_call_and_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    posts = Posts()
    lane = Lane("t", 1, posts)
    with monkeypatch.context() as at_the_limit:
        at_the_limit.setattr(threading.Thread, "start", refuse)
        expires, waits = _call(lambda: None, deadline=1.0), _call(lambda: None)
        assert lane.submit(expires)
        assert lane.submit(waits)
        assert lane.expire(2.0) == [expires]
    assert (lane.queued, lane.running) == (1, 0)
    last = _call(lambda: None)
    assert lane.submit(last)
    assert posts.wait(2) == [waits, last]
    assert lane.close()


def test_a_lane_that_must_not_replace_runs_one_call_at_a_time() -> None:
    posts, together, worst = Posts(), 0, 0
    lock = threading.Lock()
    lane = Lane("t", 1, posts, replaces=False)

    def work() -> None:
        nonlocal together, worst
        with lock:
            together += 1
            worst = max(worst, together)
        time.sleep(0.001)
        with lock:
            together -= 1

    for _ in range(20):
        lane.submit(_call(work, deadline=0.0))
        lane.expire(1.0)
    until(lambda: lane.running == 0 and lane.queued == 0)
    assert worst <= 1
    lane.close()


def test_cancel_takes_back_what_has_not_begun() -> None:
    posts, gate = Posts(), threading.Event()
    lane = Lane("t", 1, posts)
    started = threading.Event()
    running, queued = _call(lambda: _signal_and_wait(started, gate)), _call(lambda: None)
    lane.submit(running)
    assert started.wait(SAFETY_S)
    lane.submit(queued)
    assert (lane.cancel(queued), lane.cancel(running)) == (True, False)
    assert not lane.close(), "a call is out"
    gate.set()
    lane.wait_idle()
    assert posts.wait(1) == [running]
    assert not lane.submit(_call(lambda: None)), "closed"


def test_an_exception_belongs_to_its_call_and_the_lane_goes_on() -> None:
    posts = Posts()
    lane = Lane("t", 1, posts)
    bad, good = _call(lambda: 1 / 0), _call(lambda: "fine")
    lane.submit(bad)
    lane.submit(good)
    posts.wait(2)
    assert isinstance(bad.error, ZeroDivisionError)
    assert good.result == "fine"
    lane.close()


# --- breaker ----------------------------------------------------------------------------------------------
def test_a_breaker_opens_after_failures_in_a_row_and_probes_with_a_growing_pause() -> None:
    breaker = Breaker(3, 1.0, 4.0)
    for outcome in "ffsff":
        breaker.succeeded() if outcome == "s" else breaker.failed(0.0, "x")
    assert breaker.allows(0.0), "a success in between starts the count again"
    breaker.failed(0.0, "refused")
    assert (breaker.state, breaker.last_error) == (BreakerState.OPEN, "refused")
    now, pauses = 0.0, []
    for _ in range(4):
        assert not breaker.allows(breaker.probe_at - 0.01)
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        assert (breaker.allows(now), breaker.allows(now)) == (True, False), "one probe at a time"
        breaker.failed(now, "still")
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    assert breaker.allows(breaker.probe_at)
    breaker.not_used()
    assert breaker.allows(breaker.probe_at), "a probe that was not made may be made later"
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_a_call_that_returns_late_brings_the_probe_forward() -> None:
    breaker = Breaker(1, 10.0, 10.0)
    breaker.failed(0.0, "late")
    breaker.came_back(2.0)
    assert breaker.allows(2.0)


# --- retries ----------------------------------------------------------------------------------------------
def test_nothing_is_retried_that_says_it_must_not_be() -> None:
    calls = []

    def call(items: Sequence[StoreItem], deadline: float) -> list[Outcome]:
        calls.append(list(items))
        return [Outcome(Result.FULL), Outcome(Result.FAILED, error="denied"), Outcome(Result.MISS)]

    outcomes = call_batch(call, ["a", "b", "c"], time.monotonic() + 60, threading.Event())
    assert [outcome.result for outcome in outcomes] == [Result.FULL, Result.FAILED, Result.MISS]
    assert calls == [["a", "b", "c"]]


def test_retries_end_with_the_deadline_and_with_the_lane() -> None:
    calls = []

    def call(items: Sequence[StoreItem], deadline: float) -> list[Outcome]:
        calls.append(1)
        return [Outcome(Result.THROTTLED)] * len(items)

    call_batch(call, ["a"], time.monotonic(), threading.Event())
    assert len(calls) == 1
    stop = threading.Event()
    stop.set()
    call_batch(call, ["a"], time.monotonic() + 60, stop)
    assert len(calls) == 2


def test_an_adapters_bug_becomes_a_failed_outcome_with_a_message() -> None:
    def call(items: Sequence[StoreItem], deadline: float) -> list[Outcome]:
        raise KeyError("bucket")

    (outcome,) = call_batch(call, ["a"], time.monotonic() + 60, threading.Event())
    assert (outcome.result, outcome.error) == (Result.FAILED, "KeyError: 'bucket'")


def test_what_a_service_said_is_one_printable_line_from_here_on() -> None:
    forged = "no\n2026-11-26 ERROR root: all is lost\x1b[2J\u2028\u202e"

    def fails(items: Sequence[StoreItem], deadline: float) -> list[Outcome]:
        raise TierError(forged)

    def breaks(items: Sequence[StoreItem], deadline: float) -> list[Outcome]:
        raise ValueError(forged)

    def answers(items: Sequence[StoreItem], deadline: float) -> list[Outcome]:
        return [Outcome(Result.FULL, error=forged)]

    for call in (fails, breaks, answers):
        (outcome,) = call_batch(call, ["a"], time.monotonic(), threading.Event())
        assert outcome.error.isprintable()
        assert "no?2026-11-26 ERROR root: all is lost" in outcome.error


def test_a_tiers_last_error_is_one_printable_line_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble("far", Counter())
    trouble.failed("store", "no\nERROR" + "x" * 10_000, 0.0)
    assert trouble.text.startswith("no?ERROR")
    assert len(trouble.text) == ERROR_CHARS_MAX
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_exists_is_retried_only_if_the_error_says_so() -> None:
    calls = []

    def call(keys: Sequence[bytes], deadline: float) -> list[bool]:
        calls.append(1)
        if len(calls) < 3:
            raise TierError("reset", retryable=True)
        return [True]

    assert ask_batch(call, [b"k"], time.monotonic() + 60, threading.Event()) == [True]
    calls.clear()
    with pytest.raises(TierError, match="denied"):
        ask_batch(_raises(TierError("denied", retryable=False)), [b"k"], time.monotonic() + 60, threading.Event())
    with pytest.raises(TierError, match="2 answers for 1"):
        ask_batch(lambda keys, deadline: [True, True], [b"k"], time.monotonic() + 60, threading.Event())


def _raises(error: Exception) -> Callable[..., NoReturn]:
    def call(*arguments: object) -> Any:
        raise error

    return call


# --- parallel ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("connections", [1, 2, 5])
def test_parallel_keeps_order_and_its_bound(connections: int) -> None:
    parallel, lock = Parallel("t", connections), threading.Lock()
    together = worst = 0

    def work(number: int) -> int:
        nonlocal together, worst
        with lock:
            together += 1
            worst = max(worst, together)
        time.sleep(0.001)
        with lock:
            together -= 1
        return number

    assert parallel.run([partial(work, n) for n in range(30)]) == list(range(30))
    assert worst <= connections
    assert parallel.run([]) == []


def test_parallel_raises_the_first_error_after_all_calls_have_ended() -> None:
    parallel, ended = Parallel("t", 4), []

    def work(number: int) -> None:
        time.sleep(0.001 * (5 - number))
        ended.append(number)
        if number in (1, 3):
            raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 1"):
        parallel.run([partial(work, n) for n in range(5)])
    assert sorted(ended) == [0, 1, 2, 3, 4]


def test_parallel_works_on_while_all_its_threads_hang() -> None:
    parallel, gate = Parallel("t", 3), threading.Event()
    hung = threading.Thread(target=parallel.run, args=([lambda: gate.wait(SAFETY_S)] * 6,))
    hung.start()
    assert parallel.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
    gate.set()
    hung.join()


# --- epochs -----------------------------------------------------------------------------------------------
@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12))
def test_an_epoch_only_ever_rises_and_a_clear_of_all_raises_everyones(moves: list[int | None]) -> None:
    epochs = Epochs()
    for namespace in moves:
        before = {n: epochs.of(n) for n in range(5)}
        epochs.move(namespace)
        for n in range(5):
            moved = namespace is None or n == namespace
            assert epochs.of(n) > before[n] if moved else epochs.of(n) == before[n]


def test_epochs_survive_a_restart_and_a_broken_file_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "state" / "epochs.json"
    epochs = Epochs(path)
    epochs.move(2**64 - 1)
    epochs.move(None)
    epochs.move(3)
    again = Epochs(path)
    assert [again.of(n) for n in (2**64 - 1, 3, 4)] == [epochs.of(n) for n in (2**64 - 1, 3, 4)] == [2, 3, 2]
    assert sorted(file.name for file in path.parent.iterdir()) == ["epochs.json"]
    path.write_text("no epochs\n")
    with pytest.raises(SettingsError, match=r"epochs\.json"):
        Epochs(path)


def test_an_epoch_that_cannot_be_kept_is_not_used_and_the_error_says_where_to_let_us_write(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    epochs = Epochs(tmp_path / "state" / "epochs.json")
    with pytest.raises(SettingsError, match="state_dir"):
        epochs.move(3)
    assert epochs.of(3) == 0


# --- selection --------------------------------------------------------------------------------------------
@given(st.lists(st.sampled_from("LTN"), max_size=12), st.integers(1, 5))
def test_a_window_is_the_last_run_that_can_be_served(where: list[str], window: int) -> None:
    missing = [i for i, place in enumerate(where) if place != "L"]  # L: in the L1, T: on a tier, N: nowhere
    request = TierLookup(1, 1, [b""] * len(where), missing, 0.0, LookupOptions(window=window))
    chosen = select(request, {i: "t" for i, place in enumerate(where) if place == "T"})
    ends = [e for e in range(len(where) + 1) if "N" not in where[max(0, e - window) : e]]
    assert chosen.hits == max(ends)
    start = max(0, chosen.hits - window)
    assert list(chosen.positions) == [i for i in range(start, chosen.hits) if where[i] == "T"]


@given(st.lists(st.sampled_from("LTN"), max_size=12))
def test_a_prefix_ends_where_the_first_key_is_nowhere(where: list[str]) -> None:
    missing = [i for i, place in enumerate(where) if place != "L"]
    request = TierLookup(1, 1, [b""] * len(where), missing, 0.0)
    chosen = select(request, {i: "t" for i, place in enumerate(where) if place == "T"})
    assert chosen.hits == "".join([*where, "N"]).index("N")
    assert list(chosen.positions) == [i for i in range(chosen.hits) if where[i] == "T"]


def test_an_adapter_that_panics_fails_its_batch_and_not_its_lane() -> None:
    """A library in Rust panics with a BaseException."""

    class Panic(BaseException):
        pass

    def call(keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        raise Panic("index out of bounds")

    outcomes = call_batch(call, [b"a", b"b"], time.monotonic() + 60, threading.Event())
    assert [one.result for one in outcomes] == [Result.FAILED] * 2
    assert "Panic: index out of bounds" in outcomes[0].error
