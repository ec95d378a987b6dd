"""Threads, deadlines, a medium that hangs or is not there, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from lmcache_core.errors import TierError
from lmcache_core.testing import material
from lmcache_core.testing.contract import Contract
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem

THREADS = 8
ROUNDS = 12
HANG_DEADLINE_S = 0.5


def _calls(adapter: L2Adapter, deadline: float) -> dict[str, Callable[[], Any]]:
    keys = [material.key(1), material.key(2)]
    return {
        "store": lambda: adapter.store([StoreItem(key, [memoryview(b"new bytes")]) for key in keys], deadline),
        "exists": lambda: adapter.exists(keys, deadline),
        "load": lambda: adapter.load([LoadItem(key, [memoryview(bytearray(100))]) for key in keys], deadline),
        "delete": lambda: adapter.delete(keys, deadline),
        "set_aside": lambda: adapter.set_aside(keys, deadline),
        "scan": lambda: adapter.scan(None, deadline),
        "usage": lambda: adapter.usage(),
    }


class TroubleTests(Contract):
    """What the lanes rely on when things go wrong."""

    hang_slack_s: ClassVar[float] = 10.0  # a busy machine may be this late; a library's own time-out is later

    # --- threads --------------------------------------------------------------------------------------------
    def test_eight_threads_on_shared_keys(self, adapter: L2Adapter) -> None:
        """Everything that a load calls DONE is one of the objects that were stored under its key, whole."""
        if not adapter.capabilities.thread_safe:
            pytest.skip("the adapter does not claim thread_safe")
        keys = [material.key(number) for number in range(3)]
        legal = {
            key: {material.content(100 * number + version, 30_000) for version in range(THREADS)}
            for number, key in enumerate(keys)
        }
        faults: list[str] = []
        start = threading.Barrier(THREADS)

        def work(me: int) -> None:
            try:
                start.wait(material.DEADLINE_S)
                for turn in range(ROUNDS):
                    number = (me + turn) % len(keys)
                    mine = material.content(100 * number + me, 30_000)
                    outcome = material.store(adapter, keys[number], mine[:4096], mine[4096:])
                    if outcome.result is not Result.DONE:
                        faults.append(f"store: {outcome}")
                    for key in keys:
                        outcome, found = material.load(adapter, key, 4096, 30_000 - 4096)
                        if outcome.result is Result.DONE and found not in legal[key]:
                            faults.append("a load called bytes whole that nobody stored under that key")
                        if outcome.result not in (Result.DONE, Result.MISS):
                            faults.append(f"load: {outcome}")
                    if adapter.capabilities.delete and turn % 4 == me % 4:
                        (outcome,) = adapter.delete([keys[number]], material.soon())
                        if outcome.result is not Result.DONE:
                            faults.append(f"delete: {outcome}")
                    if len(adapter.exists(keys, material.soon())) != len(keys):
                        faults.append("exists: another number of answers")
            except Exception as error:  # noqa: BLE001 - of a thread: told by the test
                faults.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * material.DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads), "a thread did not come back"
        assert faults == []

    # --- deadlines ------------------------------------------------------------------------------------------
    def test_what_is_past_its_deadline_is_answered_and_may_be_tried_again(self, adapter: L2Adapter) -> None:
        material.store(adapter, material.key(1), b"object")
        past = time.monotonic() - 1.0
        for name, call in _calls(adapter, past).items():
            if name in ("store", "load", "delete"):
                _assert_done_or_retryable(name, call)
        material.store(adapter, material.key(1), b"afterwards")
        assert material.holds(adapter, material.key(1), b"afterwards"), "the adapter did not recover"

    def test_the_deadline_is_honoured_while_the_medium_hangs(self, adapter: L2Adapter, hang: Any) -> None:
        if hang is None:
            pytest.skip("no fixture 'hang': nothing makes this medium hang")
        able = adapter.capabilities
        material.store(adapter, material.key(1), b"object")
        with hang:
            for name in ("store", "exists", "load", "delete", "scan"):
                if (name == "delete" and not able.delete) or (name == "scan" and not able.scan):
                    continue
                began = time.monotonic()
                _assert_done_or_retryable(name, _calls(adapter, began + HANG_DEADLINE_S)[name])
                took = time.monotonic() - began
                assert took < HANG_DEADLINE_S + self.hang_slack_s, f"{name} came back {took:.1f} s after it was asked"
        material.store(adapter, material.key(1), b"afterwards")
        assert material.holds(adapter, material.key(1), b"afterwards"), "the adapter did not recover"

    def test_a_medium_that_is_not_there_is_said_in_words(self, unreachable: Any) -> None:
        if unreachable is None:
            pytest.skip("no fixture 'unreachable'")
        for name in ("store", "exists", "load", "delete"):
            try:
                answers = _calls(unreachable, time.monotonic() + 5.0)[name]()
            except TierError as error:
                if not str(error):
                    raise AssertionError(f"{name} raised a TierError that says nothing") from error
                continue
            assert name != "exists", "nobody can know what is on a medium that is not there"
            for outcome in answers:
                assert outcome.result is Result.FAILED, (name, outcome)
                assert outcome.error, f"{name} failed and does not say why"

    # --- the end --------------------------------------------------------------------------------------------
    def test_close_is_idempotent(self, adapter: L2Adapter) -> None:
        material.store(adapter, material.key(1), b"object")
        for _ in range(3):
            adapter.close()

    def test_an_adapter_that_was_never_used_can_be_closed(self, adapter: L2Adapter) -> None:
        adapter.close()
        adapter.close()

    @pytest.mark.parametrize("method", ["store", "exists", "load", "delete", "set_aside", "scan", "usage"])
    def test_use_after_close_raises_a_tier_error(self, adapter: L2Adapter, method: str) -> None:
        material.store(adapter, material.key(1), b"object")
        adapter.close()
        with pytest.raises(TierError, match=r"."):
            _calls(adapter, material.soon())[method]()


def _assert_done_or_retryable(name: str, call: Callable[[], Any]) -> None:
    try:
        answers = call()
    except TierError as error:
        if not error.retryable:
            raise AssertionError(f"{name} was late, and its error says that another try is of no use") from error
        return
    if name in ("store", "load", "delete"):
        for outcome in answers:
            assert isinstance(outcome, Outcome)
            done = outcome.result in (Result.DONE, Result.MISS)
            assert done or (outcome.result is Result.FAILED and outcome.retryable), (name, outcome)
