"""Rebuilds a tier's accounting by `scan`: after a start, and periodically if several servers share the medium.

In the background, page by page, with pauses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lmcache_core.limits import (
    ACCOUNTING_STEP_ENTRIES,
    BREAKER_PAUSE_MAX_S,
    BREAKER_PAUSE_S,
    RECOUNT_PAUSE_S,
    SCAN_PAUSE_S,
)
from lmcache_core.tiers.contract import ScanEntry, ScanPage
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.doubts import Doubts
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING, Call
from lmcache_core.tiers.tier.medium import Medium
from lmcache_core.tiers.tier.order import Watch
from lmcache_core.tiers.tier.rebuild_states import REBUILD_TRANSITIONS, RebuildEvent, RebuildState
from lmcache_core.tiers.tier.reclaim import Reclaim
from lmcache_core.tiers.tier.trouble import Trouble

_SHARDS_A_STEP = 16  # some hundred entries of a million


class Rebuild:
    """Drives the scans of one tier. Lookups, loads and stores work meanwhile.

    A page that fails is asked for again after a pause that doubles: a tier that is down at start is scanned once it is
    up.
    """

    def __init__(
        self,
        medium: Medium,
        accounting: Accounting,
        reclaim: Reclaim,
        doubts: Doubts,
        trouble: Trouble,
    ) -> None:
        self._medium = medium
        self._accounting = accounting
        self._reclaim = reclaim
        self._doubts = doubts
        self._trouble = trouble
        self._order = medium.order
        self._clock = medium.clock
        self._cursor: str | None = None
        self._pages: list[list[ScanEntry]] = []
        self._call: Call | None = None
        self._next_at = 0.0
        self._done_at = 0.0
        self._pause_s = BREAKER_PAUSE_S
        self._gone: Iterator[int] = iter(())
        self._again_at = math.inf  # when to scan the medium once more on request
        self._asked_at = -math.inf  # when the last requested scan began
        self.forgotten = 0  # objects that others deleted
        self.state = RebuildState.SCANNING if medium.adapter.capabilities.scan else RebuildState.OFF
        if self.state is RebuildState.SCANNING:
            accounting.scan_begins()
        # An object that is deleted after it was listed must not come back with the list. The first scan watches until
        # everything is entered, a later scan (which enters each page at once) during the page.
        self._changed = self._order.watch_all(of_stores=False) if self.state is RebuildState.SCANNING else Watch()

    def move(self, event: RebuildEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = REBUILD_TRANSITIONS[self.state, event]

    def again(self) -> None:
        """Scan once more: the books may be wrong. Waits for the scan under way, and for some time after the last
        one."""
        if self.state is not RebuildState.OFF:
            self._again_at = max(self._clock.now, self._asked_at + RECOUNT_PAUSE_S)

    @property
    def _due_at(self) -> float:
        """When the next scan is due, if none is under way."""
        rescan_s = self._medium.config.rescan_s
        return min(self._again_at, math.inf if rescan_s is None else self._done_at + rescan_s)

    def step(self) -> None:
        """Start the next page, or enter some of what was found."""
        match self.state:
            case RebuildState.ADOPTING:
                if self._accounting.adopt(ACCOUNTING_STEP_ENTRIES, self._changed, self._doubts.add):
                    self._order.unwatch(self._changed)
                    self._finish()
                    # The scan may have found objects of former epochs: a clear just before a restart.
                    self._reclaim.forget_former_epochs()
            case RebuildState.SCANNING | RebuildState.RESCANNING:
                if self._call is None and self._clock.now >= self._next_at:
                    self._ask()
            case RebuildState.FORGETTING:
                for _ in range(_SHARDS_A_STEP):
                    lost = next(self._gone, None)
                    if lost is None:
                        self._finish()
                        return
                    self.forgotten += lost
            case RebuildState.DONE:
                if self._clock.now >= self._due_at:
                    if self._clock.now >= self._again_at:
                        self._again_at, self._asked_at = math.inf, self._clock.now
                    self.move(RebuildEvent.AGAIN)
                    self._cursor, self._next_at = None, self._clock.now
                    self._accounting.rescan_begins()
                    self._ask()

    @property
    def next_at(self) -> float | None:
        """When `step` has work; None while a page is under way, or when all is done."""
        match self.state:
            case RebuildState.ADOPTING | RebuildState.FORGETTING:
                return self._clock.now
            case RebuildState.SCANNING | RebuildState.RESCANNING:
                return self._next_at if self._call is None else None
            case RebuildState.DONE if self._due_at < math.inf:
                return self._due_at
        return None

    def _ask(self) -> None:
        cursor, deadline = self._cursor, self._clock.now + self._medium.config.deadline_s
        call = Call(lambda: self._page(cursor, deadline), deadline, HOUSEKEEPING, self._ended, self._late)
        if self._medium.lookups.submit(call):
            self._call = call
            if self.state is RebuildState.RESCANNING:
                self._order.unwatch(self._changed)
                self._changed = self._order.watch_all(of_stores=True)
        else:
            self._next_at = self._clock.now + self._pause_s

    def _page(self, cursor: str | None, deadline: float) -> tuple[ScanPage, bool | None]:
        """On a lane. The first page also decides anew which server leads."""
        leads = self._medium.adapter.try_to_lead() if cursor is None else None
        page = self._medium.adapter.scan(cursor, deadline)
        return ScanPage(sorted(page.entries, key=lambda entry: entry.used_at_s), page.cursor), leads

    def _ended(self, call: Call) -> None:
        if call is not self._call:
            return  # was reported late, and another is under way
        self._call = None
        if call.error is not None or not isinstance(call.result, tuple):
            self._try_later(str(call.error) or repr(call.error))
            return
        self._trouble.well("scan", self._clock.now)
        page, leads = call.result
        if leads is not None:
            self._accounting.leads = leads
        self._pause_s = BREAKER_PAUSE_S
        self._cursor = page.cursor
        self._next_at = self._clock.now + SCAN_PAUSE_S
        if self.state is RebuildState.RESCANNING:
            self._order.unwatch(self._changed)
            self._accounting.found(page.entries, self._changed, self._doubts.add)
            if self._cursor is None:
                self._gone = self._accounting.gone()
                self.move(RebuildEvent.LISTED)
            return
        self._pages.append(list(page.entries))
        if self._cursor is None:
            self._accounting.scan_ended(self._pages)
            self._pages = []
            self.move(RebuildEvent.LISTED)

    def _finish(self) -> None:
        self.move(RebuildEvent.FINISHED)
        self._done_at = self._clock.now

    def _late(self, call: Call) -> None:
        if call is self._call:
            self._call = None
            self._try_later("a page of the scan was not done by its deadline")

    def _try_later(self, error: str) -> None:
        self._trouble.failed("scan", error, self._clock.now)
        self._next_at = self._clock.now + self._pause_s
        self._pause_s = min(BREAKER_PAUSE_MAX_S, 2 * self._pause_s)
