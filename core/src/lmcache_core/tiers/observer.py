"""Observers of tiers: notified of stores, removals and health, in addition to the caller of each operation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

from lmcache_core.tiers.contract import Outcome
from lmcache_core.tiers.l1 import CommittedObject
from lmcache_core.tiers.object.transfer import Loaded


class TierObserver(Protocol):
    """Called on the loop's thread; quick, and never raises."""

    def stored(self, tier: str, objects: Sequence[CommittedObject]) -> None:
        """The tier has these now."""

    def removed(self, tier: str, namespace: int, keys: Sequence[bytes]) -> None:
        """The tier does not have these any more."""

    def changed(self, namespace: int, keys: Sequence[bytes]) -> None:
        """A tier may serve these now, or may no longer: other tiers may have them, too."""

    def recounted(self) -> None:
        """Any number of objects may have come or gone: a medium was listed, or another server has moved epochs."""

    def breaker_moved(self, tier: str, what: str, state: str, error: str) -> None:
        """`what`: "reads" or "writes". `open`: the tier is not called for a while; `closed`: it is called again."""

    def tier_changed(self, tier: str, action: str) -> None:
        """`action`: `add`, `drain`, `remove`, `reconfigure` or `replace`, at run time."""

    # --- for tracing: times are seconds of the server's clock ----------------------------------------------

    def loaded(
        self,
        tier: str,
        began_s: float,
        returned_s: float,
        waiters: Mapping[Hashable, Sequence[int]],
        nbytes: int,
        results: Sequence[Loaded],
    ) -> None:
        """A call has loaded objects of `nbytes` each, and they are committed. `waiters`: the `trace` of each traced
        lookup, with the positions in `results` that it waited for."""

    def load_failed(self, tier: str, began_s: float, waiters: Mapping[Hashable, Sequence[int]], reason: str) -> None:
        """A call did not come back by its deadline."""

    def storing(self, tier: str, objects: Sequence[CommittedObject]) -> Callable[[Sequence[Outcome]], None] | None:
        """A call to store objects begins. Returns what to call with its outcomes, or None if none of them is traced."""
