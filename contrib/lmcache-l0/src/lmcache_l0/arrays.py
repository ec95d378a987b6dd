"""Arrays that lie in the table. Imported when the first array is asked for, and numpy with it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy import ndarray

__all__ = ["NUMPY_FUNCTIONS", "ArrayView", "describe", "ndarray"]

_TAG_BYTES = 8


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

    Its bytes are the ones that were found until the key has been written `versions` more times, or deleted and
    its slot used again; `valid()` tells. Check it after the work, not before: `work(view); view.valid()`. Slices
    are views too; the results of arithmetic are plain arrays.
    """

    __slots__ = ()  # no dictionary: a view is made for every read

    def valid(self) -> bool:
        """Whether the bytes are still those of the value that was found; True for an array of its own bytes."""
        base: Any = self.base
        while isinstance(base, ndarray):
            base = base.base
        return bool(base.valid()) if hasattr(base, "valid") else True

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What is computed from a view has bytes of its own."""
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain


def describe(dtype: Any) -> tuple[np.dtype[Any], int, int]:
    """(dtype, bytes of an element, tag) of anything numpy takes for a dtype.

    The tag is the dtype's name in numpy's array protocol (`<f4`), as 8 bytes: it is stored beside the bytes, so
    that a value is never read as another type of the same size. Void types are just bytes: tag 0.
    """
    known = np.dtype(dtype)
    if known.hasobject:
        raise TypeError(f"{known} holds Python objects, which are not shared: use a type of plain bytes")
    name = known.str.encode() if known.kind != "V" else b""
    tag = int.from_bytes(name[:_TAG_BYTES].ljust(_TAG_BYTES, b"\0"), "little")
    return known, known.itemsize, tag
