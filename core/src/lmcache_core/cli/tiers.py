"""`lmcache-core tiers`: list and change the tiers of a running server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcache_core.cli import connecting
from lmcache_core.cli.lazy import CommandParser
from lmcache_core.cli.table import print_table
from lmcache_core.errors import SettingsError

if TYPE_CHECKING:
    from lmcache_core.client.client import Client


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
    one.add_argument("-y", "--yes", action="store_true", help="do not ask; needed where nobody can be asked")


def run(arguments: argparse.Namespace) -> int:
    """Ask the server, and print what has changed; returns 0, or 1 if somebody was asked and said no. Raises the error
    that the server answers, and DisconnectedError if none answers."""
    name = arguments.tier if arguments.action != "list" else ""
    with connecting.connect(arguments, "tiers") as client:
        if arguments.action == "list":
            _list(client.tiers_list(), as_json=arguments.json)
        elif arguments.action == "drain":
            client.tiers_drain(name)
            print(f"tier {name!r} gets no more stores; {_content(client, name)}")
            print(f"`lmcache-core tiers reconfigure {name}` makes it accept stores again")
        elif arguments.action == "remove":
            content = _content(client, name)
            if content and not arguments.yes and not _agreed(name, content):
                print("nothing has changed")
                return 1
            client.tiers_remove(name)
            print(f"tier {name!r} is removed; what it holds stays on its medium")
        else:
            values, texts = _settings(arguments)
            change = client.tiers_add if arguments.action == "add" else client.tiers_reconfigure
            try:
                change(name, values, texts)
            except SettingsError as error:  # the server names a setting as its own flags do
                raise SettingsError(str(error).replace(f"--l2.{name}.", "--set ")) from error
            order = ", ".join(tier["name"] for tier in client.tiers_list())
            done = "is added, as the last" if arguments.action == "add" else "has its new settings, and accepts stores"
            print(f"tier {name!r} {done}; tiers in order: {order}")
    return 0


def _content(client: Client, name: str) -> str:
    """What a tier serves, and what is not on it yet; empty if there is no such tier."""
    from lmcache_core.settings.sizes import size_text

    tiers = client.status()["tiers"]
    for tier in [] if tiers is None else tiers["tiers"]:
        if tier["name"] == name:
            waiting = tiers["stores"]["dirty"].get(name, 0)
            yet = f"; {waiting:,} objects still wait to be stored there" if waiting else ""
            return f"it serves {tier['objects']:,} objects ({size_text(tier['bytes_used'])}){yet}"
    return ""


def _agreed(name: str, content: str) -> bool:
    """Whether a person says so. Raises `UsageError` if there is none to ask."""
    from lmcache_core.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError(f"nobody can be asked whether tier {name!r} may be removed", cure="give --yes")
    print(f"tier {name!r}: {content}. Once it is removed, that stays on its medium, but is not found any more.")
    try:
        return input("Remove it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _settings(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """From the table [l2.TIER] of the given file, secrets, the env file, the environment and `--set`; later ones
    override earlier ones."""
    from lmcache_core.errors import UsageError
    from lmcache_core.settings.compose import known_sources
    from lmcache_core.settings.sources import dotted, read_sources
    from lmcache_core.settings.tier import tier_table

    values: Mapping[str, Any] = {}
    if arguments.config is not None:
        values = tier_table(arguments.config, arguments.tier)
        if not values and arguments.action == "add":
            raise SettingsError(f"{arguments.config} has no table [l2.{arguments.tier}]")
    sources, _ = known_sources(arguments.registry, read_sources(arguments.config, arguments.env_file))
    texts = {
        dotted(path[2:]): leaf.value
        for source in reversed(sources)
        for path, leaf in source.leaves.items()
        if path[:2] == ("l2", arguments.tier) and len(path) > 2 and leaf.text
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
                "draining" if tier["draining"] else "in use" if tier["stores"] else "loads only",
                tier["reads"]["breaker"],
                tier["writes"]["breaker"],
                f"{tier['objects']:,}",
                f"{tier['bytes_used']:,}",
                "" if capacity is None else size_text(capacity),
            )
        )
    columns = ("tier", "type", "state", "read breaker", "write breaker", "objects", "bytes", "capacity")
    print_table(columns, rows, right=(5, 6, 7))
    errors = [(tier["name"], tier["last_error"]) for tier in tiers if tier["last_error"]]
    if errors:
        print()
        print_table(("tier", "last error"), errors)
