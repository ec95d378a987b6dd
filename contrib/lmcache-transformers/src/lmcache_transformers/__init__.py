"""Prompt prefixes of transformers models in the pool of lmcache-core.

Importing this package loads neither torch nor transformers; the names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_transformers.blend.blender import Blended, Blending
    from lmcache_transformers.generator import CachedGenerator, Generated, MarkedPrompt
    from lmcache_transformers.geometry import cache_argument
    from lmcache_transformers.prefix_cache import Prefix, PrefixCache, Stored
    from lmcache_transformers.support import refusal

__version__ = "0.1.0"

__all__ = [
    "Blended",
    "Blending",
    "CachedGenerator",
    "Generated",
    "MarkedPrompt",
    "Prefix",
    "PrefixCache",
    "Stored",
    "__version__",
    "cache_argument",
    "refusal",
]

_LAZY = {
    "Blended": "lmcache_transformers.blend.blender",
    "Blending": "lmcache_transformers.blend.blender",
    "CachedGenerator": "lmcache_transformers.generator",
    "Generated": "lmcache_transformers.generator",
    "MarkedPrompt": "lmcache_transformers.generator",
    "Prefix": "lmcache_transformers.prefix_cache",
    "PrefixCache": "lmcache_transformers.prefix_cache",
    "Stored": "lmcache_transformers.prefix_cache",
    "cache_argument": "lmcache_transformers.geometry",
    "refusal": "lmcache_transformers.support",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
