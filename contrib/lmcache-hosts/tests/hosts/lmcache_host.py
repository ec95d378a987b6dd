"""LMCache's own storage manager, with our adapter as its L2. Importing this needs LMCache and torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from lmcache_testing.waiting import until

SHAPE = (2, 4, 64, 128)
DESC = MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16])
NBYTES = 2 * 4 * 64 * 128 * 2


def object_key(number: int, model: str = "model", salt: str = "") -> ObjectKey:
    digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return ObjectKey(digest, model, ObjectKey.ComputeKVRank(1, 0, 1, 0), cache_salt=salt)


def content(number: int) -> torch.Tensor:
    """Another one for each number, equal in every process."""
    values = hashlib.shake_128(number.to_bytes(8, "little")).digest(NBYTES)
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(torch.int16).view(SHAPE)


def adapter_config(params: Mapping[str, Any]) -> PluginL2AdapterConfig:
    return PluginL2AdapterConfig.from_dict(
        {
            "type": "plugin",
            "module_path": "lmcache_hosts.lmcache_l2",
            "class_name": "HostedL2Adapter",
            "adapter_params": dict(params),
        }
    )


class Manager:
    """A storage manager, as LMCache's server drives it."""

    def __init__(self, *configs: Any) -> None:
        memory = L1MemoryManagerConfig(32 << 20, False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory), EvictionConfig(eviction_policy="LRU"), L2AdaptersConfig(list(configs))
            )
        )

    @property
    def adapter(self) -> Any:
        return self.manager.l2_adapters()[0][1]

    def write(self, numbers: Sequence[int], **of: Any) -> None:
        """Into the L1, whose store controller passes them on."""
        keys = {object_key(number, **of): number for number in numbers}
        reserved = self.manager.reserve_write(list(keys), DESC)
        for key, held in reserved.items():
            held.tensor.view(torch.int16).copy_(content(keys[key]))
        self.manager.finish_write(list(reserved))

    def store(self, numbers: Sequence[int], **of: Any) -> None:
        """As `write`, until the L2 has them; then out of the L1."""
        before = self.adapter.get_usage().total_bytes_used
        self.write(numbers, **of)
        wanted = before + NBYTES * len(numbers)
        until(lambda: self.adapter.get_usage().total_bytes_used >= wanted, "the stores to reach the L2")
        self.forget(numbers, **of)

    def forget(self, numbers: Sequence[int], **of: Any) -> None:
        """Out of the L1 alone, once nobody there uses them."""
        keys = [object_key(number, **of) for number in numbers]
        until(lambda: self.manager.delete_l1_keys(keys)[0] == len(keys) or not self._in_l1(keys), "the L1 to let go")

    def _in_l1(self, keys: Sequence[ObjectKey]) -> bool:
        with self.manager.read_prefetched_results(list(keys)) as held:
            return held is not None

    def read(self, numbers: Sequence[int], desc: MemoryLayoutDesc = DESC, **of: Any) -> list[torch.Tensor]:
        """What a prefetch finds of this prefix, with its bytes."""
        keys = [object_key(number, **of) for number in numbers]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, desc)]))
        found = until(lambda: self.manager.query_prefetch_status(handle), "the prefetch to end")
        hits = found.hit_cells[0].popcount()
        if not hits:
            return []
        with self.manager.read_prefetched_results(keys[:hits]) as held:
            read = [each.tensor.view(torch.int16).clone() for each in held]
        self.manager.finish_read_prefetched(keys[:hits])
        return read


@contextmanager
def lmcache_over(*configs: Any) -> Iterator[Manager]:
    manager = Manager(*configs)
    try:
        yield manager
    finally:
        manager.manager.close()
