"""What every wrapper around an adapter has in common: all calls pass to the wrapped one, through two places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, ScanPage, StoreItem, Usage

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class AdapterWrapper(L2Adapter):
    """Passes every call to `inner`, and closes it. All calls with a deadline go through `batch` and `ask`, which
    subclasses override."""

    def __init__(self, inner: L2Adapter) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities  # type: ignore[misc]  # a wrapper can what it wraps can

    def batch(
        self,
        operation: str,
        items: Sequence[Item],
        deadline: float,
        call: Callable[[Sequence[Item]], Sequence[Outcome]],
    ) -> Sequence[Outcome]:
        """A call with an outcome for each item. `call` is that of the wrapped adapter; it takes any of the items."""
        return call(items)

    def ask(self, operation: str, keys: Sequence[bytes], deadline: float, call: Callable[[], Answer]) -> Answer:
        """A call that answers as a whole, or raises `TierError`."""
        return call()

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        return self.batch("store", items, deadline, lambda some: self.inner.store(some, deadline))

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return self.ask("exists", keys, deadline, lambda: self.inner.exists(keys, deadline))

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self.batch("load", items, deadline, lambda some: self.inner.load(some, deadline))

    def load_headers(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self.batch("load_headers", items, deadline, lambda some: self.inner.load_headers(some, deadline))

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self.batch("delete", keys, deadline, lambda some: self.inner.delete(some, deadline))

    def set_aside(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> Sequence[Outcome]:
        if not versions:
            return self.batch("set_aside", keys, deadline, lambda some: self.inner.set_aside(some, deadline))
        of_key = dict(zip(keys, versions, strict=True))
        return self.batch(
            "set_aside",
            keys,
            deadline,
            lambda some: self.inner.set_aside(some, deadline, [of_key[key] for key in some]),
        )

    def usage(self) -> Usage:
        return self.inner.usage()

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        return self.ask("scan", (), deadline, lambda: self.inner.scan(cursor, deadline))

    def medium(self) -> str | None:
        return self.inner.medium()

    def try_to_lead(self) -> bool:
        return self.inner.try_to_lead()

    def status(self) -> dict[str, Any]:
        return self.inner.status()

    def places(self, keys: Sequence[bytes]) -> Sequence[str]:
        return self.inner.places(keys)

    def check(self, deadline: float) -> Iterator[Finding]:
        return self.inner.check(deadline)

    def close(self) -> None:
        self.inner.close()
