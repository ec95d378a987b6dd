"""Shared by commands that ask a running server: how to find it, over which carrier, with which keys."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.settings.sources import Source, find_file, read_environment, read_file

if TYPE_CHECKING:
    from lmcache_core.client.address import CurveKeys
    from lmcache_core.client.client import Client


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is. Defaults are those of `serve`: LMCACHE_CORE_NAME and LMCACHE_CORE_RUNTIME_DIR, the settings
    file, or the built-in default."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a settings file (default: lmcache.toml here, if any)"
    )
    parser.add_argument("--name", help="the server's name (default: as for serve)")
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the servers keep their sockets")
    add_server_uid_option(parser)
    parser.add_argument("--address", help="the server's ZMQ address instead, ipc:///path or tcp://host:port")
    parser.add_argument("--server-public-key", type=Path, metavar="FILE", help="CURVE key of the server, for tcp")
    parser.add_argument("--client-secret-key", type=Path, metavar="FILE", help="our CURVE keys, for tcp")


def add_server_uid_option(parser: argparse.ArgumentParser) -> None:
    """As whom the server may run, besides us and root."""
    parser.add_argument(
        "--server-uid", type=int, metavar="UID", help="the uid the server runs as, if it is neither yours nor root"
    )


def connect(arguments: argparse.Namespace, command: str, *, maps_pool: bool = False) -> Client:
    """A client for a command. `maps_pool`: the command moves bytes. Raises `UsageError` if only one CURVE key is
    given."""
    from lmcache_core.client.client import Client

    # The command ends with one line that says the same.
    logging.getLogger("lmcache_core.client").addHandler(logging.NullHandler())
    sources = [read_environment(os.environ), read_file(find_file(arguments.config))]
    name = arguments.name or _setting(sources, "name") or "default"
    runtime_dir = arguments.runtime_dir or _setting(sources, "runtime_dir")
    return Client.connect(
        name,
        runtime_dir=None if runtime_dir is None else Path(runtime_dir),
        address=arguments.address,
        curve=_curve(arguments),
        client_name=f"lmcache-core {command}",
        maps_pool=maps_pool,
        server_uid=arguments.server_uid,
    )


def _setting(sources: Sequence[Source], name: str) -> str | None:
    """A setting that every server has, from the first source that sets it."""
    for source in sources:
        leaf = source.leaves.get((name,))
        if leaf is not None:
            return str(leaf.value)
    return None


def _curve(arguments: argparse.Namespace) -> CurveKeys | None:
    if arguments.server_public_key is None and arguments.client_secret_key is None:
        return None
    from lmcache_core.client.address import CurveKeys
    from lmcache_core.errors import UsageError

    if arguments.server_public_key is None or arguments.client_secret_key is None:
        raise UsageError("CURVE needs both: --server-public-key and --client-secret-key")
    return CurveKeys.from_files(arguments.server_public_key, arguments.client_secret_key)
