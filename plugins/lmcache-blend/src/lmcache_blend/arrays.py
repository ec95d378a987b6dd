"""Arrays, tensors and tokens as numpy arrays over the same memory, where that is possible."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core.buffers import check_tensor
from lmcache_core.errors import UsageError
from lmcache_core.tensors import is_tensor
from lmcache_core.tokens.canonical import TOKEN_ID_MAX, Tokens, token_words

_KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
POSITION_MAX = (1 << 24) - 1  # above, single floats, in which models compute angles, skip numbers


def array_of(given: Any, name: str, dtype: str = "", *, writable: bool = False) -> tuple[npt.NDArray[Any], str]:
    """The same memory as a numpy array, bfloat16 as uint16, and the name of its dtype. Raises `UsageError`."""
    if is_tensor(given):
        tensor = check_tensor(given, name).tensor.detach()
        if not tensor.is_cpu:
            raise UsageError(f"{name} is on {tensor.device}: copy it to host memory first")
        kind = str(tensor.dtype).removeprefix("torch.")
        array = tensor.view(_torch_uint16()).numpy() if kind == "bfloat16" else tensor.numpy()
    elif isinstance(given, np.ndarray):
        array, kind = given, dtype or given.dtype.name
    else:
        raise UsageError(f"{name} is a {type(given).__name__}: give a numpy array or a torch tensor")
    if kind not in _KINDS or array.dtype != _KINDS[kind]:
        known = ", ".join(_KINDS)
        raise UsageError(f"{name} has the dtype {kind or array.dtype.name}: use one of {known}")
    if array.ndim < 2 or (array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize):
        raise UsageError(f"{name} must have tokens and, last, the values of a head in a row, not {list(array.shape)}")
    if writable and not array.flags.writeable:
        raise UsageError(f"{name} is read-only")
    return array, kind


def _torch_uint16() -> Any:
    """Whoever has a tensor has imported torch."""
    return sys.modules["torch"].uint16


def positions_of(given: Any, tokens: int) -> npt.NDArray[np.int64]:
    """One position for each token: the given ones, or consecutive ones from a number on. Raises `UsageError`."""
    if is_tensor(given):
        given = given.tolist()
    first = np.asarray(given)
    if first.dtype.kind not in "iu" or first.ndim > 1:
        raise UsageError(f"positions are {given!r:.80}: give whole numbers, one for each token, or the first of a run")
    found = np.arange(int(first), int(first) + tokens) if first.ndim == 0 else first.astype(np.int64)
    if len(found) != tokens:
        raise UsageError(f"{len(found)} positions for {tokens} tokens")
    if tokens and not 0 <= int(found.min()) <= int(found.max()) <= POSITION_MAX:
        raise UsageError(f"positions reach from {found.min()} to {found.max()}: use 0 to {POSITION_MAX:,}")
    return np.ascontiguousarray(found, np.int64)


def words_of(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Token ids as 32-bit words, as keys are made of. Raises `UsageError` as `chunk_keys` does."""
    quick = isinstance(tokens, np.ndarray) and tokens.dtype == np.int64 and tokens.ndim == 1 and len(tokens) > 0
    if quick and tokens.min() >= 0 and tokens.max() <= TOKEN_ID_MAX:
        return np.asarray(tokens, "<u4")
    return np.frombuffer(token_words(tokens), "<u4")
