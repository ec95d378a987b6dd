"""Token ids of any type, converted to the one form that is hashed: little-endian u32.

Nothing here imports numpy or torch, and arrays never become lists of ints: building a list of 131,072 tokens takes
longer than hashing its keys.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Iterable, Mapping, Set
from functools import cache
from struct import calcsize
from typing import Any

from lmcache_core.buffers import address_of, check_reachable, check_tensor, held, may_vanish
from lmcache_core.errors import UsageError
from lmcache_core.tensors import dense_memory, is_tensor, whole_tensor

TOKEN_BYTES = 4
TOKEN_ID_MAX = (1 << 32) - 1

_LITTLE = sys.byteorder == "little"
_WORD = "I"  # array's unsigned int: 4 bytes on every Linux
_SIGNED = frozenset("ilqn")
_LISTS = (list, tuple, range)
_INTEGERS = _SIGNED | frozenset("ILQN")  # 32 or 64 bits, depending on the item size
_NARROWED_AT_ONCE = 4096  # small enough that the temporaries are reused: allocating large ones costs more than the work

_FORMATS = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q"}  # of tensors
_READ_ONLY = 0x100  # PyBUF_READ
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)

Tokens = Any  # list, tuple, range, array, buffer of 32- or 64-bit integers, numpy array, torch tensor


def token_words(tokens: Tokens) -> memoryview:
    """The token ids as a one-dimensional view of bytes, 4 for each token, little-endian.

    Takes a one-dimensional torch tensor, anything with the buffer protocol whose items are 32- or 64-bit
    integers, or an iterable of ints. The view may share memory with `tokens`: use it before they change.
    Raises `UsageError` naming the position of an id that is negative or does not fit 32 bits.
    """
    if is_tensor(tokens):
        words = _of_tensor(tokens)
    else:
        try:
            view = memoryview(tokens)
        except TypeError:
            words = _of_iterable(tokens)
        except (ValueError, BufferError) as error:
            raise UsageError(f"tokens have no buffer that can be read: {error}") from error
        else:
            words = _of_buffer(view)
    if not _LITTLE:
        swapped = _words(words)
        swapped.byteswap()
        words = memoryview(swapped)
    return words.cast("B") if words.nbytes else memoryview(b"")


def in_memory(tokens: Tokens) -> tuple[Any, Any]:
    """The same ids in a form that C can read, and what must be kept alive meanwhile.

    A tensor becomes a view of its memory (it has no buffer protocol, and `.numpy()` would need numpy); one on another
    device is first copied to this one. Everything else stays as it is.
    """
    if not is_tensor(tokens):
        return tokens, tokens if type(tokens) in _LISTS else _kept(tokens)
    name = "the tensor of tokens"
    found = check_tensor(tokens, name)
    code = _tensor_formats(sys.modules["torch"]).get(found.tensor.dtype)
    if code is None:
        dtype = str(found.tensor.dtype).removeprefix("torch.")
        raise UsageError(f"tokens are a tensor of {dtype}: use int32, uint32, int64 or uint64")
    shape = found.tensor.shape
    _check_dimensions(len(shape), tuple(shape))
    if not shape[0]:
        return memoryview(b"").cast("I"), tokens
    local = dense_memory(whole_tensor(found, name), name)
    return _memory_at(local.address, shape[0] * calcsize(code), _READ_ONLY).cast(code), local.storage


def _kept(tokens: Any) -> Any:
    """What to keep while their memory is read. Raises `UsageError` if it is not there any more."""
    try:
        view = memoryview(tokens)
    except (TypeError, ValueError, BufferError):  # no buffer, or one that is refused where it is read
        return tokens
    owner = held(view)
    if view.nbytes and may_vanish(owner):
        reach = [(size - 1) * stride for size, stride in zip(view.shape or (), view.strides or (), strict=True)]
        low, high = sum(min(0, each) for each in reach), sum(max(0, each) for each in reach)
        check_reachable("the buffer of tokens", address_of(view) + low, high - low + view.itemsize)
    return owner


@cache
def _tensor_formats(torch: Any) -> dict[Any, str]:
    return {getattr(torch, name): code for name, code in _FORMATS.items() if hasattr(torch, name)}


def _of_iterable(tokens: Any) -> memoryview:
    if isinstance(tokens, str | Mapping | Set) or not issubclass(type(tokens), Iterable):
        raise UsageError(f"tokens are a {type(tokens).__name__}: give a sequence, array or tensor of token ids")
    # Kept, because an iterator could not be walked again to find the fault.
    ids = tokens if isinstance(tokens, list | tuple | range) else list(tokens)
    try:
        return memoryview(array(_WORD, ids))
    except (OverflowError, TypeError) as error:
        for position, token in enumerate(ids):
            if not hasattr(token, "__index__"):
                raise UsageError(
                    f"token {position} is a {type(token).__name__}: give one-dimensional token ids, as integers"
                ) from error
            _check_id(position, int(token))
        raise


def _of_tensor(tensor: Any) -> memoryview:
    view, _kept = in_memory(tensor)
    # Copied here, while the tensor's memory is still alive.
    return _of_buffer(memoryview(view.tobytes()).cast(view.format) if view.nbytes else view)


def _of_buffer(view: memoryview) -> memoryview:
    _check_dimensions(view.ndim, view.shape or ())
    prefix, kind = view.format[:-1], view.format[-1:]
    if prefix in ("", "@", "<" if _LITTLE else ">") and kind in _INTEGERS:
        # A prefixed or strided view cannot be cast, only copied.
        flat = view if view.c_contiguous and not prefix else memoryview(view.tobytes())
        if not flat.nbytes:
            return flat
        if view.itemsize == TOKEN_BYTES:
            return _checked(flat, kind in _SIGNED)
        if view.itemsize == 2 * TOKEN_BYTES:
            return _narrowed(flat, kind in _SIGNED)
    raise UsageError(
        f"tokens are a buffer of format {view.format!r}, {view.itemsize} bytes per item: use native 32- or 64-bit "
        "integers (cast bytes with memoryview(…).cast('I'))"
    )


def _checked(words: memoryview, signed: bool) -> memoryview:
    """32-bit ids, after checking that none is negative."""
    if signed:
        # A negative id has the top bit of its top byte set; `isascii` looks for that bit in a whole run.
        raw = words.tobytes()
        top = raw[3::4] if _LITTLE else raw[0::4]
        if not top.isascii():
            position = next(i for i, byte in enumerate(top) if byte > 0x7F)
            _check_id(position, int.from_bytes(raw[4 * position :][:4], sys.byteorder, signed=True))
    return words


def _narrowed(pairs: memoryview | bytes, signed: bool) -> memoryview:
    """64-bit ids as 32-bit words: the low halves, after checking that the high halves are zero."""
    raw = memoryview(pairs).cast("B")
    words = array(_WORD)
    step = _NARROWED_AT_ONCE * 2 * TOKEN_BYTES
    for start in range(0, raw.nbytes, step):
        halves = _words(raw[start : start + step])
        low, high = (halves[0::2], halves[1::2]) if _LITTLE else (halves[1::2], halves[0::2])
        if high.tobytes() != bytes(len(high) * TOKEN_BYTES):
            position = next(i for i, half in enumerate(high) if half)
            wide = high[position] << 32 | low[position]
            negative = signed and wide >> 63
            _check_id(start // (2 * TOKEN_BYTES) + position, wide - (1 << 64) if negative else wide)
        words += low
    return memoryview(words)


def _words(raw: memoryview | bytes) -> array[int]:
    words = array(_WORD)
    words.frombytes(memoryview(raw).cast("B"))
    return words


def _check_dimensions(dimensions: int, shape: tuple[int, ...]) -> None:
    if dimensions != 1:
        raise UsageError(f"tokens have the shape {shape!r}: give one dimension, the tokens of one sequence")


def _check_id(position: int, token: int) -> None:
    if not 0 <= token <= TOKEN_ID_MAX:
        raise UsageError(f"token {position} is {token}: token ids must be from 0 to {TOKEN_ID_MAX:,}")
