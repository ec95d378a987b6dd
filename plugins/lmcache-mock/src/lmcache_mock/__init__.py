"""The mock tier of lmcache-core, for rehearsing backend failures. This module only names things."""

from __future__ import annotations

from argparse import _SubParsersAction
from collections.abc import Sequence
from typing import Any

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "mock",
            factory="lmcache_mock.adapter:MockAdapter",
            settings="lmcache_mock.settings:MockSettings",
            summary="memory that is slow, full, gone or corrupt on demand",
        )
    ]


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    from lmcache_core.cli.lazy import add_command

    add_command(subparsers, "mock", "change the faults of a mock tier while it runs", "lmcache_mock.command")
