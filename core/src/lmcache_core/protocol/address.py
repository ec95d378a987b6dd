"""How to find a server: its runtime directory on the node, or its ZMQ address."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.errors import UntrustedError, UsageError
from lmcache_core.pool.backing import Access, grant_access
from lmcache_core.trust import Trust

SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un's, with its end
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def runtime_root() -> Path:
    """The directory that holds one directory for each server of this user.

    `LMCACHE_CORE_RUNTIME_DIR`, else a folder in `XDG_RUNTIME_DIR`, else one in /tmp that carries the user's id.
    """
    named = os.environ.get("LMCACHE_CORE_RUNTIME_DIR")
    if named:
        return Path(named)
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    return Path(xdg) / "lmcache-core" if xdg else Path(f"/tmp/lmcache-core-{os.geteuid()}")


def server_directory(name: str, root: Path | None = None) -> Path:
    """The runtime directory of the server with this name; it need not exist yet."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(f"{name!r} is not a server name: use lower-case letters, digits, - and _, at most 64")
    return (root or runtime_root()) / name


def check_address(address: str) -> str:
    """Returns a ZMQ address unchanged. Raises `UsageError` for one that ZMQ would not connect to."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    tcp = scheme == "tcp" and bool(host) and port.isdigit() and 0 < int(port) < 65536
    ipc = scheme == "ipc" and 0 < len(os.fsencode(rest)) <= SOCKET_PATH_BYTES_MAX and "\0" not in rest
    if not (tcp or ipc):
        raise UsageError(
            f"{address!r} is not a server's address: use tcp://HOST:PORT, or ipc:///PATH with a path of at most "
            f"{SOCKET_PATH_BYTES_MAX} bytes"
        )
    return address


def make_server_directory(
    name: str, root: Path | None, access: Access = Access.OWNER, gids: Sequence[int] = ()
) -> Path:
    """Create the directory, private to us or open to groups. Raises `UsageError` if any component of the path belongs
    to another user or is writable by one: in a shared /tmp somebody else may have made it first."""
    path = server_directory(name, root)
    trust = Trust.of_server()
    try:
        trust.open_directory(path.parent, make_mode=0o700 if access is Access.OWNER else 0o755).close()
        trust.open_directory(path, make_mode=0o700).close()
        closed = [part for part in path.parents if not part.stat().st_mode & 0o011]
        owner = path.stat().st_uid
    except UntrustedError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"the runtime directory {path} cannot be made: {error.strerror}; set runtime_dir to a "
            f"directory that you own"
        ) from error
    if access is Access.GROUP and closed:
        raise UsageError(
            f"{closed[0]} is closed to other users, so no group can reach {path}: chmod o+x it, "
            "or set runtime_dir elsewhere, here and in the clients (LMCACHE_CORE_RUNTIME_DIR)"
        )
    if owner == os.geteuid():  # if root made it for us, it keeps the permissions that root gave it
        grant_access(path, access, gids, owner_bits=7, group_bits=5)
    return path
