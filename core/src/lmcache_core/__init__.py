"""KV-cache storage for LLM inference: a shared-memory pool, fenced leases, and tiers as plugins.

Importing this package loads only the names that plugins need; `Client` and `Server` are imported on first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import (
    CacheError,
    DamagedObjectError,
    DisconnectedError,
    ForgottenError,
    LeaseExpiredError,
    LimitError,
    MismatchedObjectError,
    NotAttachedError,
    NotEnoughMemoryError,
    PluginError,
    PoolBusyError,
    PoolError,
    PoolMismatchError,
    ProtocolError,
    Retry,
    RowTakenError,
    SettingsError,
    StaleRegionError,
    TierError,
    UnknownNamespaceError,
    UntrustedError,
    UsageError,
    VersionError,
)
from lmcache_core.plugins.components import API_GENERATION, ComponentSpec, Finding, Kind, PluginInfo
from lmcache_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcache_core.client.asynchronous import AsyncClient
    from lmcache_core.client.client import Client
    from lmcache_core.client.find.group_lookups import CommonHandle, CommonHits, KeyGroup, Need
    from lmcache_core.client.find.lookups import LookupHandle
    from lmcache_core.client.move.pages import PageEntry
    from lmcache_core.client.move.regions import PageGroup, Region
    from lmcache_core.client.promises import Promise
    from lmcache_core.client.results import LookupResult, RetrieveResult, Status, StoreResult
    from lmcache_core.kernel.answers import Reason
    from lmcache_core.pool.layout import Layout
    from lmcache_core.server.server import Server
    from lmcache_core.settings.compose import make_settings
    from lmcache_core.tokens.namespace import Namespace

__version__ = "0.1.0"

if "free-threading" in sys.version:  # our C code relies on the interpreter's lock to guard what threads share
    raise ImportError("lmcache-core needs a Python with its global lock: use python3.13, not python3.13t")

__all__ = [
    "API_GENERATION",
    "AsyncClient",
    "CacheError",
    "Client",
    "CommonHandle",
    "CommonHits",
    "ComponentSpec",
    "DamagedObjectError",
    "DisconnectedError",
    "Finding",
    "ForgottenError",
    "KeyGroup",
    "Kind",
    "Layout",
    "LeaseExpiredError",
    "LimitError",
    "LookupHandle",
    "LookupResult",
    "MismatchedObjectError",
    "Namespace",
    "Need",
    "NotAttachedError",
    "NotEnoughMemoryError",
    "PageEntry",
    "PageGroup",
    "PluginError",
    "PluginInfo",
    "PoolBusyError",
    "PoolError",
    "PoolMismatchError",
    "Promise",
    "ProtocolError",
    "Reason",
    "Region",
    "RetrieveResult",
    "Retry",
    "RowTakenError",
    "Server",
    "SettingsError",
    "StaleRegionError",
    "Status",
    "StoreResult",
    "TierError",
    "UnknownNamespaceError",
    "UntrustedError",
    "UsageError",
    "VersionError",
    "__version__",
    "hookimpl",
    "make_settings",
]

_LAZY = {
    "AsyncClient": "lmcache_core.client.asynchronous",
    "Client": "lmcache_core.client.client",
    "CommonHandle": "lmcache_core.client.find.group_lookups",
    "CommonHits": "lmcache_core.client.find.group_lookups",
    "KeyGroup": "lmcache_core.client.find.group_lookups",
    "Layout": "lmcache_core.pool.layout",
    "LookupHandle": "lmcache_core.client.find.lookups",
    "LookupResult": "lmcache_core.client.results",
    "Namespace": "lmcache_core.tokens.namespace",
    "Need": "lmcache_core.client.find.group_lookups",
    "PageEntry": "lmcache_core.client.move.pages",
    "PageGroup": "lmcache_core.client.move.regions",
    "Promise": "lmcache_core.client.promises",
    "Reason": "lmcache_core.kernel.answers",
    "Region": "lmcache_core.client.move.regions",
    "RetrieveResult": "lmcache_core.client.results",
    "Server": "lmcache_core.server.server",
    "Status": "lmcache_core.client.results",
    "StoreResult": "lmcache_core.client.results",
    "make_settings": "lmcache_core.settings.compose",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
