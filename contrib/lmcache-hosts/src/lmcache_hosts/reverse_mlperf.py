"""The reverse shim for MLPerf Storage's KV-cache benchmark: any `StorageBackend` under `HostBackendContract`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmcache_testing.host_backend import HostBackend

__all__ = ["StorageBackendBackend"]


class StorageBackendBackend(HostBackend):
    """A `StorageBackend`, one array after the other. A `KeyError` of `read` is its miss; it has no other `exists`."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def store(self, objects: Mapping[bytes, bytes]) -> bool:
        for key, held in objects.items():
            self._storage.write(key.hex(), np.frombuffer(held, dtype=np.float16))
        return True

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [each is not None for each in self.load(keys)]

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._read(key.hex()) for key in keys]

    def close(self) -> None:
        if hasattr(self._storage, "close"):
            self._storage.close()

    def _read(self, key: str) -> bytes | None:
        try:
            array, _ = self._storage.read(key)
        except KeyError:
            return None
        return bytes(array.tobytes())
