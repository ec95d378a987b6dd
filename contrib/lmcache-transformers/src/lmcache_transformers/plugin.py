"""What this package adds to lmcache-core: the command `demo`. Imports nothing heavy."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from lmcache_core import hookimpl


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    from lmcache_transformers.demo.command import add_command

    add_command(subparsers)
