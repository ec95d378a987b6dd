"""Makes any adapter as slow as a medium that is not at hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, ScanPage, StoreItem, Usage

_LATE = Outcome(Result.FAILED, error="not done by its deadline", retryable=True)


class LatencyAdapter(L2Adapter):
    """Every call takes `latency_s`, and all calls together move `bandwidth_bytes_s` (None: unbounded).

    A call that cannot be done by its deadline lasts until then, as a real one does, and does nothing: it answers
    FAILED, or raises TierError if it has no outcomes. `close` ends the waits, and closes the wrapped adapter.
    """

    def __init__(self, inner: L2Adapter, *, latency_s: float = 0.0, bandwidth_bytes_s: float | None = None) -> None:
        self.inner = inner
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.capabilities = inner.capabilities  # type: ignore[misc]  # a wrapper can what it wraps can
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the wire is free again
        self._closing = threading.Event()

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        if not self._wait(deadline, sum(item.nbytes for item in items)):
            return [_LATE] * len(items)
        return self.inner.store(items, deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self._wait_or_raise(deadline)
        return self.inner.exists(keys, deadline)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        if not self._wait(deadline, sum(buffer.nbytes for item in items for buffer in item.buffers)):
            return [_LATE] * len(items)
        return self.inner.load(items, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        if not self._wait(deadline):
            return [_LATE] * len(keys)
        return self.inner.delete(keys, deadline)

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        if not self._wait(deadline):
            return [_LATE] * len(keys)
        return self.inner.set_aside(keys, deadline)

    def usage(self) -> Usage:
        return self.inner.usage()

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        self._wait_or_raise(deadline)
        return self.inner.scan(cursor, deadline)

    def medium(self) -> str | None:
        return self.inner.medium()

    def try_to_lead(self) -> bool:
        return self.inner.try_to_lead()

    def close(self) -> None:
        self._closing.set()
        self.inner.close()

    def _wait_or_raise(self, deadline: float) -> None:
        if not self._wait(deadline):
            raise TierError(_LATE.error)

    def _wait(self, deadline: float, nbytes: int = 0) -> bool:
        """Spend the time that the call costs. False: its deadline came first."""
        now = time.monotonic()
        done_at = now + self.latency_s
        if nbytes and self.bandwidth_bytes_s:
            with self._lock:
                self._free_at = max(self._free_at, now) + nbytes / self.bandwidth_bytes_s
                done_at = max(done_at, self._free_at + self.latency_s)
        pause = min(done_at, deadline) - now
        if pause > 0:
            self._closing.wait(pause)
        return done_at <= deadline
