"""Shared by commands that ask a running server: how to find it, over which carrier, with which keys."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.cli.compose import add_file_options, sources_of
from lmcache_core.limits import CALL_TIMEOUT_S
from lmcache_core.settings.files import ENV_FILE_VARIABLE, PREFIX, find_file

if TYPE_CHECKING:
    from lmcache_core.client.client import Client
    from lmcache_core.client.link.address import CurveKeys


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is. Defaults are those of `serve`: LMCACHE_CORE_NAME and LMCACHE_CORE_RUNTIME_DIR, the env file,
    the settings file, or the built-in default."""
    add_file_options(parser)
    parser.add_argument("--name", help="the server's name (default: as for serve)")
    parser.add_argument("--runtime-dir", metavar="DIR", help="where the servers keep their sockets")
    add_server_uid_option(parser)
    parser.add_argument("--address", help="the server's ZMQ address instead, ipc:///path or tcp://host:port")
    parser.add_argument("--server-public-key", type=Path, metavar="FILE", help="CURVE key of the server, for tcp")
    parser.add_argument("--client-secret-key", type=Path, metavar="FILE", help="our CURVE keys, for tcp")


def add_server_uid_option(parser: argparse.ArgumentParser) -> None:
    """As whom the server may run, besides us and root."""
    parser.add_argument(
        "--server-uid", type=int, metavar="UID", help="the uid the server runs as, if it is neither yours nor root"
    )


def connect(
    arguments: argparse.Namespace, command: str, *, maps_pool: bool = False, call_timeout_s: float = CALL_TIMEOUT_S
) -> Client:
    """A client for a command. `maps_pool`: the command moves bytes. Raises `UsageError` if only one CURVE key is
    given."""
    from lmcache_core.client.client import Client

    # The command ends with one line that says the same.
    logging.getLogger("lmcache_core.client").addHandler(logging.NullHandler())
    name, runtime_dir = _settings(arguments, "name", "runtime_dir")
    return Client.connect(
        name or "",
        runtime_dir=runtime_dir,
        address=arguments.address,
        curve=_curve(arguments),
        client_name=f"lmcache-core {command}",
        maps_pool=maps_pool,
        call_timeout_s=call_timeout_s,
        server_uid=arguments.server_uid,
    )


def _settings(arguments: argparse.Namespace, *names: str) -> list[str | None]:
    """Settings that every server has, as `serve` finds them; secrets directories apart, where no name belongs. Files
    are read only if there are any: a probe runs such a command every few seconds."""
    named = arguments.config or arguments.env_file
    found = {name: getattr(arguments, name) or os.environ.get(PREFIX + name.upper(), "").strip() for name in names}
    if named or (not all(found.values()) and (find_file(None) or os.environ.get(ENV_FILE_VARIABLE))):
        for source in sources_of(arguments):
            for name in names:
                leaf = source.leaves.get((name,))
                found[name] = found[name] or ("" if leaf is None else str(leaf.value).strip())
    return [value or None for value in found.values()]


def _curve(arguments: argparse.Namespace) -> CurveKeys | None:
    if arguments.server_public_key is None and arguments.client_secret_key is None:
        return None
    from lmcache_core.client.link.address import CurveKeys
    from lmcache_core.errors import UsageError

    if arguments.server_public_key is None or arguments.client_secret_key is None:
        raise UsageError("CURVE needs both: --server-public-key and --client-secret-key")
    return CurveKeys.from_files(arguments.server_public_key, arguments.client_secret_key)
