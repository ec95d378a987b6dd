"""Makes any adapter as slow as a medium that is not at hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem
from lmcache_mock.drills.wrapper import AdapterWrapper, Answer, Item

_LATE = Outcome(Result.FAILED, error="not done by its deadline", retryable=True)


class LatencyAdapter(AdapterWrapper):
    """Every call takes `latency_s`, and all calls together move `bandwidth_bytes_s` (None: unbounded).

    A call that cannot be done by its deadline lasts until then, as a real one does, and does nothing: it answers
    FAILED, or raises TierError if it has no outcomes. `close` ends the waits, and closes the wrapped adapter.
    """

    def __init__(self, inner: L2Adapter, *, latency_s: float = 0.0, bandwidth_bytes_s: float | None = None) -> None:
        super().__init__(inner)
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the wire is free again
        self._closing = threading.Event()

    def batch(
        self,
        operation: str,
        items: Sequence[Item],
        deadline: float,
        call: Callable[[Sequence[Item]], Sequence[Outcome]],
    ) -> Sequence[Outcome]:
        if not self._wait(deadline, sum(_moved_bytes(operation, item) for item in items)):
            return [_LATE] * len(items)
        return call(items)

    def ask(self, operation: str, keys: Sequence[bytes], deadline: float, call: Callable[[], Answer]) -> Answer:
        if not self._wait(deadline):
            raise TierError(_LATE.error)
        return call()

    def close(self) -> None:
        self._closing.set()
        super().close()

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


def _moved_bytes(operation: str, item: object) -> int:
    match item:
        case StoreItem():
            return item.nbytes
        case LoadItem():
            buffers = item.buffers[:1] if operation == "load_headers" else item.buffers
            return sum(buffer.nbytes for buffer in buffers)
    return 0
