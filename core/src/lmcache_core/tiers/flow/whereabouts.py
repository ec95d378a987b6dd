"""One question to all tiers: which of these keys do they have? For explanations; nothing is loaded by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_core.limits import TIER_LOOKUP_S
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import tier_keys
from lmcache_core.tiers.tier.lanes import Priority
from lmcache_core.tiers.tier.losses import TierLoss
from lmcache_core.tiers.tier.tier import Tier

ASKED_ABOUT = Priority(8)  # somebody waits, but no request does: requests and deletes go first


@dataclass(slots=True)
class TierAnswer:
    """What one tier says. `found` is None where it gave no answer, for `reason`; `text` are its own words then.
    `losses[i]` is what it is known to have lost, whether or not it answers. For callers that wait for stores, `found`
    has values of `Stored`, a third one among them."""

    name: str
    losses: Sequence[TierLoss | None]
    found: Sequence[int] | None = None
    reason: TierReason | None = None
    text: str = ""


class Whereabouts:
    """The answers, in the order of the tiers; complete once nothing is `pending`. `on_done` is called when the last
    answer comes, from `Tiering.step`; not if there was nothing to wait for."""

    def __init__(self, on_done: Callable[[Whereabouts], None]) -> None:
        self.answers: list[TierAnswer] = []
        self.pending = 0
        self._on_done = on_done

    def ask(self, tiers: Mapping[str, Tier], namespace: int, epoch: int, keys: Sequence[bytes], now: float) -> None:
        """Ask them all at once, on their lanes. Each answers within `TIER_LOOKUP_S`, or has not answered."""
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
