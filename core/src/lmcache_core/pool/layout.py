"""The layout of an object: what its bytes mean, and the fingerprint for comparing two sides."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

from lmcache_core.errors import UsageError
from lmcache_core.limits import DIMENSIONS_MAX, OBJECT_BYTES_MAX

__all__ = [
    "Layout",
]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Layout:
    """dtype, shape and memory format of one object.

    `dtype` is a torch dtype's name without `torch.`, or `uint8` if nothing is known of the content; `shape` is in
    elements; `memory_format` names the axes, one letter each (K: key or value, L: layer, T: token, H: head, D: head
    dimension, B: block), or is empty if nobody knows in which order the values lie. Two layouts of equal size are never
    confused: the fingerprint covers all three fields.
    """

    dtype: str
    shape: tuple[int, ...]
    memory_format: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise UsageError(f"layout dtype {self.dtype!r} is not known: use one of {known}")
        if not isinstance(self.shape, tuple):
            raise UsageError(f"the shape of a layout is a tuple, such as (524288,), and not {self.shape!r:.80}")
        # Before their product: Python multiplies numbers of any length, and refuses to print long ones.
        if not 0 < len(self.shape) <= DIMENSIONS_MAX:
            raise UsageError(f"a layout has 1 to {DIMENSIONS_MAX} dimensions, and this one has {len(self.shape):,}")
        for at, length in enumerate(self.shape):
            if not isinstance(length, int) or not 0 < length <= OBJECT_BYTES_MAX:
                raise UsageError(f"dimension {at} of a layout must be a whole number from 1 to {OBJECT_BYTES_MAX:,}")
        if self.memory_format and len(self.memory_format) != len(self.shape):
            raise UsageError(
                f"memory_format {self.memory_format!r} names {len(self.memory_format)} axes "
                f"but the shape {self.shape!r} has {len(self.shape)}: give one letter for each axis"
            )
        if self.nbytes > OBJECT_BYTES_MAX:
            raise UsageError(
                f"an object of {self.nbytes:,} bytes is over the limit of {OBJECT_BYTES_MAX:,}: "
                "use fewer tokens per chunk, or split by layer"
            )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one object."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def text(self) -> str:
        """All fields, in canonical words."""
        return f"{self.dtype}|{','.join(map(str, self.shape))}|{self.memory_format}"

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """The layout with this `text`. Raises `UsageError` if there is none."""
        fields = text.split("|")
        sizes = fields[1].split(",") if len(fields) == 3 else []
        if not sizes or not all(size.isascii() and size.isdigit() for size in sizes):
            raise UsageError(f"{text[:80]!r} is no layout: it has a dtype, a shape and a memory format")
        return cls(fields[0], tuple(map(int, sizes)), fields[2])

    @cached_property
    def fingerprint(self) -> int:
        """64 bits of SHA-256 over `text`: equal on every machine."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "little")

    def __str__(self) -> str:
        axes = f" {self.memory_format}" if self.memory_format else ""
        return f"{self.dtype}[{'×'.join(map(str, self.shape))}]{axes}"
