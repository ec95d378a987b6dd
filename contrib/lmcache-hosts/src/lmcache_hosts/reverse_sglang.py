"""The reverse shim for SGLang: any `HiCacheStorage` under the kit's `HostBackendContract`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache_testing.host_backend import HostBackend

__all__ = ["HiCacheBackend"]


class HiCacheBackend(HostBackend):
    """A `HiCacheStorage` through the calls of SGLang's generic path: `batch_set`, `batch_exists`, `batch_get`."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def store(self, objects: Mapping[bytes, bytes]) -> bool:
        pages = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in objects.values()]
        return bool(self._storage.batch_set([each.hex() for each in objects], pages))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._storage.batch_exists([each.hex()]) == 1 for each in keys]

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        targets = [torch.zeros(self.NBYTES, dtype=torch.uint8) for _ in keys]
        found = self._storage.batch_get([each.hex() for each in keys], targets)
        return [None if each is None else bytes(each.numpy().tobytes()) for each in found]

    def close(self) -> None:
        if hasattr(self._storage, "close"):
            self._storage.close()
