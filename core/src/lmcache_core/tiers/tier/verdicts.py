"""What a tier thinks of objects whose loads looked damaged, and what may be done about them.

A suspect counts as missing and is replaced by its next writer. It is read again after a while: well, and the suspicion
ends; with the same damage, while another object is read well, and it is set aside. Many suspects at once mean that the
way to the medium is broken, not the objects: the breaker is told, and nothing is deleted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

from lmcache_core import limits
from lmcache_core.tiers.contract import Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.inspect import Evidence
from lmcache_core.tiers.object.transfer import Loaded
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.deletes import Look, Suspicion
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING, Call
from lmcache_core.tiers.tier.medium import Medium
from lmcache_core.tiers.tier.order import KeyAccess, Watch
from lmcache_core.tiers.tier.reclaim import Reclaim
from lmcache_core.tiers.tier.verdict_states import VERDICT_TRANSITIONS, VerdictEvent, VerdictState

_CONTROLS = 2  # objects that may show that the way is well


class Suspect:
    """One object that is not trusted."""

    __slots__ = ("evidence", "look_at_s", "pause_s", "room_bytes", "since_s", "state")

    def __init__(self, room_bytes: int, evidence: Evidence, now: float) -> None:
        self.room_bytes = room_bytes
        self.evidence = evidence
        self.since_s = now
        self.pause_s = limits.SECOND_LOOK_S
        self.look_at_s = now + limits.SECOND_LOOK_S
        self.state = VerdictState.SUSPECT

    def move(self, event: VerdictEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = VERDICT_TRANSITIONS[self.state, event]


class Verdicts:
    """Of one tier; on the loop's thread."""

    def __init__(self, medium: Medium, accounting: Accounting, reclaim: Reclaim) -> None:
        self._medium = medium
        self._accounting = accounting
        self._reclaim = reclaim
        self._clock = medium.clock
        self._suspects: OrderedDict[bytes, Suspect] = OrderedDict()
        self._next_at = math.inf
        self._rests_until = 0.0  # in bulk a few of them are looked at now and then, and speak for all
        self._call: Call | None = None
        self._surplus = 0  # newly suspect objects, less the loads that went well since
        self.cleared = 0  # suspicions that proved wrong
        self.confirmed = 0

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, tier_key: bytes) -> bool:
        return tier_key in self._suspects

    @property
    def in_bulk(self) -> bool:
        """Whether so many objects look damaged that it must be the way to them."""
        return len(self._suspects) >= limits.SUSPECTS_BULK

    def load_ended(self, keys: Sequence[bytes], results: Sequence[Loaded], room_bytes: int, changed: Watch) -> str:
        """A load has ended. Returns the error if it shows that the way to the medium is broken. `room_bytes`: the most
        that one of the objects takes on the medium."""
        well = sum(result.reason is None for result in results)
        fresh = 0
        error = ""
        for key, result in zip(keys, results, strict=True):
            if changed.saw(key):
                continue
            if result.reason is None:
                self.clear([key])
            elif result.reason is TierReason.DAMAGED:
                self._accounting.suspect([key])
                if result.evidence is not None:
                    error = result.error
                    fresh += self._suspect(key, room_bytes, result.evidence)
            elif result.reason is TierReason.TIER_ERROR and well > len(results) // 2:
                self._accounting.suspect([key])  # the others were read: it is this object, and not the tier
        self._surplus = max(0, self._surplus + fresh - well)
        if not well and error and self._surplus >= limits.SUSPECTS_BULK:
            return f"{len(self._suspects)} objects look damaged: the way to the medium may be broken ({error})"
        return ""

    def clear(self, keys: Sequence[bytes]) -> None:
        """These are sound, replaced, or gone."""
        if not self._suspects:
            return
        for key in keys:
            suspect = self._suspects.pop(key, None)
            if suspect is not None:
                suspect.move(VerdictEvent.CLEAR)

    @property
    def next_at(self) -> float | None:
        """When `step` has work."""
        return max(self._next_at, self._rests_until) if self._suspects and self._call is None else None

    def step(self) -> None:
        """Look again at some of them."""
        now = self._clock.now
        if self._call is not None or now < max(self._next_at, self._rests_until):
            return
        if not self._medium.stores.has_spare:
            self._rests_until = now + limits.SECOND_LOOK_S
            return
        due: dict[bytes, Suspect] = {}
        self._next_at = math.inf
        for key, suspect in self._suspects.items():
            if suspect.state is not VerdictState.SUSPECT:
                continue  # a look at it hangs
            if suspect.look_at_s <= now and len(due) < limits.SUSPECTS_BULK:
                due[key] = suspect
            else:
                self._next_at = min(self._next_at, suspect.look_at_s)
        if due:
            self._look(due)

    def _suspect(self, key: bytes, room_bytes: int, evidence: Evidence) -> bool:
        """Whether that is new."""
        known = self._suspects.get(key)
        if known is not None:
            if known.state is VerdictState.SUSPECT:
                known.evidence = evidence
            return False
        suspect = self._suspects[key] = Suspect(room_bytes, evidence, self._clock.now)
        self._next_at = min(self._next_at, suspect.look_at_s)
        if len(self._suspects) > limits.TIER_SUSPECTS_MAX:
            self.clear([next(iter(self._suspects))])
        return True

    # --- the second look ----------------------------------------------------------------------------------
    def _look(self, due: dict[bytes, Suspect]) -> None:
        call = self._call = _SecondLook(self, self._medium, self._accounting, due, self._suspects, self.in_bulk)
        for suspect in due.values():
            suspect.move(VerdictEvent.LOOK)
        if not self._medium.order.submit(self._medium.stores, call, call.keys, KeyAccess.DELETE):
            self.looked(call)

    def looked(self, call: _SecondLook) -> None:
        """A second look has ended, or was not taken."""
        self.left(call)
        looks: Sequence[Look] = call.result or [Look(error=call.failure)] * len(call.keys)
        for key, look in zip(call.keys, looks, strict=True):
            self._settle(key, call.due[key], look, call.sizes[key])
        if self.in_bulk and any(look.sound for look in looks):
            self._forgive(before_s=call.began_s)
        elif self.in_bulk:
            self._rests_until = self._clock.now + limits.SECOND_LOOK_S

    def left(self, call: _SecondLook) -> None:
        """Nobody waits for this one: others are looked at meanwhile."""
        if self._call is call:
            self._call = None

    def _settle(self, key: bytes, suspect: Suspect, look: Look, nbytes: int | None) -> None:
        if suspect.state is not VerdictState.LOOKED_AT:  # cleared meanwhile
            if look.deleted is not None and look.deleted.result in (Result.DONE, Result.MISS):
                self._reclaim.was_set_aside(key, nbytes)
            return
        if look.sound or look.gone:
            self.cleared += look.sound
            self._accounting.suspect([key], suspect=False)
            if look.gone:
                self._accounting.remove([key])
            self.clear([key])
        elif look.deleted is None:
            suspect.move(VerdictEvent.UNSURE)
            suspect.evidence = look.evidence or suspect.evidence
            self._later(suspect)
        else:
            suspect.move(VerdictEvent.CONFIRM)
            self.confirmed += 1
            if look.deleted.result in (Result.DONE, Result.MISS):
                self.clear([key])
                self._reclaim.was_set_aside(key, nbytes)
            else:
                suspect.move(VerdictEvent.KEPT)
                self._reclaim.stayed(key, nbytes, look.deleted.error)
                self._later(suspect)

    def _later(self, suspect: Suspect) -> None:
        suspect.pause_s = min(limits.SECOND_LOOK_MAX_S, 2 * suspect.pause_s)
        suspect.look_at_s = self._clock.now + suspect.pause_s
        self._next_at = min(self._next_at, suspect.look_at_s)

    def _forgive(self, before_s: float) -> None:
        """The way is well again: trust what it has brought under suspicion until then. A load that looks damaged once
        more will say so."""
        former = [
            key
            for key, each in self._suspects.items()
            if each.since_s <= before_s and each.state is VerdictState.SUSPECT
        ]
        self._accounting.suspect(former, suspect=False)
        self.cleared += len(former)
        self.clear(former)


class _SecondLook(Call):
    """Reads suspects again, and sets aside those that are damaged for certain."""

    def __init__(
        self,
        verdicts: Verdicts,
        medium: Medium,
        accounting: Accounting,
        due: dict[bytes, Suspect],
        suspects: Collection[bytes],
        in_bulk: bool,
    ) -> None:
        self.began_s = medium.clock.now
        super().__init__(self.began_s + medium.config.deadline_s, HOUSEKEEPING)
        self._verdicts = verdicts
        self._deletes = medium.deletes
        self.due = due
        self.keys = list(due)
        ours = accounting.proven(self.keys)
        self._suspicions = [Suspicion(key, each.room_bytes, each.evidence, key in ours) for key, each in due.items()]
        self._controls = accounting.some(_CONTROLS, suspects)
        # Where others store, too, no read licenses a delete, however often it is repeated: a proxy may keep a damaged
        # copy, with our own header on it. The object's next writer replaces it.
        self._may_delete = medium.adapter.capabilities.delete and medium.deletes.names_prove and not in_bulk
        self.sizes = {key: accounting.nbytes_of(key) for key in self.keys}

    def work(self) -> list[Look]:
        return self._deletes.look_again(self._suspicions, self._controls, self.deadline, may_delete=self._may_delete)

    def ended(self) -> None:
        self._verdicts.looked(self)

    def late(self) -> None:
        if self.state is CallState.EXPIRED:
            self._verdicts.looked(self)
        else:  # it may return some day
            self._verdicts.left(self)
