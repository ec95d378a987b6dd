"""KV of text that is not a prefix: chunks found by their content, keys moved to other positions, prompts planned."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_blend.chunks import Chunks, Found, Match, Missing
    from lmcache_blend.cutting import Lengths, Span, cut
    from lmcache_blend.planning import Plan, Planner
    from lmcache_blend.rope import Rope
    from lmcache_blend.space import ChunkSpace

__all__ = ["ChunkSpace", "Chunks", "Found", "Lengths", "Match", "Missing", "Plan", "Planner", "Rope", "Span", "cut"]

_LAZY = {
    "ChunkSpace": "space",
    "Chunks": "chunks",
    "Found": "chunks",
    "Lengths": "cutting",
    "Match": "chunks",
    "Missing": "chunks",
    "Plan": "planning",
    "Planner": "planning",
    "Rope": "rope",
    "Span": "cutting",
    "cut": "cutting",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
