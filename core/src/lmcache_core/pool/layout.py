"""The layout of an object: what its bytes mean, and the fingerprint for comparing two sides."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

from lmcache_core.errors import UsageError
from lmcache_core.limits import OBJECT_BYTES_MAX

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

    `dtype` is a torch dtype's name without `torch.`; `shape` is in elements; `memory_format` names the axes, one letter
    each (K: key or value, L: layer, T: token, H: head, D: head dimension, B: block), or is empty if the content is
    opaque. Two layouts of equal size are never confused: the fingerprint covers all three fields.
    """

    dtype: str
    shape: tuple[int, ...]
    memory_format: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise UsageError(f"layout dtype {self.dtype!r} is not known: use one of {known}")
        if not self.shape or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise UsageError(f"layout shape {self.shape!r} must have one or more positive dimensions")
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

    @cached_property
    def fingerprint(self) -> int:
        """64 bits of SHA-256 over the canonical text of all fields: equal on every machine."""
        text = f"{self.dtype}|{','.join(map(str, self.shape))}|{self.memory_format}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def __str__(self) -> str:
        axes = f" {self.memory_format}" if self.memory_format else ""
        return f"{self.dtype}[{'×'.join(map(str, self.shape))}]{axes}"
