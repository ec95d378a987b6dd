"""What the end of a batch changes in a tier's books: counters, accounting, and what has to be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.transfer import Loaded, NoRoom
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.doubts import Doubts
from lmcache_core.tiers.tier.losses import Losses
from lmcache_core.tiers.tier.order import Watch
from lmcache_core.tiers.tier.reclaim import Reclaim


class Books:
    """Of one tier. Whole batches at once: this runs on the loop, and a batch may have hundreds of objects a turn."""

    def __init__(
        self,
        counts: Counter[str],
        accounting: Accounting,
        losses: Losses,
        reclaim: Reclaim,
        doubts: Doubts,
        trouble: Callable[[str, str], None],
    ) -> None:
        self._counts = counts
        self._accounting = accounting
        self._losses = losses
        self._reclaim = reclaim
        self._doubts = doubts
        self._trouble = trouble

    def loaded(self, keys: Sequence[bytes], results: Sequence[Loaded], changed: Watch) -> None:
        """A load has ended. What it found of a key that was `changed` meanwhile is of no object that is still there."""
        there: list[tuple[bytes, int]] = []
        gone: list[bytes] = []
        damaged: list[bytes] = []
        broken: list[bytes] = []
        for key, result in zip(keys, results, strict=True):
            if result.reason is None:
                there.append((key, result.nbytes))
                continue
            if changed.saw(key):
                self._counts[f"load_{result.reason}"] += 1
                continue
            self._counts[f"load_{result.reason}"] += 1
            self._losses.note([key], result.reason, result.error)
            if result.reason is TierReason.GONE:
                gone.append(key)
            if result.reason is TierReason.DAMAGED:
                self._trouble("load", result.error)
                damaged.append(key)
                if not result.mismatched:
                    broken.append(key)
        self._counts["loaded"] += len(there)
        self._counts["loaded_bytes"] += sum(nbytes for _, nbytes in there)
        found = [each for each in there if not changed.saw(each[0])]
        self._accounting.add(found)  # also what another server stored
        self._reclaim.delete_former([key for key, _ in found])
        self._accounting.remove(gone)
        self._accounting.damaged(damaged)
        self._reclaim.set_aside(broken)

    def stored(self, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
        """A store has ended."""
        there: list[tuple[bytes, int]] = []
        unknown: dict[bytes, int | None] = {}  # what failed may have been done all the same, as may an earlier try
        full = False
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.result is Result.DONE:
                there.append((key, outcome.nbytes))
                continue
            if isinstance(outcome, NoRoom):
                self._counts["store_encoded_again"] += 1
                continue
            self._counts[f"store_{outcome.result}"] += 1
            unknown[key] = outcome.nbytes
            full |= outcome.result is Result.FULL
            if outcome.error:
                self._trouble("store", outcome.error)
        self._counts["store_done"] += len(there)
        self._counts["stored_bytes"] += sum(nbytes for _, nbytes in there)
        self._accounting.add(there)
        self._doubts.add(unknown)
        if full:
            self._reclaim.medium_is_full()
        # A clear may have come while they were stored.
        self._reclaim.delete_former([key for key, _ in there])
