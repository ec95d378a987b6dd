"""`lmcache-core metrics`: a running server's figures in Prometheus' text format."""

from __future__ import annotations

import argparse

from lmcache_core.cli import connecting


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    connecting.add_options(parser)
    parser.add_argument("--table", action="store_true", help="print all metrics in Markdown, without asking a server")


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; returns 0. Raises DisconnectedError if no server answers, UsageError without prometheus-client."""
    if arguments.table:
        from lmcache_core.observe.metrics import table

        print(table())
        return 0
    from lmcache_core.observe.exposition import text_of

    with connecting.connect(arguments, "metrics") as client:
        print(text_of(client.status()), end="")
    return 0
