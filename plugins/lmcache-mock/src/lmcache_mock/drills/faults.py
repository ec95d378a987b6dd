"""Makes any adapter fail or return wrong data on demand: by rate with a seed, or call by call from a script.

A rule is a line of words: `OPERATION FAULT [rate=R] [skip=N] [count=N] [s=SECONDS]`, for example

    load flipped_bits rate=0.1      every tenth object comes back with a flipped bit
    store full skip=20 count=5      twenty stores pass, the next five answer FULL
    any hang                        every call hangs until the rule goes, or the adapter is closed

The first rule that applies decides.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lmcache_core.errors import TierError, UsageError
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem, Usage
from lmcache_mock.drills.wrapper import AdapterWrapper, Answer, Item

OPERATIONS = ("any", "store", "exists", "load", "delete", "scan")
NEIGHBOURS_MAX = 64  # keys remembered, from which `neighbour` takes the wrong object
POLL_S = 0.02  # how often a hanging call checks whether its rule is still there
SLOW_S = 1.0


class Fault(StrEnum):
    """What goes wrong. Stores and loads fail object by object; other calls fail as a whole."""

    ERROR = "error"  # FAILED, retryable
    THROTTLED = "throttled"
    FULL = "full"  # stores only
    LOST = "lost"  # stores only: answers DONE and keeps nothing
    SHORT_READ = "short_read"  # loads only: answers DONE, and the end is missing
    FLIPPED_BITS = "flipped_bits"  # loads only: answers DONE, and one bit is wrong
    NEIGHBOUR = "neighbour"  # loads only: answers DONE, and the bytes are another object's
    SLOW = "slow"  # takes `seconds` longer, within its deadline
    HANG = "hang"  # does not return, whatever its deadline
    GONE = "gone"  # the medium is missing: TierError


_STORES_ONLY = {Fault.FULL, Fault.LOST}
_LOADS_ONLY = {Fault.SHORT_READ, Fault.FLIPPED_BITS, Fault.NEIGHBOUR}
_RULED_AS = {"load_headers": "load", "set_aside": "delete"}  # the rules that hold for a call of another name
_WHOLE_CALL = {Fault.SLOW, Fault.HANG, Fault.GONE}


@dataclass(frozen=True)
class FaultRule:
    """`rate` of the objects (or calls) after the first `skip`, at most `count` of them."""

    operation: str
    fault: Fault
    rate: float = 1.0
    skip: int = 0
    count: int | None = None
    seconds: float = SLOW_S

    @classmethod
    def parse(cls, text: str) -> FaultRule:
        """Parse a rule from a line of words. Raises `UsageError` that says what is wrong with it."""
        words = text.split()
        cure = f"write OPERATION FAULT [rate=R] [skip=N] [count=N] [s=SECONDS], with {', '.join(OPERATIONS)} and one of"
        cure += f" {', '.join(Fault)}"
        if len(words) < 2 or words[0] not in OPERATIONS or words[1] not in list(Fault):
            raise UsageError(f"{text!r} is not a fault rule: {cure}")
        operation, fault = words[0], Fault(words[1])
        for kind, only in (("store", _STORES_ONLY), ("load", _LOADS_ONLY)):
            if fault in only and operation not in ("any", kind):
                raise UsageError(f"{text!r}: {fault} is a fault of {kind}, not of {operation}")
        values: dict[str, Any] = {}
        for word in words[2:]:
            name, _, value = word.partition("=")
            field = {"rate": "rate", "skip": "skip", "count": "count", "s": "seconds"}.get(name)
            try:
                values[field or name] = (float if field in ("rate", "seconds") else int)(value)
            except ValueError:
                field = None
            if field is None or values[field] < 0 or (field == "rate" and values[field] > 1):
                raise UsageError(f"{text!r}: {word!r} is not understood: {cure}")
        return cls(operation, fault, **values)

    def __str__(self) -> str:
        words = [self.operation, str(self.fault)]
        words += [f"rate={self.rate:g}"] if self.rate != 1.0 else []
        words += [f"skip={self.skip}"] if self.skip else []
        words += [f"count={self.count}"] if self.count is not None else []
        words += [f"s={self.seconds:g}"] if self.seconds != SLOW_S else []
        return " ".join(words)

    def applies_to(self, operation: str) -> bool:
        if self.fault in _STORES_ONLY:
            return operation == "store"
        if self.fault in _LOADS_ONLY:
            return operation == "load"
        return self.operation in ("any", operation)


class FaultScript:
    """The rules in force. Thread-safe; they may be replaced at any time, even while a call hangs because of one."""

    def __init__(self, rules: Iterable[FaultRule | str] = (), *, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._seed = seed
        self.set(*rules)

    def set(self, *rules: FaultRule | str) -> None:
        """Replace all rules and restart their counts. Without arguments, nothing fails any more."""
        parsed = [FaultRule.parse(rule) if isinstance(rule, str) else rule for rule in rules]
        with self._lock:
            self._rules = parsed
            self._met = [0] * len(parsed)
            self._used = [0] * len(parsed)

    @property
    def rules(self) -> tuple[FaultRule, ...]:
        with self._lock:
            return tuple(self._rules)

    def takes_the_medium_away(self) -> bool:
        """Whether, by the current rules, no call at all is answered."""
        with self._lock:
            return any(
                rule.fault is Fault.GONE and rule.operation == "any" and rule.rate >= 1 and not rule.skip
                for rule in self._rules
                if rule.count is None
            )

    def draw(self, operation: str, *, whole_call: bool) -> FaultRule | None:
        """The rule that applies to this object, or to this call as a whole; None: no fault."""
        with self._lock:
            for number, rule in enumerate(self._rules):
                if not rule.applies_to(operation) or (rule.fault in _WHOLE_CALL) != whole_call:
                    continue
                met = self._met[number] = self._met[number] + 1
                if met <= rule.skip or (rule.count is not None and self._used[number] >= rule.count):
                    continue
                if _fraction(self._seed, number, met) < rule.rate:
                    self._used[number] += 1
                    return rule
        return None


def _fraction(seed: int, rule: int, met: int) -> float:
    """A number in [0, 1), the same on every machine, so that a run can be repeated."""
    digest = hashlib.blake2b(f"{seed}/{rule}/{met}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


class FaultyAdapter(AdapterWrapper):
    """Passes to `inner` what the script lets through. Closing it closes the wrapped adapter.

    `before_call` is called at the start of every call, and now and then while one hangs: the place to read rules from
    elsewhere.
    """

    def __init__(
        self, inner: L2Adapter, script: FaultScript | None = None, *, before_call: Callable[[], None] | None = None
    ) -> None:
        super().__init__(inner)
        self.script = script or FaultScript()
        self._before_call = before_call or (lambda: None)
        self._neighbours: deque[bytes] = deque(maxlen=NEIGHBOURS_MAX)
        self._closing = threading.Event()

    def batch(
        self,
        operation: str,
        items: Sequence[Item],
        deadline: float,
        call: Callable[[Sequence[Item]], Sequence[Outcome]],
    ) -> Sequence[Outcome]:
        operation = _RULED_AS.get(operation, operation)
        late = self._whole(operation, deadline)
        if late is not None:
            return [late] * len(items)
        self._neighbours.extend(item.key for item in items if isinstance(item, StoreItem))
        lies: dict[int, Fault] = {}
        outcomes = list(self._each(operation, items, call, lies))
        for position, fault in lies.items():
            item = items[position]
            if isinstance(item, LoadItem) and outcomes[position].result is Result.DONE:
                outcomes[position] = self._lie(fault, item, outcomes[position], deadline)
        return outcomes

    def ask(self, operation: str, keys: Sequence[bytes], deadline: float, call: Callable[[], Answer]) -> Answer:
        late = self._whole(operation, deadline)
        if late is not None:
            raise TierError(late.error)
        rule = self.script.draw(operation, whole_call=False)
        if rule is not None:
            raise TierError(f"{operation} failed: rule '{rule}'")
        return call()

    def usage(self) -> Usage:
        if self.script.takes_the_medium_away():
            raise TierError("the medium is gone")
        return super().usage()

    def close(self) -> None:
        self._closing.set()
        super().close()

    # --- the faults -----------------------------------------------------------------------------------------
    def _whole(self, operation: str, deadline: float) -> Outcome | None:
        """Apply a fault to a call as a whole. Returns an outcome if the deadline passed meanwhile."""
        self._before_call()
        rule = self.script.draw(operation, whole_call=True)
        if rule is None:
            return None
        if rule.fault is Fault.GONE:
            raise TierError(f"the medium is gone: rule '{rule}'")
        if rule.fault is Fault.HANG:
            while rule in self.script.rules and not self._closing.wait(POLL_S):
                self._before_call()
            if self._closing.is_set():
                raise TierError("closed while a call hung", retryable=False)
        else:
            self._closing.wait(max(0.0, min(rule.seconds, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            return Outcome(Result.FAILED, error=f"not done by its deadline: rule '{rule}'", retryable=True)
        return None

    def _each(
        self,
        operation: str,
        items: Sequence[Item],
        call: Callable[[Sequence[Item]], Sequence[Outcome]],
        lies: dict[int, Fault],
    ) -> Sequence[Outcome]:
        """Outcomes in order; objects without a fault get the inner adapter's."""
        struck: dict[int, Outcome] = {}
        for position in range(len(items)):
            rule = self.script.draw(operation, whole_call=False)
            if rule is None:
                continue
            if rule.fault in _LOADS_ONLY:
                lies[position] = rule.fault
                continue
            struck[position] = _outcome(rule, items[position])
        answers = iter(call([item for position, item in enumerate(items) if position not in struck]))
        return [struck[position] if position in struck else next(answers) for position in range(len(items))]

    def _lie(self, fault: Fault, item: LoadItem, outcome: Outcome, deadline: float) -> Outcome:
        """Spoil what was loaded, and answer DONE."""
        if fault is Fault.NEIGHBOUR:
            for other in self._neighbours:
                if other != item.key:
                    loaded = self.inner.load([LoadItem(other, item.buffers)], deadline)[0]
                    if loaded.result is Result.DONE:
                        return loaded
            return self.inner.load([item], deadline)[0]  # it has no neighbour: answer correctly
        if not outcome.nbytes:
            return outcome
        if fault is Fault.SHORT_READ:
            return outcome._replace(nbytes=outcome.nbytes // 2)
        at = outcome.nbytes // 2
        for buffer in item.buffers:
            if at < buffer.nbytes:
                buffer[at] ^= 0x10
                break
            at -= buffer.nbytes
        return outcome


def _outcome(rule: FaultRule, item: object) -> Outcome:
    if rule.fault is Fault.LOST:
        return Outcome(Result.DONE, item.nbytes if isinstance(item, StoreItem) else 0)
    if rule.fault is Fault.FULL:
        return Outcome(Result.FULL, error=f"rule '{rule}'")
    if rule.fault is Fault.THROTTLED:
        return Outcome(Result.THROTTLED, error=f"rule '{rule}'")
    return Outcome(Result.FAILED, error=f"rule '{rule}'", retryable=True)
