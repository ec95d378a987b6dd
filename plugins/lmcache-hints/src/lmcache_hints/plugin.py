"""What this package adds to lmcache-core: the operation `hints`, and the command `hint`. Imports nothing heavy."""

from __future__ import annotations

from argparse import _SubParsersAction
from collections.abc import Sequence
from typing import Any

from lmcache_core import ComponentSpec, Kind, PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The hook API that this was written for."""
    return PluginInfo(api=1, summary="executes the KV hints of routers and engines")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    """The executor, which every server has that has this package."""
    return [
        ComponentSpec(
            Kind.OPERATION,
            "hints",
            "lmcache_hints.operation:HintsOperation",
            settings="lmcache_hints.settings:HintsSettings",
            summary="fetches, prefetches, pins, retains, demotes, shares and releases what hints name",
            always=True,
        )
    ]


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    """Add the command; it is imported only when chosen."""
    from lmcache_core.cli.lazy import add_command

    add_command(subparsers, "hint", "send a KV hint to a running server", "lmcache_hints.command")
