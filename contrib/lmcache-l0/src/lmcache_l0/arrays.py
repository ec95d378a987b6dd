"""Arrays in the table's memory. Imported with numpy when the first array is requested."""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

import numpy as np
from numpy import ndarray

from lmcache_l0._table import View

__all__ = ["NUMPY_FUNCTIONS", "ArrayView", "describe", "ndarray"]

_TAG_BYTES = 8
_HASHED = 1 << 63  # names are ASCII


def _numpy_functions() -> Any:
    """The capsule of numpy's C functions, by either of its names; None if there is none."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        try:
            return getattr(import_module(name), "_ARRAY_API", None)
        except ImportError:
            continue
    return None


NUMPY_FUNCTIONS = _numpy_functions()


class ArrayView(np.ndarray[Any, Any]):
    """An array over the bytes of one value in shared memory.

    Its bytes stay valid until its key has been written again and then one more write (`spares` - 1) has gone to its
    stripe of 64 slots, or, in a table with `versions`, until its key has been written that many more times. `valid()`
    is exact. Call it after the work, not before: `work(view); view.valid()`. Slices are views too; the results of
    arithmetic are plain arrays.
    """

    __slots__ = ()  # no dictionary: a view is made for every read

    def valid(self) -> bool:
        """Whether the bytes are still those of the value that was found; True for an array with its own memory."""
        owner: Any = self
        while not isinstance(owner, View):
            # as_strided, a memoryview or a ctypes array in between keeps its source under such a name.
            below = getattr(owner, "base", None)
            below = getattr(owner, "obj", None) if below is None else below
            if below is None:
                return isinstance(owner, bytes | bytearray) or bool(
                    getattr(getattr(owner, "flags", None), "owndata", 0)
                )
            owner = below
        return owner.valid()

    def __dlpack__(self, **options: Any) -> Any:
        """The view for another library: without a copy if the library supports read-only memory, else a copy."""
        try:
            return super().__dlpack__(**options)
        except BufferError:
            if options.get("copy") is False:
                raise
            return np.array(self, subok=False).__dlpack__(**options)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """The result of a computation has its own memory."""
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain


def describe(dtype: Any) -> tuple[np.dtype[Any], int, int]:
    """(dtype, bytes of an element, tag) of anything numpy takes for a dtype.

    The tag is stored beside the bytes, so that a value is never read as another type of the same size. It is the
    dtype's name in numpy's array protocol (`<f4`) if that fits into 8 bytes and is complete; else (dates of odd steps,
    fields, types of other libraries) a hash of all of numpy's description, with the highest bit set. Void types without
    fields are just bytes: tag 0.
    """
    known = np.dtype(dtype)
    if known.hasobject:
        raise TypeError(f"{known} holds Python objects, which are not shared: use a type of plain bytes")
    name = known.str.encode()
    if known.type is np.void and known.names is None and known.subdtype is None:
        tag = 0
    elif known.kind != "V" and len(name) <= _TAG_BYTES:
        tag = int.from_bytes(name.ljust(_TAG_BYTES, b"\0"), "little")
    else:
        whole = repr((known.name, known.str, known.fields, known.subdtype, known.itemsize)).encode()
        tag = int.from_bytes(hashlib.blake2b(whole, digest_size=_TAG_BYTES).digest(), "little") | _HASHED
    return known, known.itemsize, tag
