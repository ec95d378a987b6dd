"""What an object looks like on a tier: a header of one page, then the encoded payload.

The header is exactly one page, so that the payload starts on a page too, as O_DIRECT requires. Little-endian:

    offset  bytes  field
         0      8  magic "LMCOBJ\\r\\n" (a text-mode transfer would visibly break it)
         8      2  version of this format
        10      2  checksum algorithm (1: xxh3_64)
        12      4  bytes of the description
        16     32  key
        48      8  namespace id
        56      4  epoch of the namespace
        60      4  number of serdes in the codec chain
        64      8  layout fingerprint
        72      8  decoded length
        80      8  encoded length (what follows the header)
        88      8  checksum of the encoded payload
        96     64  encoded length after each serde of the chain, 8 at most
       160      n  description: compact JSON of dtype, shape, memory format and codec chain with parameters
      4088      8  xxh3_64 of the 4088 bytes before it
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import xxhash

from lmcache_core.errors import DamagedObjectError, MismatchedObjectError, UsageError
from lmcache_core.limits import CHAIN_SERDES_MAX, KEY_BYTES, OBJECT_BYTES_MAX, PAGE_BYTES
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Buffer

HEADER_BYTES = PAGE_BYTES
STORED_BYTES_MAX = 2 * OBJECT_BYTES_MAX  # with its header; a serde may make an object somewhat larger
MAGIC = b"LMCOBJ\r\n"
VERSION = 1
CHECKSUM_XXH3_64 = 1

_FIXED = struct.Struct(f"<8sHHI{KEY_BYTES}sQIIQQQQ{CHAIN_SERDES_MAX}Q")
_DESCRIPTION_AT = 160
_SEAL_AT = HEADER_BYTES - 8
_TIER_KEY = struct.Struct(f"<{KEY_BYTES}sQI")
_TIER_KEY_TAIL = struct.Struct("<QI")
TIER_KEY_BYTES = _TIER_KEY.size
_KIND_DIGEST_BYTES = 16
SERDE_KEY_BYTES = TIER_KEY_BYTES + _KIND_DIGEST_BYTES


class ObjectHeader(NamedTuple):
    key: bytes
    namespace: int
    epoch: int
    layout_fingerprint: int
    decoded_bytes: int
    encoded_bytes: int
    checksum: int
    lengths: tuple[int, ...]  # after each serde of the chain
    description: bytes  # canonical JSON; `describe_header` reads it


class ObjectKind(NamedTuple):
    """What all objects of one layout and one codec chain share; made once, by `object_kind`."""

    layout: Layout
    description: bytes
    digest: bytes  # of the description, for `serde_key`
    blank: bytes  # a page with all the fields that do not change


def tier_key(key: bytes, namespace: int, epoch: int) -> bytes:
    """The key on a tier: key ‖ namespace ‖ epoch, so that two namespaces, or two epochs of one, never collide."""
    return _TIER_KEY.pack(key, namespace, epoch)


def tier_keys(keys: Sequence[bytes], namespace: int, epoch: int) -> list[bytes]:
    """Tier keys of one namespace."""
    tail = _TIER_KEY_TAIL.pack(namespace, epoch)
    return [key + tail for key in keys]


def split_tier_key(raw: bytes) -> tuple[bytes, int, int]:
    """Key, namespace and epoch of a tier key. Raises `UsageError` for one of another length."""
    if len(raw) != TIER_KEY_BYTES:
        raise UsageError(f"tier key of {len(raw)} bytes: it must have {TIER_KEY_BYTES}")
    key, namespace, epoch = _TIER_KEY.unpack(raw)
    return key, namespace, epoch


def object_kind(layout: Layout, chain: CodecChain) -> ObjectKind:
    """Raises `UsageError` if layout and chain cannot be described within one page."""
    text = {
        "dtype": layout.dtype,
        "shape": layout.shape,
        "memory_format": layout.memory_format,
        "codecs": chain.describe(),
    }
    description = json.dumps(text, sort_keys=True, separators=(",", ":")).encode()
    if len(description) > _SEAL_AT - _DESCRIPTION_AT:
        raise UsageError(
            f"layout {layout} and its codec chain take {len(description)} bytes to describe, and a header has "
            f"{_SEAL_AT - _DESCRIPTION_AT}: shorten the parameters of the serdes"
        )
    blank = bytes(_DESCRIPTION_AT) + description
    digest = blake2b(description, digest_size=_KIND_DIGEST_BYTES).digest()
    return ObjectKind(layout, description, digest, blank + bytes(HEADER_BYTES - len(blank)))


def serde_key(kind: ObjectKind, key: bytes, namespace: int, epoch: int) -> bytes:
    """The key that serdes see: the tier key, and a digest of layout and codec chain.

    The header is not authenticated, so a serde that authenticates must bind everything that the header says.
    """
    return tier_key(key, namespace, epoch) + kind.digest


def payload_checksum(buffers: Sequence[Buffer]) -> int:
    """xxh3_64 over the buffers in order."""
    if len(buffers) == 1:
        return int(xxhash.xxh3_64_intdigest(buffers[0]))
    digest = xxhash.xxh3_64()
    for part in buffers:
        digest.update(part)
    return int(digest.intdigest())


def build_header(
    into: memoryview,
    kind: ObjectKind,
    *,
    key: bytes,
    namespace: int,
    epoch: int,
    encoded_bytes: int,
    checksum: int,
    lengths: Sequence[int] = (),
) -> None:
    """Write the header into `into`, one page."""
    into[:] = kind.blank
    padded = (*lengths, *((0,) * (CHAIN_SERDES_MAX - len(lengths))))
    _FIXED.pack_into(
        into, 0, MAGIC, VERSION, CHECKSUM_XXH3_64, len(kind.description), key, namespace, epoch, len(lengths),
        kind.layout.fingerprint, kind.layout.nbytes, encoded_bytes, checksum, *padded,
    )  # fmt: skip
    struct.pack_into("<Q", into, _SEAL_AT, xxhash.xxh3_64_intdigest(into[:_SEAL_AT]))


def read_header(page: memoryview) -> ObjectHeader:
    """The header of an object of unknown layout. Raises `DamagedObjectError` with the reason."""
    if page.nbytes != HEADER_BYTES:
        raise DamagedObjectError(f"object ends after {page.nbytes} bytes, inside its header: store it again")
    (magic, version, algorithm, description_bytes, key, namespace, epoch, serdes,
     fingerprint, decoded, encoded, checksum, *lengths) = _FIXED.unpack_from(page)  # fmt: skip
    if magic != MAGIC:
        raise DamagedObjectError(f"object starts with {magic!r} instead of {MAGIC!r}: it is not one of ours")
    (seal,) = struct.unpack_from("<Q", page, _SEAL_AT)
    if seal != xxhash.xxh3_64_intdigest(page[:_SEAL_AT]):
        raise DamagedObjectError(f"header of object {key.hex()[:16]}… fails its checksum: store it again")
    if version != VERSION or algorithm != CHECKSUM_XXH3_64:
        raise MismatchedObjectError(
            f"object {key.hex()[:16]}… has format version {version} with checksum algorithm {algorithm}, and "
            f"this server reads version {VERSION} with algorithm {CHECKSUM_XXH3_64}: upgrade, or clear the tier"
        )
    if description_bytes > _SEAL_AT - _DESCRIPTION_AT or serdes > CHAIN_SERDES_MAX:
        raise DamagedObjectError(f"header of object {key.hex()[:16]}… has lengths outside its page")
    return ObjectHeader(
        key, namespace, epoch, fingerprint, decoded, encoded, checksum, tuple(lengths[:serdes]),
        bytes(page[_DESCRIPTION_AT : _DESCRIPTION_AT + description_bytes]),
    )  # fmt: skip


def is_header_of(page: memoryview, raw_key: bytes) -> bool:
    """Whether a server has written this header for the object of this tier key, in whatever version of the format."""
    if page.nbytes != HEADER_BYTES or len(raw_key) != TIER_KEY_BYTES:
        return False
    magic, _, _, _, *named = _FIXED.unpack_from(page)[:7]
    (seal,) = struct.unpack_from("<Q", page, _SEAL_AT)
    return (
        magic == MAGIC
        and tuple(named) == _TIER_KEY.unpack(raw_key)
        and seal == xxhash.xxh3_64_intdigest(page[:_SEAL_AT])
    )


def check_header(page: memoryview, kind: ObjectKind, *, key: bytes, namespace: int, epoch: int) -> ObjectHeader:
    """The header, if it belongs to the expected object.

    Raises `DamagedObjectError` for a broken header or another object's, and `MismatchedObjectError` for an intact
    object of this key with another layout or codec chain.
    """
    header = read_header(page)
    if header.key != key or header.namespace != namespace or header.epoch != epoch:
        raise DamagedObjectError(
            f"asked for object {key.hex()[:16]}… of namespace {namespace:#x}, epoch {epoch}, and the tier gave "
            f"{header.key.hex()[:16]}… of {header.namespace:#x}, epoch {header.epoch}"
        )
    if header.description != kind.description or header.layout_fingerprint != kind.layout.fingerprint:
        raise MismatchedObjectError(
            f"object {key.hex()[:16]}… is {header.description.decode(errors='replace')} and expected is "
            f"{kind.description.decode()}: layout or codec chain of the tier has changed"
        )
    if header.decoded_bytes != kind.layout.nbytes:
        raise DamagedObjectError(
            f"object {key.hex()[:16]}… decodes to {header.decoded_bytes:,} bytes, its layout has {kind.layout.nbytes:,}"
        )
    return header


def describe_header(header: ObjectHeader) -> Mapping[str, Any]:
    """The description as data: dtype, shape, memory_format, codecs."""
    try:
        described = json.loads(header.description)
    except (ValueError, RecursionError):  # whoever writes to the medium can seal a header, too
        described = None
    if not isinstance(described, dict):
        raise DamagedObjectError(f"header of object {header.key.hex()[:16]}… describes no object")
    return described
