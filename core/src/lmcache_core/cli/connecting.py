"""Commands that ask a running server: how it is found, over which carrier, with which keys."""

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
    """Where the server is. What is not given is what `serve` would take: from LMCACHE_CORE_NAME and
    LMCACHE_CORE_RUNTIME_DIR, from the settings file, or by default."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a settings file (default: lmcache.toml here, if any)"
    )
    parser.add_argument("--name", help="the server's name (default: as serve takes it)")
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the servers keep their sockets")
    add_server_uid_option(parser)
    parser.add_argument("--address", help="its ZMQ address instead, as ipc:///path or tcp://host:port")
    parser.add_argument("--server-public-key", type=Path, metavar="FILE", help="CURVE key of the server, for tcp")
    parser.add_argument("--client-secret-key", type=Path, metavar="FILE", help="our CURVE keys, for tcp")


def add_server_uid_option(parser: argparse.ArgumentParser) -> None:
    """Whom we may be connected to, besides ourselves and root."""
    parser.add_argument(
        "--server-uid", type=int, metavar="UID", help="who the server runs as, where that is neither we nor root"
    )


def connect(arguments: argparse.Namespace, command: str, *, maps_pool: bool = False) -> Client:
    """A client, of a command that moves no bytes unless it `maps_pool`. Raises `UsageError` for half a pair of keys."""
    from lmcache_core.client.client import Client

    # Commands end with one line that says the same.
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
    """A setting that every server has, from the first source that says it."""
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
