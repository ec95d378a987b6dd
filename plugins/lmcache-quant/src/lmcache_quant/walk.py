"""In which order an object's values are visited, from its layout."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout

DTYPES = ("bfloat16", "float16", "float32")  # the order is the C kernels'
OUTER_AXES_MAX = 8


class Walk(NamedTuple):
    """An object as runs of tokens of keys, then of values, at each place of the outer axes.

    A token has `width` values in a row, in heads of `dim`. Strides are in elements; `outer` has the length and the
    stride of each axis that is none of these.
    """

    half_stride: int
    tokens: int
    token_stride: int
    width: int
    dim: int
    group: int
    outer: tuple[tuple[int, int], ...]

    @property
    def packed(self) -> bytes:
        """As the kernels read it."""
        numbers = [*self[:6], len(self.outer), *(number for axis in self.outer for number in axis)]
        return struct.pack(f"={len(numbers)}Q", *numbers)

    def encoded_bytes(self, key_bits: int, value_bits: int) -> int:
        """Of grids and codes."""
        places = math.prod(length for length, _ in self.outer)
        groups = -(-self.tokens // self.group)
        heads = self.width // self.dim
        keys = groups * self.width * _grid_bytes(key_bits) + self.tokens * _row_bytes(self.width, key_bits)
        values = self.tokens * heads * (_grid_bytes(value_bits) + _row_bytes(self.dim, value_bits))
        return places * (keys + values)


def _grid_bytes(bits: int) -> int:
    """A step, and with four bits the least value: halves."""
    return 2 if bits == 8 else 4


def _row_bytes(values: int, bits: int) -> int:
    return -(-values * bits // 8)


def walk_of(layout: Layout, group_tokens: int, serde: str) -> Walk:
    """Raises `UsageError` for a layout whose keys, values, tokens and channels cannot be told apart."""
    axes, shape = layout.memory_format, layout.shape
    if layout.dtype not in DTYPES:
        raise UsageError(
            f"{serde} takes {', '.join(DTYPES)}, as the first serde of a chain, and cannot encode {layout}"
        )
    if len(set(axes)) < len(axes) or not set("KTD") <= set(axes) or axes[-1] != "D" or shape[axes.index("K")] != 2:
        raise UsageError(
            f"{serde} must know where keys and values, tokens and channels lie, and {layout} does not say: it needs a "
            "memory format with K (of length 2: keys, then values), T and, last, D, such as KLTHD; fp8 needs "
            "only the dtype, and zstd takes any layout"
        )
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    inner = max(axes.index("K"), axes.index("T")) + 1  # from here on all is one row
    half, token = strides[axes.index("K")], strides[axes.index("T")]
    outer = tuple((shape[at], strides[at]) for at in range(inner) if axes[at] not in "KT")
    tokens = shape[axes.index("T")]
    return Walk(half, tokens, token, strides[inner - 1], shape[-1], min(group_tokens, tokens), outer)
