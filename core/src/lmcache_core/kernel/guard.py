"""An eviction policy behind a guard. It is a plugin: its mistakes may cost room, but never a hit or a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from lmcache_core.guard import is_interrupt
from lmcache_core.kernel.contracts import Entry, EvictionPolicy

_Answer = TypeVar("_Answer")
_P = ParamSpec("_P")


class GuardedPolicy(EvictionPolicy):
    """Passes every call on. If the policy raises, `on_fault(method, error)` is called and no victims are named: a store
    that needs room is then answered FULL, and lookups go on. What the policy forgot in that call stays until it is
    cleared."""

    def __init__(self, policy: EvictionPolicy, on_fault: Callable[[str, BaseException], None]) -> None:
        self.inner = policy
        self.wants_charges, self.evicts = policy.wants_charges, policy.evicts
        self._on_fault = on_fault

    def insert(self, entries: Sequence[Entry]) -> None:
        self.attempt("insert", None, self.inner.insert, entries)

    def access(self, entries: Sequence[Entry]) -> None:
        self.attempt("access", None, self.inner.access, entries)

    def remove(self, entries: Sequence[Entry]) -> None:
        self.attempt("remove", None, self.inner.remove, entries)

    def held(self, entries: Sequence[Entry]) -> None:
        self.attempt("held", None, self.inner.held, entries)

    def released(self, entries: Sequence[Entry]) -> None:
        self.attempt("released", None, self.inner.released, entries)

    def resize(self, capacity_bytes: int) -> None:
        self.attempt("resize", None, self.inner.resize, capacity_bytes)

    def charge(self, namespace: int, nbytes: int) -> None:
        self.attempt("charge", None, self.inner.charge, namespace, nbytes)

    def victims(self, nbytes: int) -> list[Entry]:
        return self.attempt("victims", [], self._once, self.inner.victims, nbytes)

    def surplus(self, nbytes: int) -> list[Entry]:
        return self.attempt("surplus", [], self._once, self.inner.surplus, nbytes)

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        return self.attempt("spares", True, self.inner.spares, entries, namespace)

    def status(self) -> dict[str, Any]:
        return self.attempt("status", {}, self.inner.status)

    @staticmethod
    def _once(ask: Callable[[int], Sequence[Entry]], nbytes: int) -> list[Entry]:
        """The entries that the policy names, each once."""
        return list(dict.fromkeys(ask(nbytes)))

    def attempt(
        self, method: str, otherwise: _Answer, call: Callable[_P, _Answer], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _Answer:
        """The result of `call`, or `otherwise` if the policy's code raises."""
        try:  # as `guarded`, whose handler would cost each call 0.2 µs
            return call(*args, **kwargs)
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._on_fault(method, error)
            return otherwise
