"""The library in the worker, or in a scheduler that only looks up.

`Client` and what most programs need with it are imported from `lmcache_core`, everything else of it from here. Nothing
is loaded before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.client.engine_blocks import EngineBlocks
    from lmcache_core.client.link.address import CurveKeys
    from lmcache_core.client.link.event_stream import connect_events
    from lmcache_core.client.move.copying import CopyThreads, tensor_of, threads_to_copy
    from lmcache_core.client.move.leases import ReadLease
    from lmcache_core.client.move.page_jobs import PagesCall, PagesResult, RetrieveJob, StoreJob
    from lmcache_core.client.move.pages import Pages, page_engine, pages_by
    from lmcache_core.client.move.regions import RegionTables
    from lmcache_core.client.why.explaining import counted_reasons

__all__ = [
    "CopyThreads",
    "CurveKeys",
    "EngineBlocks",
    "Pages",
    "PagesCall",
    "PagesResult",
    "ReadLease",
    "RegionTables",
    "RetrieveJob",
    "StoreJob",
    "connect_events",
    "counted_reasons",
    "page_engine",
    "pages_by",
    "tensor_of",
    "threads_to_copy",
]

_LAZY = {
    "CopyThreads": "move.copying",
    "CurveKeys": "link.address",
    "EngineBlocks": "engine_blocks",
    "Pages": "move.pages",
    "PagesCall": "move.page_jobs",
    "PagesResult": "move.page_jobs",
    "ReadLease": "move.leases",
    "RegionTables": "move.regions",
    "RetrieveJob": "move.page_jobs",
    "StoreJob": "move.page_jobs",
    "connect_events": "link.event_stream",
    "counted_reasons": "why.explaining",
    "page_engine": "move.pages",
    "pages_by": "move.pages",
    "tensor_of": "move.copying",
    "threads_to_copy": "move.copying",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
