"""What identifies an object beside its payload: which one may replace another under the same key."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from lmcache_core.errors import DamagedObjectError
from lmcache_core.tiers.object.format import HEADER_BYTES, MAGIC, read_header


def kind_of(buffers: Sequence[memoryview]) -> str:
    """A digest of key, namespace, epoch, layout and codec chain; empty for bytes that are not an object of
    lmcache-core. The payload's checksum is left out on purpose: two nodes that compute the same chunk may differ in the
    last bits, and either result is valid.
    """
    if not buffers or buffers[0].nbytes != HEADER_BYTES or bytes(buffers[0][: len(MAGIC)]) != MAGIC:
        return ""
    try:
        header = read_header(buffers[0])
    except DamagedObjectError:
        return ""
    whole = repr((header.key, header.namespace, header.epoch, header.layout_fingerprint, header.decoded_bytes))
    return str(xxhash.xxh3_128_hexdigest(whole.encode() + header.description))
