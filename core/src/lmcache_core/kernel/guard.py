"""An eviction policy behind a guard: it is a plugin, and its mistakes must cost room, never a hit or a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lmcache_core.kernel.contracts import Entry, EvictionPolicy


class GuardedPolicy(EvictionPolicy):
    """Passes every call on. One that raises is told to `on_fault(method, error)` and names no victims: a store that
    needs room is then answered FULL, and lookups go on. What it forgot by that stays until it is cleared."""

    def __init__(self, policy: EvictionPolicy, on_fault: Callable[[str, Exception], None]) -> None:
        self.inner = policy
        self.wants_charges, self.evicts = policy.wants_charges, policy.evicts
        self._on_fault = on_fault

    def insert(self, entries: Sequence[Entry]) -> None:
        self._call("insert", self.inner.insert, entries)

    def access(self, entries: Sequence[Entry]) -> None:
        self._call("access", self.inner.access, entries)

    def remove(self, entries: Sequence[Entry]) -> None:
        self._call("remove", self.inner.remove, entries)

    def held(self, entries: Sequence[Entry]) -> None:
        self._call("held", self.inner.held, entries)

    def released(self, entries: Sequence[Entry]) -> None:
        self._call("released", self.inner.released, entries)

    def resize(self, capacity_bytes: int) -> None:
        self._call("resize", self.inner.resize, capacity_bytes)

    def victims(self, nbytes: int) -> list[Entry]:
        try:
            return list(dict.fromkeys(self.inner.victims(nbytes)))
        except Exception as error:  # noqa: BLE001 - the code of others
            self._on_fault("victims", error)
            return []

    def charge(self, namespace: int, nbytes: int) -> None:
        self._call("charge", lambda nbytes: self.inner.charge(namespace, nbytes), nbytes)

    def surplus(self, nbytes: int) -> list[Entry]:
        try:
            return list(dict.fromkeys(self.inner.surplus(nbytes)))
        except Exception as error:  # noqa: BLE001 - the code of others
            self._on_fault("surplus", error)
            return []

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        try:
            return self.inner.spares(entries, namespace)
        except Exception as error:  # noqa: BLE001 - the code of others
            self._on_fault("spares", error)
            return True

    def _call(self, name: str, method: Callable[[Any], None], argument: Any) -> None:
        try:
            method(argument)
        except Exception as error:  # noqa: BLE001 - the code of others
            self._on_fault(name, error)
