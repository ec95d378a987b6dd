"""The index in a mapped pool, for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_core.native import native
from lmcache_core.pool.segment import Segment

if TYPE_CHECKING:
    from lmcache_core._native import Index


def open_index(segment: Segment) -> Index | None:
    """The index of the pool, or None without the C extension. It keeps the mapping alive until it is closed or
    dropped."""
    return None if native is None else native.Index(segment.buffer, **segment.index_numbers)
