"""An eviction policy behind a guard: it is a plugin, and its mistakes must cost room, never a hit or a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lmcache_core.kernel.contracts import Entry, EvictionPolicy

_Answer = TypeVar("_Answer")


class GuardedPolicy(EvictionPolicy):
    """Passes every call on. One that raises is told to `on_fault(method, error)` and names no victims: a store that
    needs room is then answered FULL, and lookups go on. What it forgot by that stays until it is cleared. A panic of a
    library in Rust, which is no `Exception`, is such a fault, too."""

    def __init__(self, policy: EvictionPolicy, on_fault: Callable[[str, BaseException], None]) -> None:
        self.inner = policy
        self.wants_charges, self.evicts = policy.wants_charges, policy.evicts
        self._on_fault = on_fault

    def insert(self, entries: Sequence[Entry]) -> None:
        self._guarded("insert", lambda: self.inner.insert(entries), None)

    def access(self, entries: Sequence[Entry]) -> None:
        self._guarded("access", lambda: self.inner.access(entries), None)

    def remove(self, entries: Sequence[Entry]) -> None:
        self._guarded("remove", lambda: self.inner.remove(entries), None)

    def held(self, entries: Sequence[Entry]) -> None:
        self._guarded("held", lambda: self.inner.held(entries), None)

    def released(self, entries: Sequence[Entry]) -> None:
        self._guarded("released", lambda: self.inner.released(entries), None)

    def resize(self, capacity_bytes: int) -> None:
        self._guarded("resize", lambda: self.inner.resize(capacity_bytes), None)

    def charge(self, namespace: int, nbytes: int) -> None:
        self._guarded("charge", lambda: self.inner.charge(namespace, nbytes), None)

    def victims(self, nbytes: int) -> list[Entry]:
        return self._guarded("victims", lambda: list(dict.fromkeys(self.inner.victims(nbytes))), [])

    def surplus(self, nbytes: int) -> list[Entry]:
        return self._guarded("surplus", lambda: list(dict.fromkeys(self.inner.surplus(nbytes))), [])

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        return self._guarded("spares", lambda: self.inner.spares(entries, namespace), True)

    def _guarded(self, method: str, call: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the code of others
            self._on_fault(method, error)
            return otherwise
