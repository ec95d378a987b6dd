"""MLPerf Storage's KV-cache benchmark: our tiers, or our server, in the place of its disk tier.

    from lmcache_hosts.mlperf import in_place_of_nvme

    with in_place_of_nvme({"tier": {"type": "fs", "path": "/var/cache/kv"}}):
        kv_cache.cli.main()

The benchmark has no option for a backend: its `MultiTierCache` makes an `NVMeBackend`. This replaces that name while a
cache is made, and touches no file. The benchmark's folder must be importable, as its own `kv-cache.py` needs it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from kv_cache import cache as kv_cache
from kv_cache.backends import StorageBackend

from lmcache_core import Namespace
from lmcache_hosts.interface import HostInterface
from lmcache_hosts.naming import object_key
from lmcache_hosts.requests import HostKey, HostObject
from lmcache_hosts.settings import HostSettings, open_objects

__all__ = ["INTERFACE", "HostedStorage", "in_place_of_nvme"]

INTERFACE = HostInterface(
    "the KV-cache benchmark of MLPerf Storage",
    ("kv-cache-benchmark",),
    ("v3, commit 23aa82e",),
    {"write": ("key", "data"), "read": ("key",), "delete": ("key",), "clear": ()},
)


class _Entry(NamedTuple):
    name: HostKey
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class HostedStorage(StorageBackend):  # type: ignore[misc]  # of the benchmark, which is not here when types are checked
    """Arrays of the benchmark as objects on one of our tiers, or in the pool of our server.

    Like the benchmark's disk tier it begins empty, whatever an earlier process left: a key of the benchmark is another
    object in each process and after each `write`, so that no write is answered by what is there already. `clear` and
    `close` delete what this process wrote; what a killed one wrote stays until the tier evicts it.

    `device` of an `IOTiming` is the time until our answer, with our copy and checksum; `host` is the rest.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises `SettingsError` for settings that are wrong, and for another interface than the one known here."""
        INTERFACE.check(StorageBackend, type(self))
        read = HostSettings.read(settings)
        self._format = read.format_of("kv-cache", "mlperf kv-cache array")
        self._objects = open_objects(read)
        self._process = os.urandom(16)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def write(self, key: str, data: np.ndarray[Any, Any]) -> Any:
        """Store an array. Raises `OSError` if it is not on the medium afterwards: the benchmark counts that as a failed
        allocation."""
        began = time.perf_counter()
        whole = np.ascontiguousarray(data)
        entry = _Entry(self._new_name(key, whole.nbytes), data.shape, whole.dtype)
        handed = time.perf_counter()
        (stored,) = self._objects.store([HostObject(*entry.name, _bytes_of(whole))]).result()
        answered = time.perf_counter()
        if not stored:
            raise OSError(f"{key} was not stored")
        with self._lock:
            former = self._entries.get(key)
            self._entries[key] = entry
        if former is not None:
            self._objects.remove([former.name])
        return _timing(began, handed, answered)

    def read(self, key: str) -> tuple[np.ndarray[Any, Any], Any]:
        """The array as it was written. Raises `KeyError` for a miss: never written, evicted, damaged, or too late."""
        began = time.perf_counter()
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise KeyError(f"{key} is not there")
        data: np.ndarray[Any, Any] = np.empty(entry.shape, entry.dtype)
        handed = time.perf_counter()
        (loaded,) = self._objects.load([HostObject(*entry.name, _bytes_of(data))]).result()
        answered = time.perf_counter()
        if not loaded:
            raise KeyError(f"{key} could not be loaded")
        return data, _timing(began, handed, answered)

    def delete(self, key: str) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
        if entry is not None:
            self._objects.remove([entry.name]).result()

    def clear(self) -> None:
        """What this process wrote; the objects of others stay."""
        with self._lock:
            entries, self._entries = self._entries, {}
        self._objects.remove([each.name for each in entries.values()]).result()

    def status(self) -> Mapping[str, Any]:
        """Plain values."""
        return self._objects.status()

    def close(self) -> None:
        """Deletes what this process wrote, and ends. Idempotent."""
        self.clear()
        self._objects.close()

    def _new_name(self, key: str, nbytes: int) -> HostKey:
        namespace: Namespace = self._format.namespace(nbytes)
        number = next(self._numbers).to_bytes(8, "little")
        return HostKey(namespace, object_key(namespace, hashlib.sha256(self._process + number + key.encode()).digest()))


@contextmanager
def in_place_of_nvme(settings: Mapping[str, Any]) -> Iterator[list[HostedStorage]]:
    """Within it, each `MultiTierCache` of the benchmark gets a `HostedStorage` of these settings as its disk tier.
    Gives the list of those that were made; they are closed at its end."""
    made: list[HostedStorage] = []

    def make(base_path: str | None = None) -> HostedStorage:
        made.append(HostedStorage(settings))
        return made[-1]

    former = kv_cache.NVMeBackend
    kv_cache.NVMeBackend = make
    try:
        yield made
    finally:
        kv_cache.NVMeBackend = former
        for each in made:
            each.close()


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _timing(began: float, handed: float, answered: float) -> Any:
    total = time.perf_counter() - began
    return StorageBackend.IOTiming(total=total, device=answered - handed, host=total - (answered - handed))
