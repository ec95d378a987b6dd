"""The reverse shim for LMCache: any of its L2 adapters under the kit's `HostBackendContract`."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

from lmcache_testing.host_backend import HostBackend

__all__ = ["LMCacheBackend"]

_WAIT_MS = 30_000


class LMCacheBackend(HostBackend):
    """An `L2AdapterInterface`, driven as LMCache's controllers do: submit, wait for the descriptor, ask once."""

    def __init__(self, adapter: Any, model: str = "model") -> None:
        self._adapter = adapter
        self._model = model
        self._desc = MemoryLayoutDesc([torch.Size([self.NBYTES])], [torch.uint8])
        self._turns = {each: threading.Lock() for each in ("store", "lookup", "load")}  # a controller has one thread

    def store(self, objects: Mapping[bytes, bytes]) -> bool:
        held = [self._memory(each) for each in objects.values()]
        with self._turns["store"]:
            task = self._adapter.submit_store_task([self._key(each) for each in objects], held)
            descriptor = self._adapter.get_store_event_fd()
            done = self._answer(descriptor, lambda: self._adapter.pop_completed_store_tasks().get(task))
        return bool(done.is_successful())

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._turns["lookup"]:
            task = self._adapter.submit_lookup_and_lock_task([self._key(each) for each in keys], {0: self._desc})
            descriptor = self._adapter.get_lookup_and_lock_event_fd()
            bitmap = self._answer(descriptor, lambda: self._adapter.query_lookup_and_lock_result(task))
        self._adapter.submit_unlock([self._key(each) for each in keys])
        return [bool(bitmap.test(position)) for position in range(len(keys))]

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        held = [self._memory(bytes(self.NBYTES)) for _ in keys]
        with self._turns["load"]:
            task = self._adapter.submit_load_task([self._key(each) for each in keys], held)
            bitmap = self._answer(self._adapter.get_load_event_fd(), lambda: self._adapter.query_load_result(task))
        return [bytes(each.byte_array) if bitmap.test(at) else None for at, each in enumerate(held)]

    def close(self) -> None:
        self._adapter.close()

    def _key(self, name: bytes) -> ObjectKey:
        return ObjectKey(name, self._model, ObjectKey.ComputeKVRank(1, 0, 1, 0))

    def _memory(self, held: bytes) -> Any:
        tensor = torch.frombuffer(bytearray(held), dtype=torch.uint8)
        shape = torch.Size([self.NBYTES])
        meta = MemoryObjMetadata(
            shape, torch.uint8, tensor.data_ptr(), self.NBYTES, 1, shapes=[shape], dtypes=[torch.uint8]
        )
        return TensorMemoryObj(tensor, meta, parent_allocator=None)

    def _answer(self, descriptor: int, ask: Callable[[], Any]) -> Any:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while (answer := ask()) is None:
            if not poll.poll(_WAIT_MS):
                raise TimeoutError("the adapter has not answered")
            os.eventfd_read(descriptor)
        return answer
