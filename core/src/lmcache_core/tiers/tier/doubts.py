"""What may or may not be on a tier's medium: keys whose call has failed. The medium is asked until it answers.

A store or a delete that failed may have been done all the same: the answer was lost, or a disk was read-only for a
moment. The medium is asked in the background, and the accounts are corrected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from lmcache_core.limits import (
    BREAKER_PAUSE_MAX_S,
    BREAKER_PAUSE_S,
    TIER_BATCH_KEYS_MAX,
    TIER_DOUBTS_MAX,
    TIER_LOOKUP_S,
)
from lmcache_core.tiers.contract import Recount
from lmcache_core.tiers.object.format import TIER_KEY_BYTES, split_tier_key
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING, Call
from lmcache_core.tiers.tier.medium import Medium


class _Doubt(NamedTuple):
    nbytes: int | None  # what it takes, if it is there
    reserved: int  # of that, what the accounts do not count elsewhere
    namespace: int
    damaged: bool


class Doubts:
    """The doubts of one tier, `TIER_DOUBTS_MAX` at most: beyond that the oldest are dropped, and the medium is
    scanned."""

    def __init__(self, medium: Medium, accounting: Accounting, recount: Recount) -> None:
        self._medium = medium
        self._accounting = accounting
        self._order = medium.order
        self._clock = medium.clock
        self._recount = recount
        self._keys: OrderedDict[bytes, _Doubt] = OrderedDict()
        self._queried: dict[bytes, _Doubt] = {}  # the medium is being asked about these
        self._next_at = 0.0
        self._pause_s = BREAKER_PAUSE_S
        self.settled = 0  # corrections of the accounts

    def __len__(self) -> int:
        return len(self._keys) + len(self._queried)

    def add(self, sizes: Mapping[bytes, int | None], *, damaged: bool = False) -> None:
        """Nobody knows whether these tier keys are on the medium. `sizes`: their bytes, None if they were never
        accounted. `damaged`: what is still there is damaged."""
        for key, nbytes in sizes.items():
            former = self._keys.pop(key, None)
            if former is not None:
                self._end(former)
            # An object that may be there takes room until the medium says that it is not there.
            reserved = 0 if nbytes is None or self._accounting.nbytes_of(key) is not None else nbytes
            namespace = split_tier_key(key)[1] if len(key) == TIER_KEY_BYTES else 0
            self._accounting.reserve(namespace, reserved)
            self._keys[key] = _Doubt(nbytes, reserved, namespace, damaged)
        while len(self._keys) > TIER_DOUBTS_MAX:
            self._end(self._keys.popitem(last=False)[1])
            self._recount.ask()

    @property
    def next_at(self) -> float | None:
        """When `step` has work."""
        return self._next_at if self._keys and not self._queried else None

    def step(self) -> None:
        """Ask about some of them."""
        if self._queried or not self._keys or self._clock.now < self._next_at:
            return
        keys_max = min(TIER_BATCH_KEYS_MAX, max(1, self._medium.adapter.capabilities.batch_keys_max))
        keys = [key for key in islice(self._keys, keys_max) if not self._order.busy(key)]
        if not keys or not self._medium.lookups.has_spare:  # a call that is under way will tell, or calls hang
            for key in list(islice(self._keys, keys_max)):
                self._keys[key] = self._keys.pop(key)
            self._next_at = self._clock.now + self._pause_s
            return
        self._queried = {key: self._keys.pop(key) for key in keys}
        question = _ExistsForDoubts(self, self._medium, keys)
        if not self._medium.lookups.submit(question):
            question.unwatch()
            self.again()

    def answered(self, question: _ExistsForDoubts) -> None:
        """The medium has answered, or has failed, in time."""
        if question.error is not None:
            self.again()
            return
        queried, self._queried, self._pause_s = self._queried, {}, BREAKER_PAUSE_S
        for key, there in zip(question.keys, question.result, strict=True):
            self._end(queried[key])
            if not question.changed.saw(key):
                self._settle(key, queried[key], there=there)
            elif question.changed.undecided(key) and key not in self._keys:  # otherwise that call has reported it
                self.add({key: queried[key].nbytes}, damaged=queried[key].damaged)

    def _settle(self, key: bytes, doubt: _Doubt, *, there: bool) -> None:
        if not there:
            self._accounting.end_drops(self._accounting.drops_of([key]))
        accounted = self._accounting.nbytes_of(key) is not None
        if accounted == there:
            return
        self.settled += 1
        if not there:
            self._accounting.remove([key])
        elif not doubt.nbytes:  # a scan has to find its size
            self._recount.ask()
        else:
            self._accounting.add([(key, doubt.nbytes)], ours=False)
            if doubt.damaged:
                self._accounting.suspect([key])

    def _end(self, doubt: _Doubt) -> None:
        self._accounting.reserve(doubt.namespace, -doubt.reserved)

    def again(self) -> None:
        """The medium did not answer: retry later."""
        queried, self._queried = self._queried, {}
        for key, doubt in queried.items():
            if self._keys.setdefault(key, doubt) is not doubt:
                self._end(doubt)
        self._next_at = self._clock.now + self._pause_s
        self._pause_s = min(BREAKER_PAUSE_MAX_S, 2 * self._pause_s)


class _ExistsForDoubts(Call):
    """Whether the medium has these keys."""

    def __init__(self, doubts: Doubts, medium: Medium, keys: Sequence[bytes]) -> None:
        super().__init__(medium.clock.now + TIER_LOOKUP_S, HOUSEKEEPING)
        self._doubts = doubts
        self._medium = medium
        self.keys = keys
        self.changed = medium.order.watch(keys)

    def unwatch(self) -> None:
        self._medium.order.unwatch(self.changed, self.keys)

    def work(self) -> list[bool]:
        return self._medium.exists(self.keys, self.deadline)

    def ended(self) -> None:
        if not self.was_late:
            self.unwatch()
            self._doubts.answered(self)

    def late(self) -> None:
        self.unwatch()
        self._doubts.again()
