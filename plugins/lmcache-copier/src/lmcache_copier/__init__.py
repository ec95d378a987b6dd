"""Transfers that the server drives: a process beside it copies pages out of and into engines. This module only names
things."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lmcache_core.plugins.components import ComponentSpec, Finding, Kind
from lmcache_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcache_copier.choosing import Transfer, register_pages
    from lmcache_copier.jobs import ServerRetrieve, ServerStore
    from lmcache_copier.pages import ServerPages
    from lmcache_core.settings.model import Settings

__all__ = ["ServerPages", "ServerRetrieve", "ServerStore", "Transfer", "register_pages"]

_LAZY = {
    "ServerPages": "pages",
    "ServerRetrieve": "jobs",
    "ServerStore": "jobs",
    "Transfer": "choosing",
    "register_pages": "choosing",
}


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.HELPER,
            "copier",
            factory="lmcache_copier.helper:copier_helper",
            settings="lmcache_copier.settings:CopierSettings",
            summary="copies pages between the pool and the memory of engines, so that they need not",
        ),
        ComponentSpec(
            Kind.OPERATION,
            "copier",
            factory="lmcache_copier.operation:CopierOperation",
            summary="the figures of the copier, for status",
            always=True,
        ),
    ]


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    from lmcache_copier.check import check

    copier = settings.plugin_helpers().get("copier")
    return [] if copier is None else check(copier)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
