"""The C functions. Arrays are any buffers, in the order of their axes; shapes and types are checked."""

from typing import Any

def turn(inv_freq: Any, old_positions: Any, new_positions: Any, table: Any, /) -> None:
    """Fill `table` [tokens, 2, pairs] of single floats with the cosines and sines of the angles between positions
    (64 bits each). Raises ValueError where lengths disagree."""

def move(
    source: Any,
    target: Any,
    table: Any,
    kind: int,
    dimensions: int,
    interleaved: bool,
    token_axis: int,
    isa: str = "auto",
    /,
) -> None:
    """Copy keys, rotated by `table`, or as they are if it is None. `kind`: 0 f32, 1 f16, 2 bf16. Both arrays may have
    gaps anywhere except between the values of a head. Raises ValueError where shapes disagree, and for arrays that
    overlap and are not the same."""

def cut(words: Any, minimum: int, mean: int, maximum: int, /) -> bytes:
    """The ends of the chunks of a text of 32-bit words, as 64-bit numbers."""

def isas() -> tuple[str, ...]:
    """The kernels that run on this machine, best first: "avx2", "plain"."""
