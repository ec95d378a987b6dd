"""What a policy remembers of evicted objects: bounded in their bytes and in keys."""

from __future__ import annotations

from typing import Any

import xxhash

from lmcache_core.policies import Entry
from lmcache_policies.chain import Chain, unlink

SHARDS = 256  # one dictionary of a million keys stalls for 40 ms and more when it grows; its shards do not
GHOST_KEYS_MAX = 1 << 18  # about 270 bytes each, 360 with a note of its own: 95 MB at the most
_MASK = (1 << 64) - 1


class _Ghost:
    __slots__ = ("fingerprint", "nbytes", "newer", "note", "older")

    def __init__(self, fingerprint: int, nbytes: int, note: Any) -> None:
        self.fingerprint = fingerprint
        self.nbytes = nbytes
        self.note = note
        self.older: Any = None
        self.newer: Any = None


def fingerprint(key: bytes, namespace: int) -> int:
    """64 bits of (key, namespace), equal in every process. A collision misplaces an object in the order, and damages
    nothing."""
    return xxhash.xxh3_64_intdigest(key, namespace & _MASK)


class Ghosts:
    """The last objects that were evicted; the oldest are forgotten first. Every operation is O(1).

    Keeps a 64-bit fingerprint of key and namespace, the size, and the owner's `note` (not None).
    """

    __slots__ = ("_chain", "_count", "_keys_max", "_shards", "nbytes")

    def __init__(self, keys_max: int = GHOST_KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._shards: list[dict[int, _Ghost]] = [{} for _ in range(SHARDS)]
        self._chain = Chain()
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, entry: Entry, note: Any = True) -> Any:
        """Remember an evicted entry. Returns the note of a ghost that was forgotten for it, or None."""
        return self.put_fingerprint(fingerprint(entry.key, entry.namespace), entry.nbytes, note)

    def put_fingerprint(self, number: int, nbytes: int, note: Any = True) -> Any:
        """As `put`, for callers that have no entry."""
        shard = self._shards[number % SHARDS]
        same = shard.get(number)
        if same is not None:
            expelled = self._forget(same)
        elif self._count >= self._keys_max:
            expelled = self._forget(self._chain.newer)
        else:
            expelled = None
        ghost = shard[number] = _Ghost(number, nbytes, note)
        self._chain.append(ghost)
        self._count += 1
        self.nbytes += nbytes
        return expelled

    def get_fingerprint(self, number: int) -> Any:
        """The note of a remembered object, or None."""
        ghost = self._shards[number % SHARDS].get(number)
        return None if ghost is None else ghost.note

    def take(self, entry: Entry) -> Any:
        """Forget the ghost of an entry that came back; its note, or None if there is none."""
        return self.take_fingerprint(fingerprint(entry.key, entry.namespace))

    def take_fingerprint(self, number: int) -> Any:
        """As `take`, for callers that know the fingerprint."""
        ghost = self._shards[number % SHARDS].get(number)
        return None if ghost is None else self._forget(ghost)

    def trim(self, nbytes_max: int) -> list[Any]:
        """Forget the oldest until no more than `nbytes_max` are remembered; their notes."""
        expelled = []
        while self.nbytes > nbytes_max and self._count:
            expelled.append(self._forget(self._chain.newer))
        return expelled

    def _forget(self, ghost: _Ghost) -> Any:
        unlink(ghost)
        del self._shards[ghost.fingerprint % SHARDS][ghost.fingerprint]
        self._count -= 1
        self.nbytes -= ghost.nbytes
        return ghost.note
