"""What a node has, as others keep it: a filter of its index, and what has changed in it since.

The owner makes the filter anew from its index (`Index.digest` says how), compares it with the last one block by block,
and remembers for some versions which blocks have changed. A reader takes the difference to the version that it has.
A name that the filter does not have is not there; one that it has probably is.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from typing import NamedTuple

import xxhash

from lmcache_peer.errors import LyingPeerError
from lmcache_peer.limits import DIGEST_BYTES_MIN, DIGEST_HISTORY
from lmcache_peer.messages import DigestReply

BLOCK_BYTES = 64
BLOCKS_MAX = 1 << 19
CHANGE_BYTES = 4 + BLOCK_BYTES
NAME_BYTES = 40  # of a tier key: key and namespace id
_BITS_OF_OBJECT = 16
_NUMBER = struct.Struct("<I")
_PAGE_BLOCKS = 64  # compared at once: most are the same


class Place(NamedTuple):
    """Where a name is looked for in digests of any size: `block` modulo the number of blocks, and the bits there."""

    block: int
    bits: int


def place_of(name: bytes) -> Place:
    """Of a tier key; its epoch does not matter."""
    digest = xxhash.xxh3_64_intdigest(name[:NAME_BYTES])
    bits = 0
    for shift in range(0, 45, 9):
        bits |= 1 << (digest >> shift & 511)
    return Place(digest >> 45, bits)


class Digest:
    """A node's digest as a reader keeps it. One thread applies replies, any may ask."""

    def __init__(self) -> None:
        self.version = 0
        self.objects = 0
        self._bits = bytearray(BLOCK_BYTES)

    @property
    def nbytes(self) -> int:
        return len(self._bits)

    def may_have(self, place: Place) -> bool:
        """False: the node does not have it."""
        bits = self._bits
        at = place.block % (len(bits) // BLOCK_BYTES) * BLOCK_BYTES
        return int.from_bytes(bits[at : at + BLOCK_BYTES], "little") & place.bits == place.bits

    def room_for(self, reply: DigestReply) -> bytearray:
        """To receive what follows the reply. Raises `LyingPeerError` for lengths that cannot be."""
        blocks = reply.blocks
        if not 0 < blocks <= BLOCKS_MAX or blocks & (blocks - 1) or reply.changed > blocks:
            raise LyingPeerError(f"its digest of {blocks:,} blocks, {reply.changed:,} of them changed, cannot be")
        if not reply.whole and blocks * BLOCK_BYTES != len(self._bits):
            raise LyingPeerError("its digest has another size, and it sends the difference")
        return bytearray(blocks * BLOCK_BYTES if reply.whole else reply.changed * CHANGE_BYTES)

    def apply(self, reply: DigestReply, content: bytearray) -> None:
        """Take over what was received. Raises `LyingPeerError`."""
        if reply.whole:
            self._bits = content
        else:
            blocks = [_NUMBER.unpack_from(content, at)[0] for at in range(0, len(content), CHANGE_BYTES)]
            if any(block >= reply.blocks for block in blocks):
                raise LyingPeerError("its digest changes a block behind the last one")
            for number, block in enumerate(blocks):
                at = number * CHANGE_BYTES + _NUMBER.size
                self._bits[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content[at : at + BLOCK_BYTES]
        self.version, self.objects = reply.version, reply.objects


class PublishedDigest:
    """A node's own digest, with its latest changes. One thread renews it, any may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bits = bytearray(DIGEST_BYTES_MIN)
        self._version = 1
        self._objects = 0
        self._changes: deque[tuple[int, frozenset[int]]] = deque(maxlen=DIGEST_HISTORY)

    @property
    def objects(self) -> int:
        return self._objects

    @property
    def nbytes(self) -> int:
        return len(self._bits)

    def blank(self) -> bytearray:
        """A buffer for the next pass over the index, as large as the last one needed."""
        return bytearray(len(self._bits))

    def wants(self, objects: int) -> bytearray | None:
        """A larger buffer, if a digest of this size is too full for so many objects; then the pass is repeated."""
        nbytes = len(self._bits)
        while nbytes * 8 < objects * _BITS_OF_OBJECT and nbytes < BLOCKS_MAX * BLOCK_BYTES:
            nbytes *= 2
        return bytearray(nbytes) if nbytes > len(self._bits) else None

    def renew(self, bits: bytearray, objects: int) -> None:
        """This is what the index has now."""
        with self._lock:
            if len(bits) != len(self._bits):
                self._changes.clear()  # whoever has an earlier version needs all of it
                self._version += 1
            elif changed := _differences(self._bits, bits):
                self._version += 1
                self._changes.append((self._version, changed))
            self._bits, self._objects = bits, objects

    def since(self, version: int) -> tuple[DigestReply, list[memoryview]]:
        """The answer to `DigestRequest`, and what follows it."""
        with self._lock:
            bits, now, objects = self._bits, self._version, self._objects
            known = version == now or any(number == version + 1 for number, _ in self._changes)
            changed = sorted(set().union(*(blocks for number, blocks in self._changes if number > version)))
        blocks = len(bits) // BLOCK_BYTES
        if not known or len(changed) * CHANGE_BYTES >= len(bits):
            return DigestReply(now, blocks, True, blocks, objects), [memoryview(bits)]
        content = b"".join(
            _NUMBER.pack(block) + bits[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in changed
        )
        return DigestReply(now, blocks, False, len(changed), objects), [memoryview(content)]


def _differences(former: bytearray, bits: bytearray) -> frozenset[int]:
    """The numbers of the blocks that differ."""
    changed: list[int] = []
    old, new = memoryview(former), memoryview(bits)
    step = _PAGE_BLOCKS * BLOCK_BYTES
    for first in range(0, len(bits), step):
        if old[first : first + step] != new[first : first + step]:
            changed += [
                at // BLOCK_BYTES
                for at in range(first, min(first + step, len(bits)), BLOCK_BYTES)
                if former[at : at + BLOCK_BYTES] != bits[at : at + BLOCK_BYTES]
            ]
    return frozenset(changed)
