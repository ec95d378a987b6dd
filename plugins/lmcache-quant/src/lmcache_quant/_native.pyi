"""The C kernels. `sizes` is `Walk.packed`; a `True` of the two flags is four bits, a `False` eight."""

from lmcache_core.serde.contract import Buffer

def encode(src: Buffer, dtype: int, keys: bool, values: bool, sizes: bytes, isa: str = "auto", /) -> bytes | None:
    """Grids, then codes; `None` where they cannot hold a value. `dtype`: 0 bf16, 1 f16, 2 f32. Raises ValueError where
    lengths and sizes disagree."""

def decode(
    src: Buffer, into: memoryview, dtype: int, keys: bool, values: bool, sizes: bytes, isa: str = "auto", /
) -> int:
    """Fill `into`; -1, or the index of the first half of the grids that no encoder writes (nothing is written then)."""

def isas() -> tuple[str, ...]:
    """The kernels that run on this machine, best first: "avx2", "plain"."""
