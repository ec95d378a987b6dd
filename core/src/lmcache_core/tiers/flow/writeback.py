"""Write-back: finds what tiers lack of what the L1 has, and has it stored.

A debt is derived, not remembered: objects of an adopted pool, objects that were there before a tier was added, and
objects whose store failed while the tier was down. For each of these the L1 is walked, a few slots at a time, and
compared with the tier's accounts or, if its medium cannot be listed, with `exists`. What the tier lacks is planned as
if it had just been committed. Fresh commits go first: the walk waits while anything else waits for the tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from lmcache_core.clock import Clock
from lmcache_core.limits import WRITE_BACK_LOOKS, WRITE_BACK_PAUSE_S, WRITE_BACK_PAUSE_S_MAX
from lmcache_core.tiers.flow.arrivals import NAMESPACE
from lmcache_core.tiers.flow.store import StoreController
from lmcache_core.tiers.l1 import CommittedObject, L1Port, TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import tier_keys
from lmcache_core.tiers.tier.calls import ExistsCall
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING
from lmcache_core.tiers.tier.tier import Tier


class _Debt:
    """What one tier may lack. `objects`: at most so many of the L1's; `again`: of these, lost since the walk began.
    `whole`: whether they may be any of the L1's, and not only some that were lost; `whole_again`: since the walk began.
    """

    __slots__ = ("again", "due_at", "objects", "whole", "whole_again")

    def __init__(self, objects: int, due_at: float) -> None:
        self.whole = self.whole_again = False
        self.objects = objects
        self.due_at = due_at
        self.again = 0


class WriteBack:
    """One walk at a time, for all tiers that are owed something when it begins. A tier that does not answer gets a few
    objects to try it with. Lives on the loop's thread."""

    def __init__(
        self, l1: L1Port, tiers: dict[str, Tier], stores: StoreController, epochs: Epochs, clock: Clock
    ) -> None:
        self._l1 = l1
        self._tiers = tiers
        self._stores = stores
        self._epochs = epochs
        self._clock = clock
        self._debts: dict[str, _Debt] = {}
        self._pauses_s: dict[str, float] = {}  # the last one before a walk for lost stores, while stores are lost
        self._walk: Iterator[CommittedObject | None] | None = None
        self._for: set[str] = set()  # the tiers that the walk is for
        self._groups: deque[list[CommittedObject]] = deque()  # met by the walk, and not compared yet
        self._unanswered = 0  # tiers that have not answered about the objects being compared
        self._hurries = False  # the server is ending
        self.moves = 0  # counts changes of what `may_lack_any` says
        stores.on_lost = self.lost
        stores.on_ended = self.stores_ended

    # --- debts --------------------------------------------------------------------------------------------
    def tier_added(self, name: str) -> None:
        """Nobody knows yet what this tier lacks: it is new, or stored to again."""
        if self._l1.ready_objects and not self._stores.policy.wants_reuse:  # such a policy sends what is read again
            self._owe(name, self._l1.ready_objects, 0.0)
            debt = self._debts[name]
            if name in self._for:
                debt.whole_again = True
            else:
                debt.whole, debt.due_at = True, self._clock.now
            self.moves += 1

    def lost(self, name: str, objects: int) -> None:
        """So many stores have failed for a reason that may pass; the L1 may still have the objects."""
        if not self._stores.policy.wants_reuse:
            self._owe(name, objects, 0.0 if name in self._debts else self._longer_pause_s(name))

    def stores_ended(self, name: str) -> None:
        """Stores to this tier have ended. If none is left and it is owed nothing, no store has been lost since the last
        walk: the next one that is lost begins with the shortest pause again."""
        if name in self._pauses_s and name not in self._debts and not self._stores.has_for(name):
            del self._pauses_s[name]

    def _longer_pause_s(self, name: str) -> float:
        """Stores were lost: how long to wait before the next walk. Twice the last pause, if there was one."""
        last_s = self._pauses_s.get(name)
        pause_s = WRITE_BACK_PAUSE_S if last_s is None else min(WRITE_BACK_PAUSE_S_MAX, 2 * last_s)
        self._pauses_s[name] = pause_s
        return pause_s

    def hurry(self) -> None:
        """The server is ending: every debt is due now, and is tried again after the shortest pause."""
        self._hurries = True
        for debt in self._debts.values():
            debt.due_at = min(debt.due_at, self._clock.now)

    def _after(self, pause_s: float) -> float:
        """When a debt is due after a pause."""
        return self._clock.now + (min(pause_s, WRITE_BACK_PAUSE_S) if self._hurries else pause_s)

    def _owe(self, name: str, objects: int, pause_s: float) -> None:
        debt = self._debts.get(name)
        if debt is None:
            self._debts[name] = _Debt(objects, self._after(pause_s))
        elif name in self._for:
            debt.again += objects
        else:
            debt.objects += objects

    def tier_removed(self, name: str) -> None:
        """It is owed nothing any more."""
        self._debts.pop(name, None)
        self._pauses_s.pop(name, None)
        self._for.discard(name)
        self.moves += 1

    def may_lack_any(self, name: str) -> bool:
        """Whether the tier is owed any object of the L1, and nobody has looked yet which of them it lacks."""
        debt = self._debts.get(name)
        return debt is not None and (debt.whole or debt.whole_again) and self._gets_stores(name)

    def owed(self, name: str) -> int:
        """How many objects of the L1 the tier may lack, besides those that are planned for it: an upper bound."""
        debt = self._debts.get(name)
        return 0 if debt is None else min(debt.objects + debt.again, self._l1.ready_objects)

    # --- the walk -----------------------------------------------------------------------------------------
    def step(self) -> bool:
        """Compare a few objects, and plan what is missing. False: there is nothing to do now."""
        if not self.has_work:
            return False
        if self._walk is None:
            self._for = set(self._payable())
            self._walk = self._l1.walk()
        elif self._groups:
            self._compare(self._groups.popleft())
        else:
            self._look(self._walk)
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something now."""
        if not self._debts or self._unanswered or not self._l1.walkable:
            return False
        names = self._payable() if self._walk is None else [name for name in self._for if self._gets_stores(name)]
        if not names:
            return self._walk is not None  # which ends without them
        taking = [name for name in names if self._tiers[name].takes_stores]
        if taking:
            return all(map(self._stores.has_room_for_owed, taking))
        return any(map(self._stores.has_room_for_owed, names))  # something to try it with

    @property
    def next_at(self) -> float | None:
        """When a debt is due; None if none is."""
        now = self._clock.now
        return min((debt.due_at for debt in self._debts.values() if debt.due_at > now), default=None)

    @property
    def idle(self) -> bool:
        """Whether nothing is being paid, and nothing can be paid now, except to tiers that do not answer. While the
        server is ending, a debt that is to be tried again counts, too."""
        names = self._debts if self._hurries else self._payable() if self._walk is None else self._for
        return not any(self._gets_stores(name) and self._tiers[name].takes_stores for name in names)

    def _payable(self) -> list[str]:
        """Those whose debt is due. What a tier being scanned lacks is asked of its medium only if the server is ending:
        otherwise its accounts will say it soon."""
        now, hurries = self._clock.now, self._hurries
        return [
            name
            for name, debt in self._debts.items()
            if debt.due_at <= now and self._gets_stores(name) and (hurries or not self._tiers[name].is_scanned)
        ]

    def _gets_stores(self, name: str) -> bool:
        tier = self._tiers.get(name)
        return tier is not None and tier.gets_stores

    def _look(self, walk: Iterator[CommittedObject | None]) -> None:
        slots = list(islice(walk, WRITE_BACK_LOOKS))
        found = [item for item in slots if item is not None]
        self._groups.extend([*group] for _, group in groupby(found, key=NAMESPACE))
        if not slots:
            self._end()

    def _end(self) -> None:
        """The whole L1 has been compared. What was lost meanwhile needs another walk, after a longer pause."""
        names, self._for, self._walk = self._for, set(), None
        self.moves += 1
        for name in names:
            debt = self._debts.pop(name)
            if debt.whole_again:
                self.tier_added(name)
            elif debt.again:
                self._owe(name, debt.again, self._longer_pause_s(name))
            else:
                self.stores_ended(name)

    def _compare(self, objects: list[CommittedObject]) -> None:
        """All of one namespace."""
        namespace = objects[0].namespace
        names = tier_keys([item.key for item in objects], namespace, self._epochs.of(namespace))
        lacking: dict[str, set[int]] = {}
        questions: list[tuple[str, list[int]]] = []
        for name in list(self._for):
            tier = self._tiers[name]
            if not tier.gets_stores or not (tier.takes_stores or self._stores.has_room_for_owed(name)):
                self._put_off(name)  # the others do not wait for it
                continue
            missing = [at for at, key in enumerate(names) if self._lacks(tier, key)]
            if missing and not tier.is_listed:
                questions.append((name, missing))
            lacking[name] = set(missing)
        self._unanswered = 1  # an answer may come before the last question
        for name, missing in questions:
            self._unanswered += 1
            question = _ExistsForDebt(self, self._tiers[name], names, missing, lacking, objects)
            refused = question.begin()
            if refused is not None:
                question.answered(None, refused)
        self._answered(objects, lacking)

    def _lacks(self, tier: Tier, key: bytes) -> bool:
        if tier.accounting.knows(key) or self._stores.is_going(tier.name, key):
            return False
        loss = tier.losses.find(key)
        # What its own policy has evicted is not forced back on it; without a text it had left the L1 before its turn.
        return loss is None or loss.reason is not TierReason.EVICTED or not loss.text

    def answered(self, question: _ExistsForDebt, found: Sequence[bool] | None) -> None:
        """A tier says which of the missing objects it has, or nothing."""
        name, lacking = question.tier.name, question.lacking
        if found is None:
            lacking.pop(name, None)
            self._put_off(name)
        else:
            lacking[name] = {at for at, there in zip(question.missing, found, strict=True) if not there}
        self._answered(question.objects, lacking)

    def _answered(self, objects: list[CommittedObject], lacking: dict[str, set[int]]) -> None:
        self._unanswered -= 1
        if self._unanswered:
            return
        for name in self._for:
            debt = self._debts[name]
            debt.objects = max(len(self._groups), debt.objects - len(objects))
        wanted = sorted(set().union(*lacking.values()))
        if wanted:
            places = {at: place for place, at in enumerate(wanted)}
            self._stores.on_owed(
                [objects[at] for at in wanted],
                {name: {places[at] for at in positions} for name, positions in lacking.items()},
            )

    def _put_off(self, name: str) -> None:
        """Leave this tier out of the walk: it is owed all again."""
        debt = self._debts.get(name)
        if debt is not None and name in self._for:
            self._for.discard(name)
            debt.whole, debt.whole_again = debt.whole or debt.whole_again, False
            debt.objects, debt.again = self._l1.ready_objects, 0
            debt.due_at = self._after(self._pauses_s.get(name, WRITE_BACK_PAUSE_S))


class _ExistsForDebt(ExistsCall):
    """Which of these objects a tier has, though its accounts do not say so. `missing`: positions; `lacking`: those of
    each tier, for what is compared now."""

    def __init__(
        self,
        write_back: WriteBack,
        tier: Tier,
        names: Sequence[bytes],
        missing: Sequence[int],
        lacking: dict[str, set[int]],
        objects: list[CommittedObject],
    ) -> None:
        deadline = tier.clock.now + tier.config.deadline_s
        super().__init__(tier, [names[at] for at in missing], deadline, HOUSEKEEPING)
        self._write_back = write_back
        self.missing = missing
        self.lacking = lacking
        self.objects = objects

    def answered(self, found: Sequence[bool] | None, reason: TierReason | None) -> None:
        self._write_back.answered(self, found)
