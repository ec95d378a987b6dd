"""Late calls, and calls without a deadline: what they must not do to their caller."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.adapter_trouble import PAYLOAD, calls_of, claimed
from lmcache_testing.contract import Contract, not_judged
from lmcache_testing.watch import NotBackError, watched

NO_DEADLINE_S = 1.0  # the contract's limit for calls without a deadline
DAY_S = 86400.0
PASSED, HANGS, STALLS = "its deadline had passed", "the medium answered nothing", "answers came byte by byte"


class LateTests(Contract):
    """A lane reuses its buffers when a call returns, and cannot give up a call without a deadline."""

    hang_deadline_s: ClassVar[float]
    hang_slack_s: ClassVar[float]

    # --- buffers of calls that gave up --------------------------------------------------------------------------
    @pytest.mark.parametrize("method", ["load", "store"])
    @pytest.mark.parametrize("when", [PASSED, HANGS, STALLS], ids=["passed", "hangs", "stalls"])
    def test_the_buffers_of_a_late_call_are_the_callers_again(
        self, adapter: L2Adapter, hang: Any, stall: Any, when: str, method: str
    ) -> None:
        """Whatever the call answered: no thread of the adapter reads from them, or writes to them, any more."""
        former, fresh = material.content(1, PAYLOAD), material.content(2, PAYLOAD)
        memory = bytearray(fresh)
        material.expect_stored(adapter, material.key(1), former)
        done = f"a {method} gave up because {when}"
        with _trouble(when, hang, stall):
            kept = self._give_up(adapter, method, memory, when)
            _expect_free(kept, memory, done)
            memory[:] = bytes([material.FILL]) * PAYLOAD  # by now the slot belongs to another object
        _settle(adapter)
        beside = sum(byte != material.FILL for byte in memory)
        assert not beside, f"{done}: {beside:,} bytes of its buffer were written to afterwards"
        if method == "store":
            outcome, found = material.load(adapter, material.key(1), PAYLOAD)
            whole = outcome.result is not Result.DONE or found in (former, fresh)
            assert whole, f"{done}, and its buffer was used for another object: that one's bytes were stored"

    def _give_up(self, adapter: L2Adapter, method: str, memory: bytearray, when: str) -> weakref.ref[memoryview]:
        """Lend `memory` to a call that cannot finish in time. Returns a reference to the view that was lent."""
        left_s = -1.0 if when == PASSED else self.hang_deadline_s
        kept: list[weakref.ref[memoryview]] = []

        def call() -> None:
            view = memoryview(memory)
            kept.append(weakref.ref(view))
            with contextlib.suppress(TierError):  # the answers are tested by another claim
                if method == "load":
                    adapter.load([LoadItem(material.key(1), [view])], time.monotonic() + left_s)
                else:
                    adapter.store([StoreItem(material.key(1), [view])], time.monotonic() + left_s)

        try:
            watched(call, max(0.0, left_s) + self.hang_slack_s, "hang_slack_s")
        except NotBackError as error:
            raise AssertionError(f"asked to {method}, and {when}: {error}") from None
        return kept[0]

    # --- no deadline ----------------------------------------------------------------------------------------
    @pytest.mark.parametrize("method", ["usage", "try_to_lead", "medium", "close"])
    def test_what_has_no_deadline_comes_back_while_the_medium_hangs(
        self, adapter: L2Adapter, hang: Any, method: str
    ) -> None:
        """Within a second they answer, or raise TierError."""
        if hang is None:
            not_judged("a fixture 'hang' unlocks it: StallingProxy.hang() makes any medium behind TCP hang")
        material.expect_stored(adapter, material.key(1), b"object")  # what is open now must be closed
        limit_s = NO_DEADLINE_S + self.hang_slack_s
        with hang, contextlib.suppress(TierError):
            try:
                watched(getattr(adapter, method), limit_s, "hang_slack_s")
            except NotBackError as error:
                raise AssertionError(f"{method}, while the medium answers nothing: {error}") from None

    def test_it_is_made_named_and_closed_while_its_medium_is_away(
        self, adapter: L2Adapter, reopen: Any, outage: Any
    ) -> None:
        """A server starts even if a tier is down, and uses that tier as soon as it is up."""
        if reopen is None or outage is None:
            not_judged("fixtures 'reopen' and 'outage' unlock it")
        material.expect_stored(adapter, material.key(1), b"object")
        with reopen() as former:
            name = former.medium()
        limit_s = NO_DEADLINE_S + self.hang_slack_s
        with contextlib.ExitStack() as made:
            with outage:
                fresh, another = (_in_time(reopen, limit_s, "was made while its medium was away") for _ in range(2))
                made.callback(fresh.close)
                found = _in_time(fresh.medium, limit_s, "was asked for its medium's name while that was away")
                assert found == name, f"its medium is {name!r}, and {found!r} while it is away: no name asks the medium"
                _in_time(another.close, limit_s, "was closed while its medium was away")
            _settle(fresh)
            material.expect_stored(fresh, material.key(2), b"afterwards")
            material.expect_holds(fresh, material.key(2), b"afterwards", "made while its medium was away")

    def test_who_leads_is_told_or_not_known(self, adapter: L2Adapter, unreachable: Any) -> None:
        """True, False, or a TierError if the medium has to be asked and cannot be."""
        leads = adapter.try_to_lead()
        assert isinstance(leads, bool), f"try_to_lead gave {leads!r}, and has to say True or False"
        if unreachable is not None:
            with contextlib.suppress(TierError):
                leads = unreachable.try_to_lead()
                message = f"try_to_lead gave {leads!r} on a medium that is not there"
                assert isinstance(leads, bool), f"{message}, and has to say True or False, or to raise TierError"

    # --- far away ---------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("days", [3.0, 40.0, float("inf")])
    def test_a_deadline_may_be_far_away(self, adapter: L2Adapter, days: float) -> None:
        """Further than a library can count: sockets stop at 24 days, and most things do not accept infinity."""
        material.expect_stored(adapter, material.key(1), b"object")
        deadline = time.monotonic() + days * DAY_S
        given = "with a deadline that never comes" if days == float("inf") else f"with a deadline {days:g} days away"
        for name in claimed(adapter):
            try:
                answers = calls_of(adapter, deadline)[name]()
            except Exception as error:
                raise AssertionError(f"{name} {given} raised {type(error).__name__}: {error}") from error
            for outcome in answers if name in ("store", "load", "delete") else ():
                legal = (Result.DONE, Result.MISS) if name == "load" else (Result.DONE,)
                assert outcome.result in legal, f"{name} {given} answered {material.seen(outcome)}"
        material.expect_exists(adapter, [material.key(1)], [True], f"asked {given}")


@contextlib.contextmanager
def _trouble(when: str, hang: Any, stall: Any) -> Iterator[None]:
    if when == HANGS and hang is None:
        not_judged("a fixture 'hang' unlocks it: StallingProxy.hang() makes any medium behind TCP hang")
    if when == STALLS and stall is None:
        not_judged("a fixture 'stall' unlocks it: StallingProxy.stall() lets answers come byte by byte")
    if when == PASSED:
        yield
    else:
        with hang if when == HANGS else stall:
            yield


def _expect_free(kept: weakref.ref[memoryview], memory: bytearray, done: str) -> None:
    gc.collect()
    message = (
        f"{done}, and something of the adapter's refers to its buffer all the same: a thread that goes on, or a list"
    )
    assert kept() is None, message
    try:
        memory.append(0)  # raises while anyone exports the buffer
    except BufferError:
        raise AssertionError(message) from None
    memory.pop()


def _settle(adapter: L2Adapter) -> None:
    """Wait until it works again: a connection may have been lost."""
    for number in (8, 9):
        with contextlib.suppress(TierError):
            if material.store(adapter, material.key(number), b"afterwards").result is Result.DONE:
                return


def _in_time(call: Any, limit_s: float, done: str) -> Any:
    try:
        return watched(call, limit_s, "hang_slack_s")
    except NotBackError as error:
        raise AssertionError(f"it {done}: {error}") from None
    except Exception as error:
        raise AssertionError(f"it {done}, and raised {type(error).__name__}: {error}") from error
