"""LMCache: our tiers, or our server, as an L2 adapter of its own server.

    --l2-adapter '{"type": "plugin", "module_path": "lmcache_hosts.lmcache_l2", "class_name": "HostedL2Adapter",
                   "adapter_params": {"tier": {"type": "fs", "path": "/var/cache/kv", "capacity_bytes": "500GiB"}}}'

LMCache imports this module; nothing else does.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from lmcache_core import Namespace
from lmcache_core.errors import CacheError
from lmcache_core.guard import guarded
from lmcache_hosts.interface import HostInterface
from lmcache_hosts.naming import object_key
from lmcache_hosts.requests import HostKey, HostObject
from lmcache_hosts.settings import HostSettings, open_objects

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["INTERFACE", "HostedL2Adapter"]

log = logging.getLogger(__name__)

INTERFACE = HostInterface(
    "LMCache",
    ("lmcache",),
    ("0.5.6",),
    {
        "get_store_event_fd": (),
        "get_lookup_and_lock_event_fd": (),
        "get_load_event_fd": (),
        "submit_store_task": ("keys", "objects"),
        "pop_completed_store_tasks": (),
        "submit_lookup_and_lock_task": ("keys", "group_layout_descs"),
        "query_lookup_and_lock_result": ("task_id",),
        "submit_unlock": ("keys",),
        "submit_load_task": ("keys", "objects"),
        "query_load_result": ("task_id",),
        "delete": ("keys",),
        "close": (),
        "report_status": (),
    },
)


class HostedL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # of LMCache, which is not here when types are checked
    """Objects of LMCache's L1 on one of our tiers, or in the pool of our server.

    `params` are the `HostSettings`. LMCache's `max_capacity_bytes` stays 0: the tier has a capacity of its own, and
    evicts without being asked. A lookup locks nothing; an object that is evicted before its load is a miss.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        INTERFACE.check(L2AdapterInterface, type(self))
        self._events = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(3)]
        try:
            super().__init__(max_capacity_bytes=0)
            self._settings = HostSettings.read(params)
            self._objects = open_objects(self._settings)
        except BaseException:
            self._close_events()
            raise
        self._lock = threading.Lock()
        self._next_task = 0
        self._layouts: dict[tuple[str, int, int], tuple[int, str]] = {}  # by `_kind_of`: bytes, and their meaning
        self._stored: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}

    # --- event descriptors --------------------------------------------------------------------------------
    def get_store_event_fd(self) -> int:
        return self._events[0]

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._events[1]

    def get_load_event_fd(self) -> int:
        return self._events[2]

    # --- stores -------------------------------------------------------------------------------------------
    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self._new_task()
        named = self._named(keys, objects)
        sizes = [each.namespace.layout.nbytes for each in named if each is not None]

        def done(answers: Sequence[bool]) -> None:
            there = [key for key, each in zip(keys, named, strict=True) if each is not None]
            stored = [(key, size) for key, size, yes in zip(there, sizes, answers, strict=True) if yes]
            if stored:
                guarded(_logged, self._notify_keys_stored, [key for key, _ in stored], [size for _, size in stored])
            all_well = len(stored) == len(keys)
            self._finish(self._stored, task, L2StoreResult(all_well, sum(size for _, size in stored)), 0)

        self._objects.store([each for each in named if each is not None], done)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    # --- lookups ------------------------------------------------------------------------------------------
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task = self._new_task()
        for key in keys:
            desc = (group_layout_descs or {}).get(key.object_group_id)
            if desc is not None:
                self._layouts[_kind_of(key)] = _layout_of(desc.shapes, desc.dtypes)
        positions, wanted = [], []
        for position, key in enumerate(keys):
            each = guarded(_logged, self._key, key)
            if each is not None:
                positions.append(position)
                wanted.append(each)

        def done(answers: Sequence[bool]) -> None:
            self._finish(self._found, task, _bitmap(len(keys), positions, answers), 1)

        self._objects.find(wanted, done)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing was locked."""

    # --- loads --------------------------------------------------------------------------------------------
    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self._new_task()
        named = self._named(keys, objects)
        positions = [position for position, each in enumerate(named) if each is not None]

        def done(answers: Sequence[bool]) -> None:
            bitmap = _bitmap(len(keys), positions, answers)
            loaded = [keys[position] for position, yes in zip(positions, answers, strict=True) if yes]
            if loaded:
                guarded(_logged, self._notify_keys_accessed, loaded)
            self._finish(self._loaded, task, bitmap, 2)

        self._objects.load([each for each in named if each is not None], done)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    # --- the rest -----------------------------------------------------------------------------------------
    def delete(self, keys: list[ObjectKey]) -> None:
        wanted = [(key, each) for key in keys if (each := guarded(_logged, self._key, key)) is not None]

        def done(answers: Sequence[bool]) -> None:
            gone = [
                (key, each.namespace.layout.nbytes) for (key, each), yes in zip(wanted, answers, strict=True) if yes
            ]
            if gone:
                guarded(_logged, self._notify_keys_deleted, [key for key, _ in gone], [size for _, size in gone])

        self._objects.remove([each for _, each in wanted], done)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._objects.serving, "type": type(self).__name__, **self._objects.status()}

    def close(self) -> None:
        """Stores what waits first, for some seconds at most."""
        if self._events:
            self._objects.close()
            with self._lock:
                self._close_events()

    def _close_events(self) -> None:
        for event in self._events:
            os.close(event)
        self._events = []

    # --- keys ---------------------------------------------------------------------------------------------
    def _named(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[HostObject | None]:
        return [guarded(_logged, self._object, key, each) for key, each in zip(keys, objects, strict=True)]

    def _object(self, key: ObjectKey, held: MemoryObj) -> HostObject:
        view = memoryview(held.byte_array).cast("B")
        layout = _layout_of(held.get_shapes(), held.get_dtypes())
        self._layouts[_kind_of(key)] = layout
        namespace = self._namespace(key, layout)
        return HostObject(namespace, self._name(key, namespace), view)

    def _key(self, key: ObjectKey) -> HostKey | None:
        """None: none of its kind was seen yet, so that nobody knows how large it is."""
        layout = self._layouts.get(_kind_of(key))
        if layout is None:
            return None
        namespace = self._namespace(key, layout)
        return HostKey(namespace, self._name(key, namespace))

    def _name(self, key: ObjectKey, namespace: Namespace) -> bytes:
        return object_key(namespace, key.chunk_hash, f"group {key.object_group_id}" if key.object_group_id else "")

    def _namespace(self, key: ObjectKey, layout: tuple[int, str]) -> Namespace:
        nbytes, meaning = layout
        # LMCache packs world size, rank, local world size and local rank, eight bits each.
        shard = ((key.kv_rank >> 16) & 0xFF, max(1, key.kv_rank >> 24))
        of = self._settings.format_of(key.model_name, f"lmcache {meaning}")
        return of.namespace(nbytes, shard, key.cache_salt)

    # --- tasks --------------------------------------------------------------------------------------------
    def _new_task(self) -> int:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _finish(self, box: dict[int, Any], task: int, answer: Any, event: int) -> None:
        with self._lock:
            box[task] = answer
            if self._events:
                os.eventfd_write(self._events[event], 1)


def _kind_of(key: ObjectKey) -> tuple[str, int, int]:
    """What objects of one layout have in common: an engine with fewer ranks has larger ones of the same model."""
    return key.model_name, key.kv_rank, key.object_group_id


def _layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> tuple[int, str]:
    """Bytes of an object, and what they are, in words that are the same wherever LMCache runs."""
    nbytes, words = 0, []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        nbytes += shape.numel() * dtype.itemsize
        words.append(f"{str(dtype).removeprefix('torch.')}{list(shape)}")
    return nbytes, " ".join(words)


def _bitmap(count: int, positions: Sequence[int], answers: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(count)
    for position, yes in zip(positions, answers, strict=True):
        if yes:
            bitmap.set(position)
    return bitmap


def _logged(error: BaseException) -> None:
    known = isinstance(error, CacheError)
    log.error("LMCache's request was not served: %s", error, exc_info=None if known else error)
