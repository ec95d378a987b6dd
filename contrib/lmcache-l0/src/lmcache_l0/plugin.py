"""What the package adds to lmcache-core: the commands `l0 stats` and `l0 top`, and the bench `l0`."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from lmcache_core import PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The generation of hooks that this was written for."""
    return PluginInfo(api=1, summary="a shared-memory table of small hot values (L0)")


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any], benches: _SubParsersAction[Any]) -> None:
    """Add `l0` and `bench l0`; nothing of them is imported before one is chosen."""
    from lmcache_core.cli.bench import add_bench
    from lmcache_l0.cli import SUMMARY, add_commands

    add_commands(subparsers)
    add_bench(benches, "l0", SUMMARY, "lmcache_l0.cli.bench")
