"""Arrays that lie in the table. Imported when the first array is asked for, and numpy with it."""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

import numpy as np
from numpy import ndarray

from lmcache_l0._table import View

__all__ = ["NUMPY_FUNCTIONS", "ArrayView", "describe", "ndarray"]

_TAG_BYTES = 8
_HASHED = 1 << 63  # no character of a name is above 127


def _numpy_functions() -> Any:
    """The capsule of numpy's C functions, by either of its names; None where there is none."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        try:
            return getattr(import_module(name), "_ARRAY_API", None)
        except ImportError:
            continue
    return None


NUMPY_FUNCTIONS = _numpy_functions()


class ArrayView(np.ndarray[Any, Any]):
    """An array over the bytes of one value where they lie in shared memory.

    Its bytes are the ones that were found until its key has been written again and then one more write (`spares` - 1)
    has fallen in its stripe of 64 slots, or, in a table with `versions`, until its key has been written that many
    more times. `valid()` tells exactly. Check it after the work, not before: `work(view); view.valid()`. Slices are
    views too; the results of arithmetic are plain arrays.
    """

    __slots__ = ()  # no dictionary: a view is made for every read

    def valid(self) -> bool:
        """Whether the bytes are still those of the value that was found; True for an array of its own bytes."""
        owner: Any = self
        while not isinstance(owner, View):
            # What as_strided, a memoryview, a ctypes array put in between keeps what it was made of under such a name.
            below = getattr(owner, "base", None)
            below = getattr(owner, "obj", None) if below is None else below
            if below is None:
                return isinstance(owner, bytes | bytearray) or bool(
                    getattr(getattr(owner, "flags", None), "owndata", 0)
                )
            owner = below
        return owner.valid()

    def __dlpack__(self, **asked: Any) -> Any:
        """The view for another library, without a copy where that can be told that it is read-only, else a copy."""
        try:
            return super().__dlpack__(**asked)
        except BufferError:
            if asked.get("copy") is False:
                raise
            return np.array(self, subok=False).__dlpack__(**asked)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What is computed from a view has bytes of its own."""
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain


def describe(dtype: Any) -> tuple[np.dtype[Any], int, int]:
    """(dtype, bytes of an element, tag) of anything numpy takes for a dtype.

    The tag is stored beside the bytes, so that a value is never read as another type of the same size. It is the
    dtype's name in numpy's array protocol (`<f4`) where 8 bytes hold that and it says all there is to say; else (dates
    of odd steps, fields, types of other libraries) a hash of all that numpy knows of it, with the highest bit set.
    Void types without fields are just bytes: tag 0.
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
