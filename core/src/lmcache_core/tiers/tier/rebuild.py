"""Rebuilds a tier's accounting by `scan`: after a start, and periodically if several servers share the medium.

In the background, page by page, with pauses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from lmcache_core.limits import (
    ACCOUNTING_STEP_ENTRIES,
    BREAKER_PAUSE_MAX_S,
    BREAKER_PAUSE_S,
    RECOUNT_PAUSE_S,
    SCAN_PAUSE_S,
    SCAN_TRIES_MAX,
)
from lmcache_core.tiers.answers import page_of
from lmcache_core.tiers.contract import ScanEntry, ScanPage
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.doubts import Doubts
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING, Call
from lmcache_core.tiers.tier.medium import Medium
from lmcache_core.tiers.tier.order import Watch
from lmcache_core.tiers.tier.rebuild_states import REBUILD_TRANSITIONS, RebuildEvent, RebuildState
from lmcache_core.tiers.tier.trouble import Trouble

_SHARDS_A_STEP = 16  # some hundred entries of a million


class Rebuild:
    """Drives the scans of one tier. Lookups, loads and stores work meanwhile.

    A page that fails is asked for again after a pause that doubles: a tier that is down at start is scanned once it is
    up. A medium that may not be listed, or whose pages keep failing, is served with the accounts of what this server
    stores and loads, and asked again from time to time.
    """

    def __init__(
        self,
        medium: Medium,
        accounting: Accounting,
        doubts: Doubts,
        trouble: Trouble,
    ) -> None:
        self._medium = medium
        self._accounting = accounting
        self._doubts = doubts
        self._trouble = trouble
        self._order = medium.order
        self._clock = medium.clock
        self._cursor: str | None = None
        self._pages: list[list[ScanEntry]] = []
        self._call: Call | None = None
        self._last_call: Call | None = None  # the last one that was begun, also if it is late
        self._next_at = 0.0
        self._done_at = 0.0
        self._pause_s = BREAKER_PAUSE_S
        self._failed = 0  # pages in a row
        self.refused = ""  # why the accounts hold only what this server has stored and loaded
        self._gone: Iterator[int] = iter(())
        self._again_at = math.inf  # when to scan the medium once more on request
        self._requested_at = -math.inf  # when the last requested scan began
        self.forgotten = 0  # objects that others deleted
        self.on_finished: Callable[[], None] = lambda: None  # the accounts have all that the medium has
        self.failing = False  # the last page failed, or is late: nobody knows when the list is complete
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
        """Scan once more: the accounts may be wrong. Waits for the scan under way, and for some time after the last
        one."""
        if self.state is not RebuildState.OFF:
            self._again_at = max(self._clock.now, self._requested_at + RECOUNT_PAUSE_S)

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
                        self._again_at, self._requested_at = math.inf, self._clock.now
                    self.move(RebuildEvent.AGAIN)
                    self._last_call = None  # a page of the former scan may still come, from the middle of the list
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
        call = _PageCall(self, self._medium, self._cursor)
        if self._medium.lookups.has_spare and self._medium.lookups.submit(call):
            self._call = self._last_call = call
            if self.state is RebuildState.RESCANNING:
                self._order.unwatch(self._changed)
                self._changed = self._order.watch_all(of_stores=True)
        else:
            self._next_at = self._clock.now + self._pause_s

    def listed(self, call: _PageCall) -> None:
        """A page has come, or has failed. One that is late counts, too, until another is asked for."""
        if call is not self._call:
            waits = call is self._last_call and self.state in (RebuildState.SCANNING, RebuildState.RESCANNING)
            if not waits or call.error is not None:
                return
        self._call = None
        if call.error is not None or not isinstance(call.result, tuple):
            self._try_later(call.failure, for_good=not getattr(call.error, "retryable", True))
            return
        self.failing = False
        self._trouble.well("scan", self._clock.now)
        page, leads = call.result
        counted = self._accounting.is_counted
        page = page._replace(entries=[each for each in page.entries if counted(each.key, each.nbytes, self._clock.now)])
        if leads is not None:
            self._accounting.leads = leads
        self._pause_s, self._failed = BREAKER_PAUSE_S, 0
        self._cursor = page.cursor
        self._next_at = self._clock.now + SCAN_PAUSE_S
        if self.state is RebuildState.RESCANNING:
            self._order.unwatch(self._changed)
            self._accounting.found(page.entries, self._changed, self._doubts.add)
            if self._cursor is None:
                self.refused = ""
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
        self.on_finished()

    def late(self, call: _PageCall) -> None:
        """A page is not there by its deadline."""
        self._call = None  # one that hangs may never return
        self._try_later("a page of the scan was not done by its deadline")

    def _try_later(self, error: str, *, for_good: bool = False) -> None:
        self.failing = True
        self._trouble.failed("scan", error, self._clock.now)
        self._failed += 1
        pause_s, self._pause_s = self._pause_s, min(BREAKER_PAUSE_MAX_S, 2 * self._pause_s)
        if not for_good and self._failed < SCAN_TRIES_MAX:
            self._next_at = self._clock.now + pause_s
            return
        # Stores must not wait for a listing that may never come. What it would have found is accounted when it is used.
        self.refused = error
        if self.state is RebuildState.SCANNING:
            self._accounting.scan_ended(self._pages)
            self._pages = []
        else:
            self._order.unwatch(self._changed)
        self.move(RebuildEvent.REFUSED)
        self._done_at, self._again_at = self._clock.now, self._clock.now + pause_s


class _PageCall(Call):
    """Lists one page of the medium."""

    def __init__(self, rebuild: Rebuild, medium: Medium, cursor: str | None) -> None:
        super().__init__(medium.clock.now + medium.config.deadline_s, HOUSEKEEPING)
        self._rebuild = rebuild
        self._adapter = medium.adapter
        self._cursor = cursor

    def work(self) -> tuple[ScanPage, bool | None]:
        """The page, and if it is the first one, which also decides anew, whether this server leads."""
        leads = bool(self._adapter.try_to_lead()) if self._cursor is None else None
        page = page_of(self._adapter.scan, self._adapter.scan(self._cursor, self.deadline))
        return ScanPage(sorted(page.entries, key=lambda entry: entry.used_at_s), page.cursor), leads

    def ended(self) -> None:
        self._rebuild.listed(self)

    def late(self) -> None:
        self._rebuild.late(self)
