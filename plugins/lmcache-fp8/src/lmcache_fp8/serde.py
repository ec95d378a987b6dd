"""The serde `fp8`: float8 e4m3fn, with a scale for each group of tokens and head.

An encoded object is the scales (float32, little-endian, in the order of `Grouping`), then one byte an element in
the order of the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lmcache_core.errors import DamagedObjectError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer, Serde
from lmcache_fp8.grouping import Grouping, grouping_of
from lmcache_fp8.kernels import DTYPES, kernel_for
from lmcache_fp8.settings import Fp8Settings

FORMAT = 1  # incremented when the meaning of the encoded bytes changes


class Fp8Serde(Serde):
    """Lossy: see the package's README for the bound."""

    name: ClassVar[str] = "fp8"
    lossless: ClassVar[bool] = False

    def __init__(self, settings: Fp8Settings) -> None:
        self._group_tokens = settings.group_tokens
        self._kernel = kernel_for(settings.kernel)

    def parameters(self) -> Mapping[str, str | int | float]:
        return {"format": FORMAT, "group_tokens": self._group_tokens}

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        """Exact. An object has the size of its layout, so `nbytes` adds nothing."""
        return self._grouping(layout).encoded_bytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        grouping = self._grouping(layout)
        if src.nbytes != layout.nbytes:
            raise UsageError(
                f"object {key.hex()[:16]}… has {src.nbytes:,} bytes and its layout {layout} {layout.nbytes:,}: "
                "fp8 needs every element of the layout"
            )
        return [self._kernel.encode(src, layout.dtype, grouping)]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        grouping = self._grouping(layout)
        if into.nbytes != layout.nbytes:
            raise UsageError(
                f"object {key.hex()[:16]}…: the target has {into.nbytes:,} bytes and its layout {layout} "
                f"{layout.nbytes:,}: fp8 restores every element of the layout"
            )
        if src.nbytes != grouping.encoded_bytes:
            raise DamagedObjectError(
                f"fp8 object {key.hex()[:16]}…: {src.nbytes:,} bytes came back and {layout} encodes to "
                f"{grouping.encoded_bytes:,}: it was cut, or stored under another layout"
            )
        self._kernel.decode(src, into, layout.dtype, grouping)

    def _grouping(self, layout: Layout) -> Grouping:
        if layout.dtype not in DTYPES:
            raise UsageError(
                f"fp8 takes {', '.join(DTYPES)}, as the first serde of a chain, and cannot encode {layout}"
            )
        return grouping_of(layout, self._group_tokens)
