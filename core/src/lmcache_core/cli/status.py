"""`lmcache-core status`: a running server's account of itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_core.cli import connecting
from lmcache_core.cli.table import print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    connecting.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; 0. Raises DisconnectedError where nobody answers."""
    with connecting.connect(arguments, "status") as client:
        status = client.status()
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        print_table(("what", "value"), list(_lines(status)))
    return 0


def _lines(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A nested answer as dotted names."""
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else None
    )
    if items is None or not value:
        yield name, f"{value:,}" if isinstance(value, int) and "bytes" in name else str(value)
        return
    for key, each in items:
        yield from _lines(each, f"{name}.{key}" if name else str(key))
