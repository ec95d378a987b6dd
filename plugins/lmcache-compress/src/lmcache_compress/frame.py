"""The encoded form: a head, the length of each block, the blocks.

Blocks are BLOCK_BYTES of the object each (the last one less), compressed separately: scratch memory stays in the
processor's cache, and no length from outside is ever allocated. `planes` has several parts for each block, one a plane,
each with its length. A part that does not shrink is stored as it is, so an object never grows by more than head and
lengths. The checksum covers key, layout, head, lengths and blocks: damage is
found before the first block is decoded.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from lmcache_compress.shuffle import Bytes
from lmcache_core.errors import DamagedObjectError
from lmcache_core.pool.layout import Layout

BLOCK_BYTES = 1 << 20  # with its scratch memory it fits into a second-level cache; larger blocks compress no better
FORMAT = 2  # incremented when the meaning of the encoded bytes changes
HEAD = struct.Struct("<4sHHQQ")  # codec, format, itemsize of the shuffle, bytes of the object, checksum
STORED = 1 << 31  # in a length: not compressed (and, if the block has but one part, not shuffled)


class Frame(NamedTuple):
    """What a checked encoded object holds. `lengths` are those of the medium, with STORED where it is set."""

    itemsize: int
    lengths: list[int]
    blocks_at: int


def block_count(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def frame_bytes(nbytes: int, parts: int = 1) -> int:
    """Bytes before the first block, if each has this many parts."""
    return HEAD.size + 4 * parts * block_count(nbytes)


def seal(out: Bytes, codec: bytes, itemsize: int, lengths: list[int], nbytes: int, layout: Layout, key: bytes) -> None:
    """Write head and lengths in front of the blocks that `out` already holds."""
    out[HEAD.size : HEAD.size + 4 * len(lengths)] = np.array(lengths, dtype="<u4").view(np.uint8)
    checksum = _checksum(codec, itemsize, nbytes, layout, key, out.data[HEAD.size :])
    out[: HEAD.size] = np.frombuffer(HEAD.pack(codec, FORMAT, itemsize, nbytes, checksum), dtype=np.uint8)


def opened(src: memoryview, codec: bytes, nbytes: int, layout: Layout, key: bytes, parts: int = 1) -> Frame:
    """The checked frame of an object that must decode to `nbytes`. Raises DamagedObjectError."""
    at = frame_bytes(nbytes, parts)
    if src.nbytes < at:
        raise damaged(key, codec, f"it has {src.nbytes:,} bytes and its head alone needs {at:,}")
    found, version, itemsize, recorded, checksum = HEAD.unpack_from(src)
    if (found, version) != (codec, FORMAT):
        raise damaged(key, codec, f"it starts with {found!r}, format {version}")
    if recorded != nbytes:
        raise damaged(key, codec, f"it records {recorded:,} bytes and {layout} needs {nbytes:,}")
    if checksum != _checksum(codec, itemsize, nbytes, layout, key, src[HEAD.size :]):
        raise damaged(key, codec, "its checksum differs: other bytes, another object or another layout")
    lengths = np.frombuffer(src, dtype="<u4", count=parts * block_count(nbytes), offset=HEAD.size).tolist()
    if itemsize not in (1, 2, 4, 8) or at + sum(length & ~STORED for length in lengths) != src.nbytes:
        raise damaged(key, codec, "its head contradicts its length")
    return Frame(itemsize, lengths, at)


def damaged(key: bytes, codec: bytes, what: str) -> DamagedObjectError:
    name = codec.decode().strip()
    return DamagedObjectError(
        f"{name} object {key.hex()[:16]}…: {what}; it is dropped, and stored again by its next writer"
    )


def _checksum(codec: bytes, itemsize: int, nbytes: int, layout: Layout, key: bytes, rest: memoryview) -> int:
    head = HEAD.pack(codec, FORMAT, itemsize, nbytes, layout.fingerprint)
    digest = xxhash.xxh3_64(head + len(key).to_bytes(4, "little") + key)
    digest.update(rest)
    return digest.intdigest()
