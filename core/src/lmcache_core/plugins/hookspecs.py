"""Every hook of lmcache-core. All are called at start-up or by commands, none on the data path.

Each says when it is called, how results combine, what None means, and since which version it exists. An implementation
may omit arguments that it does not need; it must not give them defaults (pluggy passes nothing to an argument with a
default).
"""

from __future__ import annotations

from argparse import _SubParsersAction
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from lmcache_core.plugins.components import ComponentSpec, Finding, PluginInfo

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

__all__ = [
    "hookimpl",
    "lmcache_add_commands",
    "lmcache_check",
    "lmcache_components",
    "lmcache_plugin_info",
    "lmcache_started",
    "lmcache_stopping",
    "lmcache_trace_context",
]

PROJECT = "lmcache_core"  # pluggy's project name and the entry-point group

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def lmcache_plugin_info() -> PluginInfo | None:
    """Say which API generation the plugin was written for.

    Called once, when the plugin is loaded, before its other hooks. None, or no implementation: the current generation.
    A plugin of a generation that this version does not support is refused. Since 0.1.
    """


@hookspec
def lmcache_components() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]  # a specification
    """Offer components.

    Called once, when the plugin is loaded; it must import nothing heavy. Results of all plugins are joined; if two
    distributions claim the same (kind, name), both are refused. None: no components. Since 0.1.
    """


@hookspec
def lmcache_check(settings: Settings) -> Sequence[Finding]:  # type: ignore[empty-body]  # a specification
    """Check the environment for `lmcache-core check`: is the port free, can the keys be read? Tiers need none: their
    adapters are asked (`L2Adapter.check`).

    Called only by that command, and only for plugins whose components the settings use, or for the one named in `check
    --engine NAME`, which has a minute. Results are joined. None: nothing to report. May do I/O; must end within ten
    seconds. Since 0.1.
    """


@hookspec
def lmcache_add_commands(subparsers: _SubParsersAction[Any], benches: _SubParsersAction[Any]) -> None:
    """Add subcommands to `lmcache-core` (`subparsers`) and to `lmcache-core bench` (`benches`):
    `parser = subparsers.add_parser(…)`, then `parser.set_defaults(run=function)`, where
    `function(arguments) -> int` gives the exit status. `add_command` of `lmcache_core.cli.lazy` does both, and also
    adds below `lmcache-core plugins`: `add_command(subparsers, "plugins certify", …)`.

    Called when a command line is parsed; it must import nothing heavy (import inside the function). A name that is
    already in use is refused, and the plugin is recorded as broken. Since 0.1.
    """


@hookspec
def lmcache_started(settings: Settings, address: str) -> None:
    """The server answers at `address` from now on.

    Called once, on the server's start-up path, before the first request. An exception is recorded and logged, and the
    server continues. Since 0.1.
    """


@hookspec
def lmcache_stopping() -> None:
    """The server has begun to drain.

    Called once. An exception is recorded and logged, and the drain continues. Since 0.1.
    """


@hookspec
def lmcache_trace_context() -> Callable[[], str] | None:
    """Say how to find the trace that is current in a thread: a function that returns it as the text of W3C Trace
    Context, or "" if there is none.

    Called once, when a process connects its first client with `trace=True`. The function is called for each lookup and
    store that such a client sends, in the caller's thread: it must be quick, and must not raise. The first plugin that
    has one is used. None: this one has none. Since 0.1.
    """
