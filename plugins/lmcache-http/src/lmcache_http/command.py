"""`lmcache-core metrics`: a running server's figures in Prometheus' text format."""

from __future__ import annotations

import argparse

from lmcache_core.cli import connecting
from lmcache_http.metrics import table, text_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    connecting.add_options(parser)
    parser.add_argument("--table", action="store_true", help="print all metrics in Markdown, without asking a server")


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; returns 0. Raises DisconnectedError if no server answers."""
    if arguments.table:
        print(table())
        return 0
    with connecting.connect(arguments, "metrics") as client:
        print(text_of(client.status()), end="")
    return 0
