"""Between a transformers cache object and the chunks of lmcache-core.

Importing this package loads neither torch nor transformers; the names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_transformers.chunks import gather_chunks, layout_for, read_chunks, write_chunks
    from lmcache_transformers.prefix_cache import PrefixCache

__version__ = "0.1.0"

__all__ = ["PrefixCache", "__version__", "gather_chunks", "layout_for", "read_chunks", "write_chunks"]

_LAZY = {
    "PrefixCache": "lmcache_transformers.prefix_cache",
    "gather_chunks": "lmcache_transformers.chunks",
    "layout_for": "lmcache_transformers.chunks",
    "read_chunks": "lmcache_transformers.chunks",
    "write_chunks": "lmcache_transformers.chunks",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
