"""Who is told how tiers fare, beside whoever asks them for something."""

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

    def breaker_moved(self, tier: str, what: str, state: str, error: str) -> None:
        """`what`: "reads" or "writes". The tier is left alone (`open`), or used again (`closed`)."""

    def tier_changed(self, tier: str, action: str) -> None:
        """`add`, `drain`, `remove`, `reconfigure` or `replace`, at run time."""


class TierTracer(Protocol):
    """Told of calls to tiers for whoever keeps a trace of them. Called on the loop's thread; quick, and never raises.
    Seconds are those of the clock."""

    def loaded(
        self,
        tier: str,
        began_s: float,
        returned_s: float,
        waiters: Mapping[Hashable, Sequence[int]],
        nbytes: int,
        results: Sequence[Loaded],
    ) -> None:
        """A call has loaded objects of `nbytes` each, and they are committed. `waiters`: what traced lookups gave as
        `trace`, with the positions in `results` that each waited for."""

    def load_failed(self, tier: str, began_s: float, waiters: Mapping[Hashable, Sequence[int]], reason: str) -> None:
        """A call did not come back by its deadline."""

    def storing(self, tier: str, objects: Sequence[CommittedObject]) -> Callable[[Sequence[Outcome]], None] | None:
        """A call to store objects begins. Who keeps a trace of any gives what is to be called with its outcomes."""
