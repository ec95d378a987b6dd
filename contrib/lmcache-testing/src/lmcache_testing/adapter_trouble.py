"""Deadlines; a medium that hangs, stalls, is locked or is missing; and closing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem, Usage
from lmcache_testing import material
from lmcache_testing.contract import Contract, not_claimed, not_judged
from lmcache_testing.stepping import Stepped, own_modules
from lmcache_testing.watch import NotBackError, watched

BATCH_METHODS = ("exists", "load", "scan", "delete", "store")
PAYLOAD = 20_000
ITEMS = 6  # of one call: an adapter that gives each item the whole time is late
GOING = 31  # first number of the keys that are deleted


def calls_of(adapter: L2Adapter, deadline: float) -> dict[str, Callable[[], Any]]:
    """Every method that talks to the medium: keys from 1 on are stored and loaded, those from GOING on are deleted."""
    several = range(min(ITEMS, adapter.capabilities.batch_keys_max))
    keys = [material.key(1 + number) for number in several]
    going = [material.key(GOING + number) for number in several]
    return {
        "store": lambda: adapter.store([StoreItem(key, [memoryview(b"new bytes")]) for key in keys], deadline),
        "exists": lambda: adapter.exists(keys, deadline),
        "load": lambda: adapter.load([LoadItem(key, [memoryview(bytearray(PAYLOAD))]) for key in keys], deadline),
        "delete": lambda: adapter.delete(going, deadline),
        "set_aside": lambda: adapter.set_aside(going, deadline),
        "scan": lambda: adapter.scan(None, deadline),
        "usage": lambda: adapter.usage(),
    }


def claimed(adapter: L2Adapter) -> list[str]:
    """The batch methods that this adapter has."""
    able = {"delete": adapter.capabilities.delete, "scan": adapter.capabilities.scan}
    return [name for name in BATCH_METHODS if able.get(name, True)]


class TroubleTests(Contract):
    """What the lanes rely on when things go wrong."""

    hang_deadline_s: ClassVar[float] = 0.5
    hang_slack_s: ClassVar[float] = 2.0  # how late an answer may be; the time-outs of libraries are later

    # --- deadlines ------------------------------------------------------------------------------------------
    def test_what_is_past_its_deadline_is_answered_and_may_be_tried_again(self, adapter: L2Adapter) -> None:
        self._store_both(adapter)
        done = {
            name: self._expect_in_time(adapter, name, -1.0, "asked with a deadline that had passed")
            for name in claimed(adapter)
        }
        self._expect_well(adapter, "after calls with a deadline that had passed")
        _expect_true(adapter, done, "with a deadline that had passed")

    def test_no_call_takes_long_beyond_its_deadline(self, adapter: L2Adapter) -> None:
        """In normal operation too: a call that the medium cannot finish in time fails by its deadline."""
        material.expect_stored(adapter, material.key(1), b"object")
        for name in claimed(adapter):
            self._expect_in_time(adapter, name, self.hang_deadline_s, "with nothing wrong")
        material.expect_stored(adapter, material.key(1), b"object")
        deadline = time.monotonic() + self.hang_deadline_s
        short = LoadItem(material.key(1), [memoryview(bytearray(1))])
        try:
            watched(lambda: adapter.load([short], deadline), self.hang_deadline_s + self.hang_slack_s, "hang_slack_s")
        except NotBackError as error:
            raise AssertionError(f"load of what is larger than its buffers, with nothing wrong: {error}") from None

    def test_the_deadline_is_honoured_while_the_medium_hangs(self, adapter: L2Adapter, hang: Any) -> None:
        if hang is None:
            not_judged("a fixture 'hang' unlocks it: StallingProxy.hang() makes any medium behind TCP hang")
        self._store_both(adapter)
        with hang:
            done = {
                name: self._expect_in_time(adapter, name, self.hang_deadline_s, "while the medium answers nothing")
                for name in claimed(adapter)
            }
        self._expect_well(adapter, "once the medium answered again")
        _expect_true(adapter, done, "while the medium answered nothing")

    def test_the_deadline_is_honoured_while_an_answer_stalls(self, adapter: L2Adapter, stall: Any) -> None:
        """The medium answers without end: a time-out of each wait does not bound the call."""
        if stall is None:
            not_judged("a fixture 'stall' unlocks it: StallingProxy.stall() lets answers come byte by byte")
        whole = material.content(1, PAYLOAD)
        material.expect_stored(adapter, material.key(1), whole)
        with stall:
            for name in claimed(adapter):
                self._expect_in_time(adapter, name, self.hang_deadline_s, "while answers come byte by byte")
        self._expect_well(adapter, "once answers came as they should")

    def test_a_store_that_the_medium_refuses_is_not_done(self, adapter: L2Adapter, lock: Any) -> None:
        if lock is None:
            not_judged("a fixture 'lock' unlocks it: a context manager within which the medium takes no store")
        keys = [material.key(number) for number in range(3)]
        before, after = material.content(1, 3000), material.content(2, 3000)
        material.expect_stored(adapter, keys[0], before)
        with lock:
            items = [StoreItem(key, [memoryview(after)]) for key in keys]
            outcomes = self._answered("store", lambda: adapter.store(items, time.monotonic() + self.hang_deadline_s))
            limit = self.hang_deadline_s + self.hang_slack_s
            try:
                answers = watched(outcomes, limit, "hang_slack_s")
            except NotBackError as error:
                raise AssertionError(f"asked to store on a medium that is locked, with {limit} s: {error}") from None
        for number, (key, outcome) in enumerate(zip(keys, answers or [], strict=False)):
            done = f"a store on a locked medium was answered {material.seen(outcome)}"
            if outcome.result is Result.DONE:
                material.expect_holds(adapter, key, after, done)
            else:
                legal = outcome.result in (Result.FAILED, Result.THROTTLED, Result.FULL)
                assert legal, f"{done}: FAILED or THROTTLED, or DONE where it is stored"
                if number == 0:
                    found = [content for content in (before, after) if material.holds(adapter, key, content)]
                    assert found, f"{done}, and neither the former object nor the new one is there whole"
        self._expect_well(adapter, "once the medium was unlocked")

    # --- a medium that is not there -------------------------------------------------------------------------
    def test_a_medium_that_is_not_there_is_said_in_words(self, unreachable: Any) -> None:
        if unreachable is None:
            not_judged("a fixture 'unreachable' unlocks it: an adapter whose medium is not there")
        self._expect_errors(unreachable, "on a medium that is not there")

    def test_a_medium_that_goes_away_is_said_in_words_and_used_again(self, adapter: L2Adapter, outage: Any) -> None:
        if outage is None:
            not_judged("a fixture 'outage' unlocks it: StallingProxy.outage() takes any medium behind TCP away")
        material.expect_stored(adapter, material.key(1), b"object")
        with outage:
            self._expect_errors(adapter, "on a medium that has gone away")
        self._expect_well(adapter, "once the medium was back")

    @pytest.mark.parametrize("part", [0.3, 0.8])
    def test_a_scan_whose_medium_goes_away_is_not_called_whole(
        self, adapter: L2Adapter, outage: Any, part: float
    ) -> None:
        """It goes away between two lines of the scan. The server would forget an object that is not listed: it would
        count no room for it, and never delete it."""
        if not adapter.capabilities.scan:
            not_claimed("scan")
        if outage is None:
            not_judged("a fixture 'outage' unlocks it: StallingProxy.outage() takes any medium behind TCP away")
        keys = [material.key(number) for number in range(12)]
        for key in keys:
            material.expect_stored(adapter, key, b"object")
        lines = Stepped(lambda: material.scan(adapter), own_modules(adapter), lambda: None)
        lines.run(material.DEADLINE_S)
        if not lines.stops:
            not_judged("no line of the adapter ran in a scan: what happens within C, or a library, cannot be stopped")
        at = int(part * lines.stops)
        with contextlib.ExitStack() as gone:
            going = Stepped(
                lambda: material.scan(adapter), own_modules(adapter), lambda: gone.enter_context(outage), only=at
            )
            try:
                found = [entry.key for entry in going.run(material.DEADLINE_S)]
            except TierError:
                found = None
        done = f"the medium went away at line {at + 1} of the {lines.stops} that a scan of 12 objects runs"
        lost = len(set(keys) - set(found if found is not None else keys))
        assert not lost, f"{done}: the scan ended without {lost} of them, as if they were gone: it raises TierError"
        self._expect_well(adapter, f"{done}, and came back")

    def test_a_medium_that_refuses_for_a_while_is_no_miss(self, adapter: L2Adapter, busy: Any) -> None:
        """It answers with a refusal. An adapter that reads that as "not there" stores again, or loses track of
        objects."""
        if busy is None:
            not_judged("a fixture 'busy' unlocks it: a context manager within which the medium refuses every request")
        self._store_both(adapter)
        with busy:
            self._expect_errors(adapter, "on a medium that refuses every request", (Result.FAILED, Result.THROTTLED))
        self._expect_well(adapter, "once the medium took requests again")

    def _expect_errors(self, adapter: L2Adapter, when: str, legal: Sequence[Result] = (Result.FAILED,)) -> None:
        for name in [*claimed(adapter), "usage"]:
            try:
                answers = watched(
                    calls_of(adapter, time.monotonic() + 5.0)[name], 5.0 + self.hang_slack_s, "hang_slack_s"
                )
            except TierError as error:
                text = str(error)
                assert text, f"{name} {when} raised a TierError that says nothing"
                continue
            except NotBackError as error:
                raise AssertionError(f"{name} {when}, with a deadline of 5 s: {error}") from None
            assert name != "exists", f"exists {when} answered {list(answers)}: nobody can know, so it raises TierError"
            assert name != "scan", f"scan {when} gave a page of {len(answers.entries)} entries: it raises TierError"
            if name == "usage":
                known = isinstance(answers, Usage) and any(figure is not None for figure in answers)
                assert not known, f"usage {when} said {tuple(answers)}: it raises TierError, or says None"
                continue
            for outcome in answers:
                material.expect_types(outcome, f"{name} {when}")
                message = f"{name} {when} was answered {material.seen(outcome)}"
                assert outcome.result in legal, f"{message}: {' or '.join(each.upper() for each in legal)}"
                assert outcome.error, f"{message}, and does not say why"

    # --- the end --------------------------------------------------------------------------------------------
    def test_close_is_idempotent(self, adapter: L2Adapter) -> None:
        material.use(adapter)
        for time_ in ("once", "twice", "three times"):
            _close(adapter, time_)

    def test_an_adapter_that_was_never_used_can_be_closed(self, adapter: L2Adapter) -> None:
        for time_ in ("unused", "unused and twice"):
            _close(adapter, time_)

    @pytest.mark.parametrize("method", ["store", "exists", "load", "delete", "set_aside", "scan", "usage"])
    def test_use_after_close_raises_a_tier_error(self, adapter: L2Adapter, method: str) -> None:
        material.use(adapter)
        adapter.close()
        try:
            calls_of(adapter, material.soon())[method]()
        except TierError as error:
            assert str(error), f"{method} after close raised a TierError that says nothing"  # noqa: PT017
        else:
            raise AssertionError(f"{method} after close answered, and raises TierError")

    # --- parts ----------------------------------------------------------------------------------------------
    def _answered(self, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps the call; it returns None if it raises a retryable error."""

        def answered() -> Any:
            try:
                return call()
            except TierError as error:
                assert error.retryable, f"{name} was late, and raised what is of no use to try again: {error}"  # noqa: PT017
                return None

        return answered

    def _store_both(self, adapter: L2Adapter) -> None:
        """What exists while things go wrong: an object that is looked up, and one that is deleted."""
        for number in (1, GOING):
            material.expect_stored(adapter, material.key(number), b"object")

    def _expect_in_time(self, adapter: L2Adapter, name: str, left_s: float, when: str) -> bool:
        """Returns whether all items were DONE. Whatever it says about the object that is there must be true."""
        limit_s = max(0.0, left_s) + self.hang_slack_s
        call = calls_of(adapter, time.monotonic() + left_s)[name]
        try:
            answers = watched(self._answered(name, call), limit_s, "hang_slack_s")
        except NotBackError as error:
            raise AssertionError(f"{name} {when}, with {left_s} s until its deadline: {error}") from None
        if answers is None:
            return False
        if name == "exists":
            assert answers[0], f"exists {when} said False for what is there: it raises TierError where it cannot know"
        if name == "scan":
            page = answers
            known = page.entries or page.cursor is not None
            assert known, f"scan {when} gave one empty page, and something is there: it raises TierError"
        if name not in ("store", "load", "delete"):
            return False
        for position, outcome in enumerate(answers):
            message = f"{name} {when}, with {left_s} s until its deadline, answered {outcome!r:.200}"
            lie = name == "load" and position == 0 and outcome.result is Result.MISS
            assert not lie, f"{message} for what is there: what is not done by the deadline is FAILED, and retryable"
            assert isinstance(outcome, Outcome), message
            late = outcome.result is Result.FAILED and outcome.retryable
            legal = late or outcome.result in (Result.DONE, Result.MISS, Result.THROTTLED)
            assert legal, f"{message}: DONE, MISS, or FAILED and retryable"
        return all(outcome.result is Result.DONE for outcome in answers)

    def _expect_well(self, adapter: L2Adapter, when: str) -> None:
        """Stores and loads work, at the second attempt at the latest: a connection may have been lost."""
        for key in (material.key(8), material.key(9)):
            try:
                outcome = material.store(adapter, key, b"afterwards")
            except TierError:
                continue
            if outcome.result is Result.DONE:
                break
        material.expect_stored(adapter, material.key(1), b"afterwards")
        material.expect_holds(adapter, material.key(1), b"afterwards", when)


def _expect_true(adapter: L2Adapter, done: dict[str, bool], when: str) -> None:
    """Check what was reported DONE during the trouble, now that it is over."""
    last = min(ITEMS, adapter.capabilities.batch_keys_max)
    if done.get("store") and not (adapter.capabilities.evicts or adapter.capabilities.ttl):
        material.expect_exists(adapter, [material.key(last)], [True], f"a store {when} said DONE")
    if done.get("delete"):
        material.expect_exists(adapter, [material.key(GOING)], [False], f"a delete {when} said DONE")


def _close(adapter: L2Adapter, how: str) -> None:
    try:
        adapter.close()
    except Exception as error:
        raise AssertionError(f"closed {how}, it raised {type(error).__name__}: {error}") from error
