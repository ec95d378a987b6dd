"""What this package adds to lmcache-core: the commands `demo` and `quality`. Imports nothing heavy."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from lmcache_core import hookimpl


@hookimpl
def lmcache_add_commands(subparsers: _SubParsersAction[Any]) -> None:
    from lmcache_transformers.demo import command as demo
    from lmcache_transformers.quality import command as quality

    demo.add_command(subparsers)
    quality.add_command(subparsers)
