"""Incarnations, and the table that finds the visible or coming one for a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache_core.errors import UsageError
from lmcache_core.kernel.states import State
from lmcache_core.limits import KEY_BYTES

if TYPE_CHECKING:
    from lmcache_core.kernel.allocator import Slab

SHARDS = 256  # a dictionary grows in one go: 1,000,000 keys in one stalled for 174 ms, in 256 for less than one
SHARD_FROM_KEYS = 2048  # a smaller namespace is one dictionary: a tenant with ten keys must not cost 16 KiB


Named = tuple[bytes, int]  # key and generation: one incarnation, within its namespace


class Incarnation:
    """One object in one slot. A key may have had many; at most one of them stands in the table.

    Satisfies `Entry`. `Writing` builds it field by field: calling `__init__` for each key costs more than the rest of
    the grant.
    """

    __slots__ = (
        "checksum",
        "generation",
        "holds",
        "kept_by",
        "key",
        "layout_id",
        "namespace",
        "nbytes",
        "newer",
        "offset",
        "older",
        "policy_data",
        "slab",
        "state",
        "temporary",
    )

    key: bytes
    namespace: int
    nbytes: int  # of its slot: what its eviction frees
    holds: int  # number of read leases, promises and pins on it
    kept_by: Any  # the ledger's accounts that these are charged to: see there
    older: Any
    newer: Any
    policy_data: Any
    offset: int
    layout_id: int
    generation: int  # grows with every grant, even across servers: no key or slot has one twice. 0: unknown
    state: State
    slab: Slab
    temporary: bool  # loaded for one reader, dropped after it
    checksum: int | None  # xxh3_64 of its bytes, if the writer gave it

    unverified: ClassVar[bool] = False

    def __repr__(self) -> str:
        return (
            f"<{self.state.name} {self.key.hex()[:8]} of namespace {self.namespace:#x}: "
            f"{self.nbytes:,} bytes at {self.offset:#x}, holds {self.holds}>"
        )


class UnverifiedIncarnation(Incarnation):
    """Adopted with its checksum. It may have been overwritten between two servers: its reader must verify it."""

    __slots__ = ()

    unverified: ClassVar[bool] = True


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise `UsageError` naming the first key that is not 32 bytes."""
    if set(map(len, keys)) - {KEY_BYTES}:
        at = next(i for i, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise UsageError(
            f"key {at} is {len(keys[at])} bytes long, not {KEY_BYTES}: derive keys with lmcache_core.tokens"
        )


class NamespaceTable:
    """key → incarnation, for one namespace. Hot loops access `shards` and `mask` directly: the shard of a key is
    `shards[(key[0] ^ key[31]) & mask]`, which spreads digests and counters alike."""

    __slots__ = ("mask", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[bytes, Incarnation]] = [{}]
        self.mask = 0

    def make_ready_for(self, keys: int) -> None:
        """Split before the one dictionary is large enough to stall. This moves its 2,048 entries, once."""
        if self.mask == 0 and len(self.shards[0]) + keys > SHARD_FROM_KEYS:
            whole = self.shards[0]
            self.shards = [{} for _ in range(SHARDS)]
            self.mask = SHARDS - 1
            for key, found in whole.items():
                self.shards[key[0] ^ key[31]][key] = found

    def get(self, key: bytes) -> Incarnation | None:
        return self.shards[(key[0] ^ key[31]) & self.mask].get(key)

    def remove(self, key: bytes) -> None:
        del self.shards[(key[0] ^ key[31]) & self.mask][key]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[Incarnation]:
        for shard in self.shards:
            yield from shard.values()


class ObjectTable:
    """The table of residents: namespace → key → the incarnation that is being written, loaded or ready."""

    def __init__(self) -> None:
        self.namespaces: dict[int, NamespaceTable] = {}
        self._nothing = NamespaceTable()

    def of(self, namespace: int) -> NamespaceTable:
        """The namespace's table, for reading. If there is none: an empty one that is never written to."""
        return self.namespaces.get(namespace, self._nothing)

    def made(self, namespace: int, keys: int) -> NamespaceTable:
        """The namespace's table, for inserting up to `keys` keys."""
        table = self.namespaces.get(namespace)
        if table is None:
            table = self.namespaces[namespace] = NamespaceTable()
        table.make_ready_for(keys)
        return table

    def remove(self, objects: Iterable[Incarnation]) -> None:
        """Remove objects that are in the table."""
        namespace, shards, mask = -1, self._nothing.shards, 0
        for item in objects:
            if item.namespace != namespace:
                self._remove_if_empty(namespace)
                namespace = item.namespace
                table = self.namespaces[namespace]
                shards, mask = table.shards, table.mask
            key = item.key
            del shards[(key[0] ^ key[31]) & mask][key]
        self._remove_if_empty(namespace)

    def remove_namespace(self, namespace: int | None) -> dict[int, NamespaceTable]:
        """Remove a whole namespace, or all (None), without looking at its objects."""
        if namespace is None:
            detached, self.namespaces = self.namespaces, {}
            return detached
        table = self.namespaces.pop(namespace, None)
        return {} if table is None else {namespace: table}

    def _remove_if_empty(self, namespace: int) -> None:
        # `any` stops at the first shard that is not empty, nearly always the first one.
        table = self.namespaces.get(namespace)
        if table is not None and not any(table.shards):
            del self.namespaces[namespace]
