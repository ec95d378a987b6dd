"""Which tiers have these keys? Explanations ask the media; callers that wait for a store ask the books. Nothing is
loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_core.limits import TIER_LOOKUP_S
from lmcache_core.tiers.flow.store import StoreController
from lmcache_core.tiers.l1 import Stored, TierReason
from lmcache_core.tiers.object.format import tier_keys
from lmcache_core.tiers.tier.lanes import Priority
from lmcache_core.tiers.tier.tier import Tier
from lmcache_core.tiers.tier.trouble import TierLoss

ASKED_ABOUT = Priority(8)  # somebody waits, but no request does: requests and deletes go first


@dataclass(slots=True)
class TierAnswer:
    """The answer of one tier. `found` is None if it gave no answer, for `reason`; `text` is then the tier's own
    message. `losses[i]` is a loss that is remembered for the key, even if the tier does not answer. For callers that
    wait for stores, `found` has values of `Stored`."""

    name: str
    losses: Sequence[TierLoss | None]
    found: Sequence[int] | None = None
    reason: TierReason | None = None
    text: str = ""


class Whereabouts:
    """The answers, in the order of the tiers; complete once nothing is `pending`. `on_done` is called at the last
    answer, from `Tiering.step`; it is not called if there was nothing to wait for."""

    def __init__(self, on_done: Callable[[Whereabouts], None]) -> None:
        self.answers: list[TierAnswer] = []
        self.pending = 0
        self._on_done = on_done

    def ask(self, tiers: Mapping[str, Tier], namespace: int, epoch: int, keys: Sequence[bytes], now: float) -> None:
        """Ask all tiers at once, on their lanes. A tier that does not answer within `TIER_LOOKUP_S` counts as
        silent."""
        asked = tier_keys(keys, namespace, epoch)
        for tier in tiers.values():
            answer = TierAnswer(tier.name, [tier.losses.find(key) for key in asked])
            self.answers.append(answer)
            refused = tier.ask(asked, now + TIER_LOOKUP_S, ASKED_ABOUT, self._answered(tier, answer))
            if refused is None:
                self.pending += 1
            else:
                answer.reason, answer.text = refused, tier.last_error

    def _answered(self, tier: Tier, answer: TierAnswer) -> Callable[[Sequence[bool] | None, TierReason | None], None]:
        def answered(found: Sequence[bool] | None, reason: TierReason | None) -> None:
            answer.found, answer.reason = found, reason
            if found is None:
                answer.text = tier.last_error
            self.pending -= 1
            if not self.pending:
                self._on_done(self)

        return answered


class StoredWatch:
    """Whether the tiers have keys that were committed until now, or will have them. Asks no medium."""

    def __init__(
        self, tiers: Mapping[str, Tier], stores: StoreController, namespace: int, epoch: int, keys: Sequence[bytes]
    ) -> None:
        self._tiers = tiers
        self._stores = stores
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
        told = []
        for tier in self._tiers.values():
            found = [self._state(tier, name) for name in self._names]
            lost = [
                tier.losses.find(name) if state is Stored.NO else None
                for name, state in zip(self._names, found, strict=True)
            ]
            told.append(TierAnswer(tier.name, lost, found, text=tier.last_error))
        return told

    def _on_its_way(self, name: bytes) -> bool:
        return any(self._state(tier, name) is Stored.ON_ITS_WAY for tier in self._tiers.values())

    def _state(self, tier: Tier, name: bytes) -> Stored:
        if tier.accounting.knows(name):
            return Stored.YES
        if self._stores.is_going(tier.name, name):
            return Stored.ON_ITS_WAY
        # Not known yet: where the policy sends a new arrival, and what a medium has while it is being scanned.
        open_still = tier.accounting.scanning or (not tier.draining and not self._stores.has_planned(self._arrived))
        return Stored.ON_ITS_WAY if open_still else Stored.NO
