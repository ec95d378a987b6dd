"""What this package adds to lmcache-core: its commands. Imports nothing heavy."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from lmcache_core import PluginInfo, hookimpl

# name → summary, and whether settings may follow as flags; each is the module of its name
COMMANDS: dict[str, tuple[str, bool]] = {
    "top": ("watch a running server on a terminal", False),
    "size": ("estimate how large a pool and a tier must be for a model and its traffic", False),
    "warm": ("load objects of a tier into the pool, ahead of requests", True),
    "verify": ("read every object of a tier and check it", True),
    "copy": ("copy the objects of one tier to another", True),
    "completion": ("print the script for shell completion, or the manual page", False),
}


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The hook API that this was written for."""
    return PluginInfo(api=1, summary="commands for those who run servers")


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    """Add the commands; each is imported only when chosen."""
    from lmcache_core.cli.lazy import add_command

    for name, (summary, takes_settings) in COMMANDS.items():
        add_command(subparsers, name, summary, f"lmcache_tools.{name}", takes_settings=takes_settings)
