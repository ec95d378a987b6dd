"""Which tiers have these keys? Explanations ask the media; callers that wait for a store ask the accounts. Nothing is
loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_core.clock import Clock
from lmcache_core.limits import TIER_LOOKUP_S
from lmcache_core.tiers.flow.store import StoreController
from lmcache_core.tiers.flow.writeback import WriteBack
from lmcache_core.tiers.l1 import Stored, TierReason
from lmcache_core.tiers.object.format import tier_keys
from lmcache_core.tiers.tier.calls import ExistsCall
from lmcache_core.tiers.tier.lanes import Priority
from lmcache_core.tiers.tier.tier import Tier
from lmcache_core.tiers.tier.trouble import TierLoss

ASKED_ABOUT = Priority(8)  # somebody waits, but no request does: requests and deletes go first


@dataclass(slots=True)
class TierAnswer:
    """The answer of one tier. `found` is None if it gave no answer, for `reason`; `text` is then the tier's own
    message. `places[i]` says where on its medium it found a key, if it has several. `losses[i]` is a loss that is
    remembered for the key, even if the tier does not answer. For callers that wait for stores, `found` has values of
    `Stored`."""

    name: str
    losses: Sequence[TierLoss | None]
    found: Sequence[int] | None = None
    reason: TierReason | None = None
    text: str = ""
    places: Sequence[str] = ()


class Whereabouts:
    """The answers, in the order of the tiers; complete once nothing is `pending`. `on_done` is called at the last
    answer, from `Tiering.step`; it is not called if there was nothing to wait for."""

    def __init__(self, on_done: Callable[[Whereabouts], None]) -> None:
        self.answers: list[TierAnswer] = []
        self.pending = 0
        self._on_done: Callable[[Whereabouts], None] | None = on_done

    def ask(self, tiers: Mapping[str, Tier], namespace: int, epoch: int, keys: Sequence[bytes], now: float) -> None:
        """Ask all tiers at once, on their lanes. A tier that does not answer within `TIER_LOOKUP_S` counts as
        silent."""
        wanted = tier_keys(keys, namespace, epoch)
        for tier in tiers.values():
            answer = TierAnswer(tier.name, [tier.losses.find(key) for key in wanted])
            self.answers.append(answer)
            refused = _ExistsForAnswer(self, answer, tier, wanted, now + TIER_LOOKUP_S).begin()
            if refused is None:
                self.pending += 1
            else:
                answer.reason, answer.text = refused, tier.health.last_error

    def answered(self) -> None:
        """A tier has answered, or will not."""
        self.pending -= 1
        if not self.pending and self._on_done is not None:
            on_done, self._on_done = self._on_done, None  # it refers to its caller, and that may refer to us
            on_done(self)


class _ExistsForAnswer(ExistsCall):
    """Fills in the answer of one tier."""

    def __init__(
        self, whereabouts: Whereabouts, answer: TierAnswer, tier: Tier, keys: Sequence[bytes], deadline: float
    ) -> None:
        super().__init__(tier, keys, deadline, ASKED_ABOUT)
        self._whereabouts = whereabouts
        self._answer = answer

    def answered(self, found: Sequence[bool] | None, reason: TierReason | None) -> None:
        answer, suspects = self._answer, self.tier.verdicts
        answer.found, answer.reason = found, reason
        answer.losses = [self.tier.losses.find(key) for key in self.keys]  # with what this call has found gone
        if found is None:
            answer.text = self.tier.health.last_error
        elif any(found):
            answer.places = self.tier.places(self.keys)
        if found is not None and len(suspects):  # a suspect counts as missing until somebody has read it well
            answer.found = [there and key not in suspects for key, there in zip(self.keys, found, strict=True)]
        self._whereabouts.answered()


class StoredWatch:
    """Whether the tiers have keys that were committed until now, or will have them. Asks no medium."""

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        stores: StoreController,
        write_back: WriteBack,
        namespace: int,
        epoch: int,
        keys: Sequence[bytes],
        clock: Clock,
    ) -> None:
        self._tiers = tiers
        self._clock = clock
        self._stores = stores
        self._write_back = write_back
        self._names = tier_keys(keys, namespace, epoch)
        self._arrived = stores.arrived
        self._left = list(range(len(keys)))  # stores run in order: the last key takes longest

    def settled(self) -> bool:
        """Whether every store of these keys has ended. Each call resumes where the last one stopped."""
        while self._left and not self._on_its_way(self._names[self._left[-1]]):
            self._left.pop()
        return not self._left

    def answers(self) -> list[TierAnswer]:
        """What each tier has, in the order of the tiers, and how it lost the rest. `found` has values of `Stored`."""
        found_so_far = []
        for tier in self._tiers.values():
            found = [self._state(tier, name) for name in self._names]
            error = tier.health.last_error
            away = None if tier.takes_stores else TierLoss(TierReason.TIER_ERROR, self._clock.now, error)
            lost = [
                tier.losses.find(name) or away if state is Stored.NO else None
                for name, state in zip(self._names, found, strict=True)
            ]
            found_so_far.append(TierAnswer(tier.name, lost, found, text=error))
        return found_so_far

    def _on_its_way(self, name: bytes) -> bool:
        return any(self._state(tier, name) is Stored.ON_ITS_WAY for tier in self._tiers.values())

    def _state(self, tier: Tier, name: bytes) -> Stored:
        if tier.accounting.knows(name):
            return Stored.YES
        if not tier.takes_stores:  # it may get the key some day, and nobody waits for that
            return Stored.NO
        if self._stores.is_going(tier.name, name):
            return Stored.ON_ITS_WAY
        # Not known yet: where the policy sends a new arrival, what a medium has while it is being scanned, and what is
        # owed to a tier that was added, or has not got what an adopted pool has.
        open_still = tier.is_scanned or (tier.gets_stores and not self._stores.has_planned(self._arrived))
        if not open_still and self._write_back.may_lack_any(tier.name):
            open_still = tier.losses.find(name) is None  # what was lost is tried again some day, and not waited for
        return Stored.ON_ITS_WAY if open_still else Stored.NO
