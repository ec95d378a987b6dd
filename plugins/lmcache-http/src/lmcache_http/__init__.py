"""The HTTP interface of lmcache-core, in a process beside the server, and its metrics, also as a command. This module
only names things."""

from __future__ import annotations

from argparse import _SubParsersAction
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core.plugins.components import ComponentSpec, Finding, Kind
from lmcache_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.HELPER,
            "http",
            factory="lmcache_http.helper:http_helper",
            settings="lmcache_http.settings:HttpSettings",
            summary="health, status, metrics and operations over HTTP",
        )
    ]


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    from lmcache_http.check import check

    return check(settings.plugin_helpers()["http"])


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    from lmcache_core.cli.lazy import add_command

    summary = "print a running server's figures in Prometheus' text format"
    add_command(subparsers, "metrics", summary, "lmcache_http.command")
