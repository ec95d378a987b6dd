"""What the end of a batch changes in a tier's books: counters, accounting, and what has to be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from lmcache_core.tiers.accounting import Accounting
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.epochs import Epochs, former_epochs
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.losses import Losses
from lmcache_core.tiers.reclaim import Reclaim
from lmcache_core.tiers.transfer import Loaded


class Books:
    """Of one tier. Whole batches at once: this runs on the loop, and a batch may have hundreds of objects a turn."""

    def __init__(
        self,
        counts: Counter[str],
        accounting: Accounting,
        losses: Losses,
        reclaim: Reclaim,
        epochs: Epochs,
        trouble: Callable[[str], None],
    ) -> None:
        self._counts = counts
        self._accounting = accounting
        self._losses = losses
        self._reclaim = reclaim
        self._epochs = epochs
        self._trouble = trouble

    def loaded(self, keys: Sequence[bytes], results: Sequence[Loaded]) -> None:
        """A load has ended."""
        there: list[tuple[bytes, int]] = []
        gone: list[bytes] = []
        broken: list[bytes] = []
        for key, result in zip(keys, results, strict=True):
            if result.reason is None:
                there.append((key, result.nbytes))
                continue
            self._counts[f"load_{result.reason}"] += 1
            self._losses.note([key], result.reason, result.error)
            if result.reason in (TierReason.GONE, TierReason.DAMAGED):
                gone.append(key)
            if result.reason is TierReason.DAMAGED:
                self._trouble(result.error)
                if not result.mismatched:
                    broken.append(key)
        self._add("loaded", "loaded_bytes", there)  # also what another server stored
        self._accounting.remove(gone)
        self._reclaim.set_aside(broken)

    def stored(self, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
        """A store has ended."""
        there: list[tuple[bytes, int]] = []
        full = False
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.result is Result.DONE:
                there.append((key, outcome.nbytes))
                continue
            self._counts[f"store_{outcome.result}"] += 1
            full |= outcome.result is Result.FULL
            if outcome.error:
                self._trouble(outcome.error)
        self._add("store_done", "stored_bytes", there)
        if full:
            self._reclaim.medium_is_full()
        # A clear may have come while they were stored.
        self._reclaim.delete(former_epochs([key for key, _ in there], self._epochs))

    def _add(self, objects: str, nbytes: str, there: Sequence[tuple[bytes, int]]) -> None:
        if there:
            self._counts[objects] += len(there)
            self._counts[nbytes] += sum(each for _, each in there)
            self._accounting.add(there)
