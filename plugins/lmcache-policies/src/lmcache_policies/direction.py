"""Which way a caller walks the keys of its requests.

The contract has the end of a request before its beginning, so that a suffix goes before its prefix. Who gives single
entries, as the simulator does, may walk from the first to the last. That cannot be seen in one request, but it shows
when a request repeats another: where it went on from what was there to what was new, the walk goes forward; where it
went on from what was new to what was there, it goes backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_policies.chain import unlink

SURE_REPEATS = 8  # by which one way must lead the other
RUN_ENTRIES_MAX = 4096  # that wait for the end of a request
FORWARD, BACKWARD = 1, 2


class Direction:
    """Passes uses on. If they come forward, those of a request wait for its end, and are passed on backward; that of an
    entry which is removed meanwhile does not wait any longer."""

    def __init__(self) -> None:
        self._lead = 0  # of repeats that went forward
        self._last: Any = None  # the past used last
        self._last_fresh = False
        self._run: dict[Any, bool] = {}

    @property
    def pending(self) -> bool:
        return bool(self._run)

    def waits(self, entry: Any) -> bool:
        """Whether its use has not been passed on yet."""
        return entry in self._run

    def newcomer(self) -> Any:
        """The newcomer of the request under way that came last; None if its last use was of a resident, or none is
        under way."""
        if not self._run:
            return None
        entry = next(reversed(self._run))
        return entry if self._run[entry] and not entry.holds else None

    def follow(self, entry: Any, fresh: bool) -> Sequence[tuple[Any, bool]]:
        """One use. Returns those to be taken now, with whether each is of a newcomer."""
        past, last = entry.policy_data, self._last
        goes_on = last is not None and past.before == last.number
        if goes_on:
            if past.began_with == FORWARD:
                self._lead = min(self._lead + 1, 4 * SURE_REPEATS)
            elif past.began_with == BACKWARD:
                self._lead = max(self._lead - 1, -4 * SURE_REPEATS)
        elif last is not None:
            past.before = last.number
            past.began_with = 0 if fresh is self._last_fresh else FORWARD if fresh else BACKWARD
        known = past.last >= 0
        self._last, self._last_fresh = past, fresh
        if self._lead < SURE_REPEATS:
            return [*self.end(keep=past), (entry, fresh)]
        ended: Sequence[tuple[Any, bool]] = ()
        if entry in self._run or (known and not goes_on) or len(self._run) >= RUN_ENTRIES_MAX:
            ended = self.end(keep=past)
        if not fresh and entry.newer is not None:
            unlink(entry)
        self._run[entry] = fresh
        return ended

    def end(self, keep: Any = None) -> Sequence[tuple[Any, bool]]:
        """A request has ended: the uses that waited."""
        self._last = keep
        if not self._run:
            return ()
        uses = list(self._run.items())[::-1]
        self._run = {}
        return uses

    def forget(self, entry: Any) -> Sequence[tuple[Any, bool]]:
        """It is about to be removed: its use, if that waited."""
        fresh = self._run.pop(entry, None)
        return () if fresh is None else [(entry, fresh)]
