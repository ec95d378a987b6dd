"""Tensors that lie in the table. Imported when the first is asked for; torch is then there already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from lmcache_l0.cache import SharedCache


def tensor_of(
    cache: SharedCache, key: str | bytes, shape: int | tuple[int, ...], dtype: torch.dtype, *, snapshot: bool
) -> torch.Tensor | None:
    """See SharedCache.get_torch. A dtype that numpy has not (bfloat16) is read from a value that has no dtype, or
    that was stored as whole numbers of its size."""
    stored, view_as = _stored_as(dtype)
    array = cache.get_numpy(key, shape, stored, snapshot=snapshot or cache.read_only, writable=not cache.read_only)
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
