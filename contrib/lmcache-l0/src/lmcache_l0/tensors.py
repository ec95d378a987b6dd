"""Tensors in the table's memory. Imported when the first is requested, when torch is already loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def tensor_of(read: Callable[[np.dtype[Any]], npt.NDArray[Any] | None], dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor over the result of `read` for numpy's dtype: a writable array, or None. A dtype that numpy lacks
    (bfloat16) is read from a value without a dtype, or one that was stored as integers of its size."""
    stored, view_as = _stored_as(dtype)
    array = read(stored)
    if array is None:
        return None
    tensor: Any = torch.from_numpy(np.asarray(array)).view(view_as)  # it gets an extra attribute
    valid = getattr(array, "valid", None)
    tensor.valid = valid if valid is not None else lambda: True
    whole: torch.Tensor = tensor
    return whole


def _stored_as(dtype: torch.dtype) -> tuple[np.dtype[np.generic], torch.dtype]:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype, dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}"), dtype
