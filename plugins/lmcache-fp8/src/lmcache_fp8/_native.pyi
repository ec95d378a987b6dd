"""The C kernel. `sizes` is (outer, tokens, mid, dim, group, tail) in elements, rows and tokens; see module.c."""

from lmcache_core.serde.contract import Buffer

Sizes = tuple[int, int, int, int, int, int]

def encode(src: Buffer, dtype: int, sizes: Sizes, isa: str = "auto", /) -> bytes:
    """Scales, then codes. `dtype`: 0 bf16, 1 fp16, 2 fp32. Raises ValueError where lengths and sizes disagree."""

def decode(src: Buffer, into: bytearray | memoryview, dtype: int, sizes: Sizes, isa: str = "auto", /) -> int:
    """Fill `into`; -1, or the index of the first scale that no encoder writes (nothing is written then)."""

def isas() -> tuple[str, ...]:
    """The kernels that run on this machine, best first: "avx2", "plain"."""
