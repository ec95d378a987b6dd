"""L0: small hot values in one shared-memory table, read by every process of the machine at function-call cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_l0.cache import SharedCache
    from lmcache_l0.served import ServedCache
    from lmcache_l0.tiered import TieredCache

__version__ = "0.1.0"

__all__ = ["ServedCache", "SharedCache", "TieredCache", "__version__"]

_LAZY = {
    "ServedCache": "lmcache_l0.served",
    "SharedCache": "lmcache_l0.cache",
    "TieredCache": "lmcache_l0.tiered",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
