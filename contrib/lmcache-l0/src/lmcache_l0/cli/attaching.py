"""How the commands attach to a table, and report errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import CacheError, UsageError
from lmcache_l0.cache import SharedCache

if TYPE_CHECKING:
    from lmcache_core import Client

_SERVER = "server:"


def says_what_failed(command: Callable[[Any], int]) -> Callable[[Any], int]:
    """A command that prints errors in one line and exits with code 1."""

    @wraps(command)
    def run(options: Any) -> int:
        try:
            return command(options)
        except (CacheError, OSError) as error:
            print(f"lmcache-core l0: {error}", file=sys.stderr)
            return 1

    return run


def attach(path: str, *, read_only: bool = True) -> SharedCache:
    """An existing table; `server:NAME` is that of a server."""
    server = server_of(path)
    if server is not None:
        with connect(server) as client:
            client.noop()  # or the client does not yet know its companions
            offer = (client.companions() or {}).get("l0")
        if offer is None:
            raise UsageError(f"the server {server!r} keeps no table: its settings have no [l0]")
        path = offer["path"]
    return SharedCache(path, create=False, read_only=read_only)


def server_of(path: str) -> str | None:
    """The name of the server; None: the argument is a path."""
    return path.removeprefix(_SERVER) if path.startswith(_SERVER) else None


def connect(server: str) -> Client:
    """A client of that server, without the pool."""
    from lmcache_core import Client

    logging.getLogger("lmcache_core.client").addHandler(logging.NullHandler())  # the command says it in one line
    return Client.connect(server, client_name="lmcache-core l0", maps_pool=False)


def warn_if_off(cache: SharedCache) -> None:
    """Warn why nothing is found, or stored."""
    if not cache.enabled:
        print(
            f"warning: {cache.path} is switched off, so reads miss and writes store nothing: "
            f"lmcache-core l0 set {cache.path} enabled",
            file=sys.stderr,
        )
