"""What this package adds to lmcache-core: the commands `trace` and `simulate`, and the operation `record`. Imports
nothing heavy."""

from __future__ import annotations

from argparse import _SubParsersAction
from collections.abc import Sequence
from typing import Any

from lmcache_core import ComponentSpec, Kind, PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The hook API that this was written for."""
    return PluginInfo(api=1, summary="recordings, replays and simulated policies")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    """What a server records its requests with."""
    return [
        ComponentSpec(
            Kind.OPERATION,
            "record",
            "lmcache_lab.record:RecordOperation",
            settings="lmcache_lab.recorder:RecordSettings",
            summary="records requests, without anything that reveals a prompt",
            always=True,
        )
    ]


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    """Add the commands; each is imported only when chosen."""
    from lmcache_core.cli.lazy import add_command

    add_command(subparsers, "trace", "record the requests to a server, and replay them", "lmcache_lab.trace")
    add_command(subparsers, "simulate", "replay request traces through eviction policies", "lmcache_lab.simulate")
