"""`lmcache-core status`: a running server's account of itself."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmcache_core.cli.table import print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    name = os.environ.get("LMCACHE_CORE_NAME", "default")
    parser.add_argument("--name", default=name, help="the server's name (default: %(default)s)")
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the servers keep their sockets")
    parser.add_argument("--address", help="its ZMQ address instead, as ipc:///path or tcp://host:port")
    parser.add_argument("--server-public-key", type=Path, metavar="FILE", help="CURVE key of the server, for tcp")
    parser.add_argument("--client-secret-key", type=Path, metavar="FILE", help="our CURVE keys, for tcp")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; 0. Raises DisconnectedError where nobody answers."""
    from lmcache_core.client.client import Client

    client = Client.connect(
        arguments.name,
        runtime_dir=arguments.runtime_dir,
        address=arguments.address,
        curve=_curve(arguments),
        client_name="lmcache-core status",
        maps_pool=False,
    )
    try:
        status = client.status()
    finally:
        client.close()
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        print_table(("what", "value"), list(_lines(status)))
    return 0


def _curve(arguments: argparse.Namespace) -> Any:
    if arguments.server_public_key is None and arguments.client_secret_key is None:
        return None
    from lmcache_core.client.address import CurveKeys
    from lmcache_core.errors import UsageError

    if arguments.server_public_key is None or arguments.client_secret_key is None:
        raise UsageError("CURVE needs both: --server-public-key and --client-secret-key")
    return CurveKeys.from_files(arguments.server_public_key, arguments.client_secret_key)


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
