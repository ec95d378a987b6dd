"""What the package adds to lmcache-core: the commands `l0 …`, the bench `l0`, and the companion `l0`, which keeps a
server's own table."""

from __future__ import annotations

from argparse import _SubParsersAction
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core import ComponentSpec, Finding, Kind, PluginInfo, hookimpl

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The generation of hooks that this was written for."""
    return PluginInfo(api=1, summary="a shared-memory table of small hot values (L0)")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    """A server's own table."""
    return [
        ComponentSpec(
            Kind.COMPANION,
            "l0",
            factory="lmcache_l0.engine:L0Engine",
            settings="lmcache_l0.settings:L0Settings",
            summary="a shared table above L1, into which the server promotes hot keys",
        )
    ]


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    """Whether there is space for the server's table."""
    from lmcache_l0.keeping import room_for

    return [room_for(settings.companions()["l0"], settings.name)]


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any], benches: _SubParsersAction[Any]) -> None:
    """Add `l0` and `bench l0`; nothing of them is imported before one is chosen."""
    from lmcache_core.cli.bench import add_bench
    from lmcache_l0.cli import SUMMARY, add_commands

    add_commands(subparsers)
    add_bench(benches, "l0", SUMMARY, "lmcache_l0.cli.bench")
