"""`lmcache-core quota`: show and change what each tenant may use of a running server."""

from __future__ import annotations

import argparse
import json
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
    summary = "show the tenants, with their reserve, limit and usage"
    got = actions.add_parser("get", parents=[shared], help=summary, description=f"get: {summary}")
    got.add_argument("tenant", metavar="TENANT", nargs="?", help="only this tenant")
    got.add_argument("--json", action="store_true", help="print a JSON list")
    summary = "set or change a tenant's quota; it applies at once and survives restarts"
    one = actions.add_parser("set", parents=[shared], help=summary, description=f"set: {summary}")
    one.usage = f"{one.prog} [options] TENANT --namespace ID [--store STORE] [--reserved SIZE] [--limit SIZE]"
    one.example = f"{one.prog} t1 --namespace 9a7c5d7ed25c9bb6 --limit 1GiB"
    one.add_argument("tenant", metavar="TENANT", help="a name of your choice")
    one.add_argument(
        "--namespace",
        action="append",
        metavar="ID",
        help="one of its namespaces, as hexadecimal text; repeatable. A new tenant needs one; an old list is replaced",
    )
    one.add_argument(
        "--store", default="l1", metavar="STORE", help="l1 for the pool, or the name of a tier (default: l1)"
    )
    one.add_argument(
        "--reserved", metavar="SIZE", help="bytes that no other tenant can take, for example 10GiB, or none"
    )
    one.add_argument(
        "--limit", metavar="SIZE", help="bytes that the tenant may use at most, for example 20GiB, or none"
    )
    summary = "remove a tenant's quotas; its objects stay"
    gone = actions.add_parser("delete", parents=[shared], help=summary, description=f"delete: {summary}")
    gone.add_argument("tenant", metavar="TENANT")


def run(arguments: argparse.Namespace) -> int:
    """Ask the server, and print what has changed; returns 0. Raises the error that it answers, and DisconnectedError if
    no server answers."""
    with connecting.connect(arguments, "quota") as client:
        if arguments.action == "get":
            _print(client.quotas(), arguments.tenant, as_json=arguments.json)
        elif arguments.action == "delete":
            client.quota_remove(arguments.tenant)
            print(f"tenant {arguments.tenant!r} has no quota any more; its objects stay")
        else:
            stores = {}
            if arguments.reserved is not None or arguments.limit is not None:
                figures = _figures_now(client.quotas(), arguments.tenant, arguments.store)
                for name, text in (("reserved_bytes", arguments.reserved), ("limit_bytes", arguments.limit)):
                    if text is not None:
                        figures[name] = _size(text)
                stores[arguments.store] = figures
            ids = None if arguments.namespace is None else [_namespace(text) for text in arguments.namespace]
            client.quota_set(arguments.tenant, stores, ids)
            print(_sentence(client.quotas(), arguments.tenant))
    return 0


def _figures_now(tenants: list[dict[str, Any]], tenant: str, store: str) -> dict[str, int | None]:
    """A figure that is not given stays as it is."""
    for row in tenants:
        if row["tenant"] == tenant and store in row["stores"]:
            return {name: row["stores"][store][name] for name in ("reserved_bytes", "limit_bytes")}
    return {}


def _sentence(tenants: list[dict[str, Any]], tenant: str) -> str:
    """The quota that a tenant has now, store by store."""
    [now] = [row for row in tenants if row["tenant"] == tenant]
    parts = [f"namespaces {', '.join(now['namespaces'])}"]
    for store, figures in now["stores"].items():
        reserved, limit = figures["reserved_bytes"], figures["limit_bytes"]
        if reserved is not None or limit is not None:
            parts.append(f"{store}: {_text(reserved) or 'nothing'} reserved, limit {_text(limit) or 'none'}")
    return f"tenant {tenant!r}, from now on: {'; '.join(parts)}"


def _size(text: str) -> int | None:
    from lmcache_core.errors import UsageError
    from lmcache_core.settings.sizes import parse_size

    if text == "none":
        return None
    try:
        return int(parse_size(text))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _namespace(text: str) -> int:
    from lmcache_core.errors import UsageError

    try:
        return int(text, 16)
    except ValueError as error:
        raise UsageError(f"{text[:80]!r} is not a namespace id: give its 16 hexadecimal digits") from error


def _print(tenants: list[dict[str, Any]], tenant: str | None, *, as_json: bool) -> None:
    from lmcache_core.errors import UsageError

    if tenant is not None:
        tenants = [row for row in tenants if row["tenant"] == tenant]
        if not tenants:
            raise UsageError(f"tenant {tenant!r} has no quota", cure="`lmcache-core quota get` lists those with one")
    if as_json:
        print(json.dumps(tenants, indent=2))
        return
    if not tenants:
        print("no tenant has a quota: set one with `lmcache-core quota set`")
        return
    figures = ("used_bytes", "reserved_bytes", "limit_bytes")
    rows = [
        (row["tenant"] or "(others)", store, *(_text(quota[name]) for name in figures))
        for row in tenants
        for store, quota in row["stores"].items()
    ]
    print_table(("tenant", "store", "used", "reserved", "limit"), rows, right=(2, 3, 4))


def _text(nbytes: int | None) -> str:
    from lmcache_core.settings.sizes import size_text

    return "" if nbytes is None else size_text(nbytes)
