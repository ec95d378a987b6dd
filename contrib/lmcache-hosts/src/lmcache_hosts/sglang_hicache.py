"""SGLang: our tiers, or our server, as the storage of its hierarchical cache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "lmcache-core", "module_path": "lmcache_hosts.sglang_hicache", "class_name": "HostedHiCache",
      "tier": {"type": "fs", "path": "/var/cache/kv", "capacity_bytes": "500GiB"}}'

SGLang imports this module; nothing else does. It calls from its prefetch and backup threads, which wait for the answer:
`lookup_s`, `load_s` and `store_s` say how long at most.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from lmcache_core import Namespace
from lmcache_core.errors import CacheError, UsageError
from lmcache_core.guard import guarded
from lmcache_hosts.interface import HostInterface
from lmcache_hosts.naming import object_key
from lmcache_hosts.requests import HostKey, HostObject
from lmcache_hosts.settings import HostSettings, open_objects

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolTransfer

__all__ = ["INTERFACE", "HostedHiCache"]

log = logging.getLogger(__name__)

INTERFACE = HostInterface(
    "SGLang",
    ("sglang",),
    ("0.5.23",),
    {
        "register_mem_pool_host": ("mem_pool_host",),
        "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
        "get": ("key", "target_location", "target_sizes"),
        "batch_get": ("keys", "target_locations", "target_sizes"),
        "set": ("key", "value", "target_location", "target_sizes"),
        "batch_set": ("keys", "values", "target_locations", "target_sizes"),
        "exists": ("key",),
        "batch_exists": ("keys", "extra_info"),
        "batch_get_v1": ("keys", "host_indices", "extra_info"),
        "batch_set_v1": ("keys", "host_indices", "extra_info"),
        "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
        "batch_get_v2": ("transfers", "extra_info"),
        "batch_set_v2": ("transfers", "extra_info"),
        "clear": (),
    },
)

# In the same table, and SGLang's own.
_OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "tp_lcm_size",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_per_page",
    "hicache_storage_pass_prefix_keys",
)
_KV = str(PoolName.KV)


class HostedHiCache(HiCacheStorage):  # type: ignore[misc]  # of SGLang, which is not here when types are checked
    """Pages of SGLang's host memory on one of our tiers, or in the pool of our server.

    The settings are the `HostSettings`, in the table of the dynamic backend. What is one page is known once SGLang has
    registered its pool; before that everything is a miss.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        INTERFACE.check(HiCacheStorage, type(self))
        self._config = storage_config
        self._settings = HostSettings.read(storage_config.extra_config or {}, ignored=_OF_SGLANG)
        self._namespaces: dict[str, Namespace] = {}
        self._objects = open_objects(self._settings)

    # --- pools --------------------------------------------------------------------------------------------
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._namespaces[_KV] = self._namespace_of(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._namespaces[str(host_pool_name)] = self._namespace_of(str(host_pool_name), host_pool)

    # --- pages by key -------------------------------------------------------------------------------------
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The page in `target_location`, or None: it is not there, or not whole. Then the content is undefined."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [None] * len(keys))
        loaded = self._load(_KV, keys, targets)
        return [target if yes else None for target, yes in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._store(_KV, keys, list(values or [None] * len(keys))))

    def exists(self, key: str) -> bool:
        return self._find({_KV: [key]})[_KV][0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return _leading(self._find({_KV: keys})[_KV])

    # --- pages of the registered pool ---------------------------------------------------------------------
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._into_pool(_KV, getattr(self, "mem_pool_host", None), keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._out_of_pool(_KV, getattr(self, "mem_pool_host", None), keys, host_indices)

    # --- several pools ------------------------------------------------------------------------------------
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How many leading pages can be restored, with what each pool has of them. `block_groups` pools are not
        served, and hold nothing back."""
        transfers = pool_transfers or []
        found = self._find({_KV: keys, **{str(each.name): keys for each in transfers}})
        pages = _leading(found[_KV])
        hits = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for each in transfers:
            there = found[str(each.name)]
            if each.hit_policy == PoolHitPolicy.ALL_PAGES:
                good = set(range(1, _leading(there[:pages]) + 1))
            elif each.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                tail = max(1, len(each.keys or ()))
                good = {length for length in restorable if all(there[max(0, length - tail) : length])}
            else:
                continue
            if good:
                hits[each.name] = max(good)
            restorable &= good
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._transfer(each, self._into_pool) for each in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._transfer(each, self._out_of_pool) for each in transfers}

    # --- the rest -----------------------------------------------------------------------------------------
    def clear(self) -> bool:
        """What is known of these pools' pages, of this rank. False: the medium may hold more, or does not answer."""
        return self._objects.clear(list(self._namespaces.values())).result()[0]

    def get_stats(self) -> None:
        """SGLang's own metrics have a format of their own; `status` has ours."""

    def status(self) -> Mapping[str, Any]:
        """Plain values, for whoever holds the backend."""
        return self._objects.status()

    def close(self) -> None:
        """Stores what waits first, for some seconds at most."""
        self._objects.close()

    # --- inside -------------------------------------------------------------------------------------------
    def _transfer(self, transfer: PoolTransfer, move: Callable[..., list[bool]]) -> list[bool]:
        pool = getattr(self, "registered_pools", {}).get(transfer.name)
        return move(str(transfer.name), pool, list(transfer.keys or ()), transfer.host_indices)

    def _into_pool(self, name: str, pool: Any, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        places = _places(pool, keys, host_indices)
        if places is None:
            return [False] * len(keys)
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        loaded = self._load(name, keys, pages)
        for place, page, yes in zip(places, pages, loaded, strict=True):
            if yes:
                pool.set_from_flat_data_page(place, page)
        return loaded

    def _out_of_pool(self, name: str, pool: Any, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        places = _places(pool, keys, host_indices)
        if places is None:
            return [False] * len(keys)
        return self._store(name, keys, [pool.get_data_page(place, flat=True) for place in places])

    def _load(self, name: str, keys: Sequence[str], targets: Sequence[torch.Tensor | None]) -> list[bool]:
        buffers = [
            None if each is None else each if each.is_contiguous() else torch.empty_like(each) for each in targets
        ]
        loaded = self._move(self._objects.load, name, keys, buffers)
        for target, buffer, yes in zip(targets, buffers, loaded, strict=True):
            if yes and target is not None and buffer is not None and buffer is not target:
                target.copy_(buffer)
        return loaded

    def _store(self, name: str, keys: Sequence[str], pages: Sequence[torch.Tensor | None]) -> list[bool]:
        return self._move(
            self._objects.store, name, keys, [None if each is None else each.contiguous() for each in pages]
        )

    def _move(
        self, call: Callable[..., Any], name: str, keys: Sequence[str], pages: Sequence[torch.Tensor | None]
    ) -> list[bool]:
        namespace = self._namespaces.get(name)
        done = [False] * len(keys)
        if namespace is None:
            return done
        positions, objects = [], []
        for position, (key, page) in enumerate(zip(keys, pages, strict=True)):
            named = None if page is None else guarded(_logged, self._object, namespace, name, key, page)
            if named is not None:
                positions.append(position)
                objects.append(named)
        for position, yes in zip(positions, call(objects).result(), strict=True):
            done[position] = yes
        return done

    def _object(self, namespace: Namespace, name: str, key: str, page: torch.Tensor) -> HostObject:
        array: Any = page.detach().view(-1).view(torch.uint8).numpy()
        return HostObject(namespace, self._name(namespace, name, key), memoryview(array))

    def _find(self, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[bool]]:
        """One lookup for the pages of all pools."""
        found = {name: [False] * len(keys) for name, keys in wanted.items()}
        places, asked = [], []
        for name, keys in wanted.items():
            namespace = self._namespaces.get(name)
            for position, key in enumerate(keys if namespace is not None else ()):
                known = guarded(_logged, self._name, namespace, name, key)
                if known is not None and namespace is not None:
                    places.append((name, position))
                    asked.append(HostKey(namespace, known))
        for (name, position), yes in zip(places, self._objects.find(asked).result(), strict=True):
            found[name][position] = yes
        return found

    def _name(self, namespace: Namespace | None, name: str, key: str) -> bytes:
        assert namespace is not None
        block_hash = bytes.fromhex(key)
        if block_hash.hex() != key:  # `fromhex` reads capitals and spaces, too
            raise UsageError(f"the key {key[:80]!r} is not a hash as SGLang writes it, in small hexadecimal digits")
        return object_key(namespace, block_hash, "" if name == _KV else f"pool {name}")

    def _namespace_of(self, name: str, pool: Any) -> Namespace:
        config = self._config
        page = pool.get_dummy_flat_data_page()
        fields = {
            "layout": str(getattr(pool, "layout", "")),
            "dtype": str(page.dtype).removeprefix("torch."),
            "page_size": getattr(pool, "page_size", None),
            "dcp": None if config.dcp_size == 1 else [config.dcp_rank, config.dcp_size, config.logical_page_size],
        }
        of = self._settings.format_of(config.model_name or "model", f"sglang {json.dumps(fields, sort_keys=True)}")
        return of.namespace(page.numel() * page.element_size(), self._shard(name))

    def _shard(self, name: str) -> tuple[int, int]:
        """KV that is equal on all tensor-parallel ranks is one shard of them; a recurrent state never is."""
        config = self._config
        replicated = config.is_mla_model and name != str(PoolName.MAMBA)
        rank, size = (0, 1) if replicated else (config.tp_rank, config.tp_size)
        rank, size = config.pp_rank * size + rank, config.pp_size * size
        return config.attn_cp_rank * size + rank, config.attn_cp_size * size


def _leading(found: Sequence[bool]) -> int:
    return next((position for position, yes in enumerate(found) if not yes), len(found))


def _places(pool: Any, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int] | None:
    """Where each page begins; None if there is no such pool, or the indices are not those of the keys."""
    size = getattr(pool, "page_size", 1) or 1
    if pool is None or host_indices is None or host_indices.numel() != len(keys) * size:
        log.error("%d pages came with %s", len(keys), "no pool" if pool is None else "indices of another number")
        return None
    return [int(each) for each in host_indices[::size].tolist()]


def _logged(error: BaseException) -> None:
    log.error("SGLang's request was not served: %s", error, exc_info=None if isinstance(error, CacheError) else error)
