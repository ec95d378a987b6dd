"""Rebuilds a tier's accounting by `scan` after a start: in the background, page by page, with pauses."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from lmcache_core.limits import ACCOUNTING_STEP_ENTRIES, BREAKER_PAUSE_MAX_S, BREAKER_PAUSE_S, SCAN_PAUSE_S
from lmcache_core.tiers.accounting import Accounting
from lmcache_core.tiers.contract import L2Adapter, ScanEntry, ScanPage
from lmcache_core.tiers.lanes import HOUSEKEEPING, Call, CallState, Lane


class RebuildState(StrEnum):
    OFF = "off"  # the medium cannot be scanned
    SCANNING = "scanning"
    ADOPTING = "adopting"
    DONE = "done"


class Rebuild:
    """Drives the scan of one tier. Lookups, loads and stores work meanwhile.

    A page that fails is asked for again after a pause that doubles: a tier that is down at start is scanned once
    it is up.
    """

    def __init__(
        self, adapter: L2Adapter, accounting: Accounting, lane: Lane, deadline_s: float, on_done: Callable[[], None]
    ) -> None:
        self._adapter = adapter
        self._accounting = accounting
        self._lane = lane
        self._deadline_s = deadline_s
        self._on_done = on_done
        self._cursor: str | None = None
        self._pages: list[list[ScanEntry]] = []
        self._call: Call | None = None
        self._next_at = 0.0
        self._pause_s = BREAKER_PAUSE_S
        self.now = 0.0
        self.state = RebuildState.SCANNING if adapter.capabilities.scan else RebuildState.OFF
        if self.state is RebuildState.SCANNING:
            accounting.scan_begins()

    def step(self) -> None:
        """Start the next page, or take over some of what was found."""
        now = self.now
        if self.state is RebuildState.ADOPTING:
            if self._accounting.adopt(ACCOUNTING_STEP_ENTRIES):
                self.state = RebuildState.DONE
                self._on_done()
        elif self.state is RebuildState.SCANNING and self._call is None and now >= self._next_at:
            cursor, deadline = self._cursor, now + self._deadline_s
            call = Call(lambda: self._page(cursor, deadline), deadline, HOUSEKEEPING, self._ended, self._late)
            if self._lane.submit(call):
                self._call = call
            else:
                self._next_at = now + self._pause_s

    @property
    def next_at(self) -> float | None:
        """When `step` has something to do; None while a page is under way, or when all is done."""
        if self.state is RebuildState.ADOPTING:
            return self.now
        return self._next_at if self.state is RebuildState.SCANNING and self._call is None else None

    def _page(self, cursor: str | None, deadline: float) -> ScanPage:
        page = self._adapter.scan(cursor, deadline)
        return ScanPage(sorted(page.entries, key=lambda entry: entry.used_at_s), page.cursor)

    def _ended(self, call: Call) -> None:
        if call is not self._call:
            return  # was given up as late, and another is under way
        self._call = None
        if call.error is not None or not isinstance(call.result, ScanPage):
            self._try_later()
            return
        self._pause_s = BREAKER_PAUSE_S
        self._pages.append(list(call.result.entries))
        self._cursor = call.result.cursor
        self._next_at = self.now + SCAN_PAUSE_S
        if self._cursor is None:
            self._accounting.scan_ended(self._pages)
            self._pages = []
            self.state = RebuildState.ADOPTING

    def _late(self, call: Call) -> None:
        assert call.state in (CallState.LATE, CallState.EXPIRED)
        if call is self._call:
            self._call = None
            self._try_later()

    def _try_later(self) -> None:
        self._next_at = self.now + self._pause_s
        self._pause_s = min(BREAKER_PAUSE_MAX_S, 2 * self._pause_s)
