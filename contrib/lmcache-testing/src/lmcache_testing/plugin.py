"""What this package adds to lmcache-core: the commands `plugins new` and `plugins certify`. Each is imported only when
chosen."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from lmcache_core import PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The hook API that this was written for."""
    return PluginInfo(api=1, summary="the conformance kit of lmcache-core")


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    """Add the commands."""
    from lmcache_core.cli.lazy import add_command

    add_command(
        subparsers, "plugins new", "write a package for one component, with tests", "lmcache_testing.new_plugin"
    )
    summary = "run the conformance kit on a tier, and print its score card"
    add_command(subparsers, "plugins certify", summary, "lmcache_testing.certify")
