"""A medium in memory whose calls can be held, and a tier of a host over it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_core.tiers.contract import LoadItem, Outcome, StoreItem
from lmcache_core.tiers.tier.config import TierConfig
from lmcache_core.tiers.tier.tier import Tier
from lmcache_hosts.naming import BlockFormat, object_key
from lmcache_hosts.requests import HostKey, HostObject
from lmcache_hosts.tier_objects import Deadlines, TierObjects
from lmcache_mock.memory import MemoryAdapter

FORMAT = BlockFormat("model", "bytes of a test")
NAMESPACE = FORMAT.namespace(8192)
SHORT = Deadlines(lookup_s=0.3, load_s=0.3, store_s=0.3)


class GatedAdapter(MemoryAdapter):
    """`hold("load")` keeps such calls inside until `release`, whatever their deadline; then they do their work. Those
    of "answer" have looked what is there, and keep it to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {"store": 0, "load": 0, "exists": 0, "answer": 0, "delete": 0}
        self._gates = {name: threading.Event() for name in self.calls}
        self.entered = {name: threading.Semaphore(0) for name in self.calls}
        self.release()

    def hold(self, *names: str) -> None:
        for name in names:
            self._gates[name].clear()

    def release(self, *names: str) -> None:
        """All, without names."""
        for name in names or self._gates:
            self._gates[name].set()

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        self._pass("store")
        return super().store(items, math.inf)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self._pass("load")
        return super().load(items, math.inf)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self._pass("exists")
        found = super().exists(keys, deadline)
        self._pass("answer")
        return found

    def delete_one(self, key: bytes, deadline: float) -> None:
        self._pass("delete")
        super().delete_one(key, math.inf)

    def _pass(self, name: str) -> None:
        self.calls[name] += 1
        self.entered[name].release()
        self._gates[name].wait()


def tier_over(
    adapter: MemoryAdapter,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
    **config: Any,
) -> TierObjects:
    config.setdefault("deadline_s", deadlines.store_s)
    eviction: Callable[[], Any] | None = config.pop("eviction", None)
    tier = Tier(
        "host",
        adapter,
        TierConfig(**config),
        eviction=None if eviction is None else eviction(),
        make_eviction=eviction,
    )
    return TierObjects(tier, deadlines)


def content(number: int) -> bytes:
    return bytes([number % 251]) * NAMESPACE.layout.nbytes


def key(number: int) -> HostKey:
    return HostKey(NAMESPACE, object_key(NAMESPACE, number.to_bytes(32, "little")))


def stored(number: int) -> HostObject:
    return HostObject(*key(number), memoryview(content(number)))


def room(number: int) -> tuple[bytearray, HostObject]:
    buffer = bytearray(NAMESPACE.layout.nbytes)
    return buffer, HostObject(*key(number), memoryview(buffer))
