"""The serde that does nothing: bytes go to the tier unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.errors import DamagedObjectError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer, Serde


class IdentitySerde(Serde):
    """Changes nothing and copies nothing. A chain leaves it out, so naming it costs nothing."""

    name = "identity"
    lossless = True

    def __init__(self, settings: object = None) -> None:
        del settings  # it has no settings

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes

    def encoded_layout(self, layout: Layout, nbytes: int) -> Layout:
        return layout

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        return [src]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        if src.nbytes != into.nbytes:
            raise DamagedObjectError(
                f"object {key.hex()[:16]}… has {src.nbytes:,} bytes, but its layout {layout} needs {into.nbytes:,}"
            )
        into[:] = src
