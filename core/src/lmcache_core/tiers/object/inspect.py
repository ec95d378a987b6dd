"""What one read of an object shows, without knowing its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from lmcache_core.errors import DamagedObjectError
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.object.format import HEADER_BYTES, ObjectHeader, payload_checksum, read_header, split_tier_key


class Evidence(NamedTuple):
    """Of a damaged object: two reads that agree in it have seen the same thing. All zero and empty if the medium itself
    raised that it cannot read the object."""

    digest: int = 0
    nbytes: int = 0
    version: str = ""


def evidence_of(outcome: Outcome, buffers: Sequence[memoryview]) -> Evidence:
    """What a load has brought."""
    if outcome.result is not Result.DONE:
        return Evidence(version=outcome.version)
    digest = xxhash.xxh3_64()
    left = outcome.nbytes
    for part in buffers:
        digest.update(part[: max(0, left)])
        left -= part.nbytes
    return Evidence(digest.intdigest(), outcome.nbytes, outcome.version)


def check_object(
    raw_key: bytes, page: memoryview, payload: memoryview, nbytes: int, checksum: int | None = None
) -> ObjectHeader:
    """The header, if `nbytes` in `page` and `payload` are the object of this tier key, whole. `checksum`: of the
    payload, if it was computed while it came. Raises `DamagedObjectError`."""
    if nbytes < HEADER_BYTES:
        raise DamagedObjectError(f"it ends after {nbytes} bytes, inside its header")
    header = read_header(page)
    key, namespace, epoch = split_tier_key(raw_key)
    if (header.key, header.namespace, header.epoch) != (key, namespace, epoch):
        raise DamagedObjectError(f"it stands under the key of {key.hex()[:16]}… and is {header.key.hex()[:16]}…")
    if nbytes != HEADER_BYTES + header.encoded_bytes or header.encoded_bytes > payload.nbytes:
        raise DamagedObjectError(f"it has {nbytes:,} bytes and its header says otherwise")
    if checksum is None:
        checksum = payload_checksum([payload[: header.encoded_bytes]])
    if checksum != header.checksum:
        raise DamagedObjectError("its payload fails its checksum")
    return header
