"""Tensors that lie in the table. Imported when the first is asked for; torch is then there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def tensor_of(read: Callable[[np.dtype[Any]], npt.NDArray[Any] | None], dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor over what `read` gives for numpy's dtype: an array that may be written, or None. A dtype that numpy
    has not (bfloat16) is read from a value that has no dtype, or that was stored as whole numbers of its size."""
    stored, view_as = _stored_as(dtype)
    array = read(stored)
    if array is None:
        return None
    tensor: Any = torch.from_numpy(np.asarray(array)).view(view_as)  # it is given an attribute more
    valid = getattr(array, "valid", None)
    tensor.valid = valid if valid is not None else lambda: True
    whole: torch.Tensor = tensor
    return whole


def _stored_as(dtype: torch.dtype) -> tuple[np.dtype[np.generic], torch.dtype]:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype, dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}"), dtype
