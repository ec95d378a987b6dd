"""Records an adapter's calls and answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, ScanPage, StoreItem, Usage

T = TypeVar("T")


class Recorded(NamedTuple):
    """One call. `answers` is what it returned, None if it raised `error`."""

    operation: str
    keys: tuple[bytes, ...]
    answers: tuple[Any, ...] | None
    error: BaseException | None = None


class RecordingAdapter(L2Adapter):
    """Passes everything to `inner`. `calls` has every batch call, or the last `calls_max`, in the order of their ends;
    `tell` is called with each. Keeps no buffers."""

    def __init__(
        self, inner: L2Adapter, *, calls_max: int | None = None, tell: Callable[[Recorded], None] | None = None
    ) -> None:
        self.inner = inner
        self._calls_max = calls_max
        self._tell = tell
        self.capabilities = inner.capabilities  # type: ignore[misc]  # a wrapper can what it wraps can
        self.calls: list[Recorded] = []
        self._lock = threading.Lock()

    def of(self, operation: str) -> list[Recorded]:
        """The calls of one method."""
        with self._lock:
            return [call for call in self.calls if call.operation == operation]

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        return self._noted("store", [item.key for item in items], lambda: self.inner.store(items, deadline))

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return self._noted("exists", keys, lambda: self.inner.exists(keys, deadline))

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self._noted("load", [item.key for item in items], lambda: self.inner.load(items, deadline))

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self._noted("delete", keys, lambda: self.inner.delete(keys, deadline))

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self._noted("set_aside", keys, lambda: self.inner.set_aside(keys, deadline))

    def usage(self) -> Usage:
        return self.inner.usage()

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        page = self.inner.scan(cursor, deadline)
        self._keep(Recorded("scan", (), tuple(page.entries)))
        return page

    def medium(self) -> str | None:
        return self.inner.medium()

    def try_to_lead(self) -> bool:
        return self.inner.try_to_lead()

    def close(self) -> None:
        self._keep(Recorded("close", (), ()))
        self.inner.close()

    def _noted(self, operation: str, keys: Sequence[bytes], call: Callable[[], Sequence[T]]) -> Sequence[T]:
        try:
            answers = call()
        except BaseException as error:
            self._keep(Recorded(operation, tuple(keys), None, error))
            raise
        self._keep(Recorded(operation, tuple(keys), tuple(answers)))
        return answers

    def _keep(self, call: Recorded) -> None:
        with self._lock:
            self.calls.append(call)
            if self._calls_max is not None:
                del self.calls[: -self._calls_max]
        if self._tell is not None:
            self._tell(call)
