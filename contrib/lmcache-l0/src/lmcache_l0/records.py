"""Records: the form of a value in L1, and its keys in L1 and in L0. Clients and server both use this module.

A record is an object of L1: 8 bytes of length, 8 bytes that say what the value is (0: bytes; else a dtype's tag), the
value, and zeros up to the layout's size. Its layout is `uint8[n]` with the memory format `R`; other objects are never
promoted into L0. A name has one key in L1 and one in L0, and each can be derived from the other, so that the server,
which knows keys but no names, can keep L0 consistent:

    name of 1 to 30 bytes   L1: its length, the name, zeros up to 31 bytes, one byte of its CRC   L0: namespace, name
    longer                  L1: 255, 31 bytes of its SHA-256                                       L0: namespace, L1 key

The namespace is its 64-bit id, little-endian. A key of L1 that is neither belongs to another program; in L0 it follows
its namespace unchanged.
"""

from __future__ import annotations

import struct
import zlib
from hashlib import sha256

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout

HEAD = struct.Struct("<QQ")
VALUE_BYTES_MAX = 1 << 20
RECORD_BYTES_MAX = HEAD.size + VALUE_BYTES_MAX
NAMESPACE_BYTES = 8
L0_KEY_BYTES_MAX = NAMESPACE_BYTES + 32
SHORT_BYTES_MAX = 30
_FORMAT = "R"
_LONG = 0xFF


def record_layout(max_value_size: int) -> Layout:
    """The layout of records for values of up to so many bytes. Raises `UsageError`."""
    if type(max_value_size) is not int or not 1 <= max_value_size <= VALUE_BYTES_MAX:
        raise UsageError(f"max_value_size={max_value_size!r} must be a whole number from 1 to {VALUE_BYTES_MAX:,}")
    return Layout("uint8", (HEAD.size + max_value_size,), _FORMAT)


def is_record(layout: Layout) -> bool:
    """Whether objects of this layout are records."""
    return layout.memory_format == _FORMAT and layout.dtype == "uint8" and HEAD.size < layout.nbytes <= RECORD_BYTES_MAX


def prefix_of(namespace: int) -> bytes:
    """The prefix of a namespace's L0 keys."""
    return namespace.to_bytes(NAMESPACE_BYTES, "little")


def l1_key(name: bytes) -> bytes:
    """The key of a name in L1. Raises `UsageError` for an empty one."""
    if len(name) > SHORT_BYTES_MAX:
        return b"\xff" + sha256(name).digest()[:31]
    if not name:
        raise UsageError("a key of 0 bytes: give it a name of 1 byte or more")
    return bytes((len(name),)) + name.ljust(SHORT_BYTES_MAX, b"\0") + bytes((zlib.crc32(name) & 0xFF,))


def l0_key(prefix: bytes, name: bytes) -> bytes:
    """The key of a name in L0."""
    return prefix + name if len(name) <= SHORT_BYTES_MAX else prefix + l1_key(name)


def l0_key_of(prefix: bytes, key: bytes) -> bytes:
    """The key in L0 of an object that has this key in L1."""
    length = key[0]
    if 0 < length <= SHORT_BYTES_MAX:
        name = key[1 : 1 + length]
        if l1_key(name) == key:
            return prefix + name
    return prefix + key


def l1_key_of(key: bytes) -> tuple[int, bytes] | None:
    """The namespace and the L1 key of this L0 key; None for a key that no record has."""
    tail = key[NAMESPACE_BYTES:]
    if not tail or SHORT_BYTES_MAX < len(tail) != 32:
        return None
    return int.from_bytes(key[:NAMESPACE_BYTES], "little"), (tail if len(tail) == 32 else l1_key(tail))
