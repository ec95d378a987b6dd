"""Hits without a call: this process searches the pool's index and reads what it finds by itself.

Every method may answer "I cannot tell": without the C extension, before the first connection, after a clean shutdown of
the server, for a namespace that was never used. Then the server is asked, and the result is the same. A server that was
killed or hangs is no such case: objects that its index calls ready stay intact until another server takes the pool
over, and that is noticed before a byte can change.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import msgspec

from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.promises import Promise
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import OPERATION_KEYS_MAX, STORE_PAGE_KEYS
from lmcache_core.pool.tally import Tally
from lmcache_core.protocol.codec import join_keys
from lmcache_core.tokens.namespace import Namespace

READ, CHANGED, DAMAGED = 1, 2, 3  # what `Hits.read` says of a key; 0: it is missing
# How a search counts as a lookup: not at all; fully; fully, and the server is not asked for the rest.
COUNT_NOTHING, COUNT_HITS, COUNT_IF_ALL = 0, 1, 2
_NO_KEYS = (TypeError, ValueError)  # they are not valid: the call that follows says why
VERIFY = {"never": 0, "first": 1, "always": 2}


def verify_level(verify: str) -> int:
    """The index's number for a level. Raises `UsageError`."""
    if verify not in VERIFY:
        raise UsageError(f"verify = {verify!r} is not known: use {', '.join(map(repr, VERIFY))}")
    return VERIFY[verify]


class ReadRequest(msgspec.Struct, frozen=True):
    """Objects to copy out, each to a `Span` of the caller. `prefix`: up to the first miss. `promise`: of a lookup, to
    be redeemed. `verify`: see `VERIFY`."""

    keys: Sequence[bytes]
    targets: Sequence[tuple[int, Any, Any]]
    namespace: Namespace
    prefix: bool
    promise: Promise | None
    verify: int


class Hits:
    """The index of the pool that the client maps now. Thread-safe; makes no system calls."""

    def __init__(self, links: Links, copy_threads: int) -> None:
        self._links = links
        self._threads = copy_threads

    def find(
        self, keys: Sequence[bytes], namespace: Namespace, prefix: bool, mark: bool = False, counts: int = 0
    ) -> bytes | None:
        """One byte for each key, 1 if it is there; with `prefix` it ends at the first miss. None: ask the server.
        `mark`: the objects are about to be read, which the eviction policy should know. `counts`: how this counts as a
        lookup, COUNT_…"""
        while (link := self._links.look()) is not None and (where := link.searched(namespace)) is not None:
            index, layout = where
            try:
                found = index.find(link.index_epoch, namespace.id, layout, keys, prefix, mark, counts)
            except _NO_KEYS:
                return None
            if found is not None or not link.follows():
                return found
        return None

    def count(self, amounts: Mapping[Tally, int]) -> None:
        """Add these amounts to this process's own line of the pool, if it maps one."""
        link = self._links.look()
        if link is not None and link.index is not None:
            link.index.count({int(word): amount for word, amount in amounts.items()})

    def identify(self, keys: Sequence[bytes], namespace: Namespace, prefix: bool) -> array[int] | None:
        """Like `find`, with the id of the incarnation found for each key, 0 for none."""
        while (link := self._links.look()) is not None and (where := link.searched(namespace)) is not None:
            index, layout = where
            try:
                found = index.incarnations(link.index_epoch, namespace.id, layout, keys, prefix)
            except _NO_KEYS:
                return None
            if found is not None or not link.follows():
                return None if found is None else array("Q", found)
        return None

    def read(self, wanted: ReadRequest, incarnations: array[int]) -> bytes | None:
        """Copy objects out. One byte for each key: 0, READ, CHANGED or DAMAGED; with `prefix` the first that is not
        READ is the last one. The target's content is undefined unless READ. None: ask the server. The ids of the
        incarnations read are put into `incarnations`."""
        addresses = array("Q", [address for address, _, _ in wanted.targets])
        if 0 in addresses:  # on a device: torch copies under a lease
            return None
        namespace = wanted.namespace
        while (link := self._links.look()) is not None and (where := link.searched(namespace)) is not None:
            try:
                found = where[0].read(
                    link.index_epoch,
                    namespace.id,
                    where[1],
                    namespace.layout.nbytes,
                    wanted.keys,
                    addresses,
                    wanted.prefix,
                    wanted.verify,
                    self._threads,
                    incarnations,
                )
            except _NO_KEYS:
                return None
            if found is not None or not link.follows():
                return found
        return None


def checked_keys(keys: Sequence[bytes]) -> Sequence[bytes]:
    """The keys as a sequence that can be sliced. Raises `UsageError` for objects without an order or a length."""
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise UsageError(f"keys is one {type(keys).__name__} object: give a sequence of keys of 32 bytes each")
    if not isinstance(keys, list | tuple):
        if isinstance(keys, set | frozenset) or not isinstance(keys, Sized):
            raise UsageError(f"keys is a {type(keys).__name__}: give a sequence of keys of 32 bytes each, as a list")
        keys = list(keys)
    if len(keys) > OPERATION_KEYS_MAX:
        raise LimitError(f"{len(keys):,} keys in one call, and the limit is {OPERATION_KEYS_MAX:,}: split the batch")
    if len(keys) > STORE_PAGE_KEYS:
        join_keys(keys)  # all of them before the first page; each page is checked again when it is sent
    return keys
