"""Hits without a call: this process searches the pool's index and reads what it finds by itself.

Every method may answer "I cannot tell": without the C extension, before the first connection, after a clean shutdown of
the server, for a namespace that was never used. Then the server is asked, and the result is the same. A server that was
killed or hangs is no such case: objects that its index calls ready stay intact until another server takes the pool
over, and that is noticed before a byte can change.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Sized

from lmcache_core.client.copying import Span
from lmcache_core.client.links import Links
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import OPERATION_KEYS_MAX, STORE_PAGE_KEYS
from lmcache_core.protocol.codec import join_keys
from lmcache_core.tokens.namespace import Namespace

READ, CHANGED, DAMAGED = 1, 2, 3  # what `Hits.read` says of a key; 0: it is missing
# How a search counts as a lookup: not at all; fully; fully, and the server is not asked for the rest.
COUNT_NOTHING, COUNT_HITS, COUNT_IF_ALL = 0, 1, 2
VERIFY = {"never": 0, "first": 1, "always": 2}


def verify_level(verify: str) -> int:
    """The index's number for a level. Raises `UsageError`."""
    if verify not in VERIFY:
        raise UsageError(f"verify = {verify!r} is not known: use {', '.join(map(repr, VERIFY))}")
    return VERIFY[verify]


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
        link = self._links.look()
        if link is None or link.index is None:
            return None
        layout = link.layout_of(namespace)
        if layout is None:
            return None
        try:
            found = link.index.find(link.index_epoch, namespace.id, layout, _in_a_row(keys), prefix, mark, counts)
            if found is None and link.follows():
                return self.find(keys, namespace, prefix, mark, counts)
            return found
        except (TypeError, ValueError):  # not valid keys: the call that follows says why
            return None

    def identify(self, keys: Sequence[bytes], namespace: Namespace, prefix: bool) -> array[int] | None:
        """Like `find`, with the id of the incarnation found for each key, 0 for none."""
        link = self._links.look()
        if link is None or link.index is None:
            return None
        layout = link.layout_of(namespace)
        if layout is None:
            return None
        try:
            found = link.index.incarnations(link.index_epoch, namespace.id, layout, _in_a_row(keys), prefix)
            if found is None and link.follows():
                return self.identify(keys, namespace, prefix)
            return None if found is None else array("Q", found)
        except (TypeError, ValueError):  # not valid keys: the call that follows says why
            return None

    def read(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Span],
        namespace: Namespace,
        prefix: bool,
        verify: int,
        incarnations: array[int],
    ) -> bytes | None:
        """Copy objects out. One byte for each key: 0, READ, CHANGED or DAMAGED; with `prefix` the first that is not
        READ is the last one. The target's content is undefined unless READ. None: ask the server. The ids of the
        incarnations read are put into `incarnations`."""
        link = self._links.look()
        if link is None or link.index is None:
            return None
        layout = link.layout_of(namespace)
        addresses = array("Q", [address for address, _ in targets])
        if layout is None or 0 in addresses:  # on a device: torch copies under a lease
            return None
        nbytes = namespace.layout.nbytes
        try:
            row = _in_a_row(keys)
            found = link.index.read(
                link.index_epoch,
                namespace.id,
                layout,
                nbytes,
                row,
                addresses,
                prefix,
                verify,
                self._threads,
                incarnations,
            )
            if found is None and link.follows():
                return self.read(keys, targets, namespace, prefix, verify, incarnations)
            return found
        except (TypeError, ValueError):  # not valid keys: the call that follows says why
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


def _in_a_row(keys: Sequence[bytes]) -> list[bytes] | tuple[bytes, ...]:
    return keys if isinstance(keys, list | tuple) else list(keys)
