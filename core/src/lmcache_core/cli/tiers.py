"""`lmcache-core tiers`: list and change the tiers of a running server."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from lmcache_core.cli import connecting
from lmcache_core.cli.lazy import CommandParser
from lmcache_core.cli.table import print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options, and one subcommand for each action."""
    shared = CommandParser(add_help=False)
    connecting.add_options(shared)
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", dest="action", required=True, parser_class=CommandParser
    )
    listed = actions.add_parser("list", parents=[shared], help="list the tiers in order, with what they hold")
    listed.add_argument("--json", action="store_true", help="print a JSON list: status and settings of each tier")
    for action, summary in (
        ("add", "add a tier as the last in the order"),
        ("reconfigure", "change settings of a tier; the others stay as they are. A drained tier accepts stores again"),
    ):
        one = actions.add_parser(action, parents=[shared], help=summary, description=f"{action}: {summary}")
        one.add_argument("tier", metavar="TIER")
        one.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SETTING=VALUE",
            help="a setting, without l2.TIER; repeatable. Keep secrets in the environment or in a file",
        )
    for action, summary in (
        ("drain", "stop storing to a tier; its objects are still served"),
        ("remove", "remove a tier at once; its objects stay on the medium"),
    ):
        one = actions.add_parser(action, parents=[shared], help=summary, description=f"{action}: {summary}")
        one.add_argument("tier", metavar="TIER")


def run(arguments: argparse.Namespace) -> int:
    """Ask the server; returns 0. Raises the error that it answers, and DisconnectedError if no server answers."""
    with connecting.connect(arguments, "tiers") as client:
        if arguments.action == "list":
            _list(client.tiers_list(), as_json=arguments.json)
        elif arguments.action == "drain":
            client.tiers_drain(arguments.tier)
        elif arguments.action == "remove":
            client.tiers_remove(arguments.tier)
        else:
            values, texts = _settings(arguments)
            change = client.tiers_add if arguments.action == "add" else client.tiers_reconfigure
            change(arguments.tier, values, texts)
    return 0


def _settings(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """From the table [l2.TIER] of the given file, the environment and `--set`; later ones override earlier ones."""
    from lmcache_core.errors import SettingsError, UsageError
    from lmcache_core.settings.sources import read_environment, read_file, tree_of

    here = ("l2", arguments.tier)
    values: Mapping[str, Any] = {}
    if arguments.config is not None:
        leaves = {path[2:]: leaf.value for path, leaf in read_file(arguments.config).leaves.items() if path[:2] == here}
        if not leaves and arguments.action == "add":
            raise SettingsError(f"{arguments.config} has no table [l2.{arguments.tier}]")
        values = tree_of(leaves)
    texts = {
        ".".join(path[2:]): leaf.value
        for path, leaf in read_environment(os.environ).leaves.items()
        if path[:2] == here and len(path) > 2
    }
    for pair in arguments.set:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {name or pair!r} has no value: write SETTING=VALUE")
        texts[name.removeprefix(f"l2.{arguments.tier}.")] = value
    return values, texts


def _list(tiers: list[dict[str, Any]], *, as_json: bool) -> None:
    from lmcache_core.settings.sizes import size_text

    if as_json:
        print(json.dumps(tiers, indent=2))
        return
    if not tiers:
        print("the server has no tiers: add one with `lmcache-core tiers add`")
        return
    rows = []
    for tier in tiers:
        capacity = tier["capacity_bytes"]
        rows.append(
            (
                tier["name"],
                tier["settings"]["type"],
                "draining" if tier["draining"] else "in use",
                tier["reads"]["breaker"],
                tier["writes"]["breaker"],
                f"{tier['objects']:,}",
                f"{tier['bytes_used']:,}",
                "" if capacity is None else size_text(capacity),
            )
        )
    columns = ("tier", "type", "state", "reads", "writes", "objects", "bytes", "capacity")
    print_table(columns, rows, right=(5, 6, 7))
    errors = [(tier["name"], tier["last_error"]) for tier in tiers if tier["last_error"]]
    if errors:
        print()
        print_table(("tier", "last error"), errors)
