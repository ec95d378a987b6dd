"""How to find a server: its runtime directory on the node, or its ZMQ address."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.errors import UntrustedError, UsageError
from lmcache_core.paths import path_or_none, xdg_path
from lmcache_core.pool.backing import Access, grant_access
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.trust import Trust

NAME_VARIABLE = "LMCACHE_CORE_NAME"
RUNTIME_DIR_VARIABLE = "LMCACHE_CORE_RUNTIME_DIR"
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un's, with its end
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def given_root(value: str | os.PathLike[str] | None, where: str = "runtime_dir") -> Path | None:
    """A runtime directory as somebody gave it; None if it is unset. Raises `UsageError`, which says `where`."""
    try:
        return path_or_none(value)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def default_name() -> str:
    """The server that a client means which is given no name: `LMCACHE_CORE_NAME`, or else "default"."""
    return os.environ.get(NAME_VARIABLE) or "default"


def named_root(root: Path | None) -> Path | None:
    """The runtime directory that somebody chose, by an argument or `LMCACHE_CORE_RUNTIME_DIR`; None for a default."""
    return root or given_root(os.environ.get(RUNTIME_DIR_VARIABLE), RUNTIME_DIR_VARIABLE)


def runtime_root() -> Path:
    """The directory that holds one directory for each server of this user.

    `LMCACHE_CORE_RUNTIME_DIR`, else a folder in `XDG_RUNTIME_DIR`, else one in /tmp that carries the user's id.
    """
    named = named_root(None)
    if named is not None:
        return named
    xdg = xdg_path(os.environ.get("XDG_RUNTIME_DIR"))
    return xdg / "lmcache-core" if xdg is not None else Path(f"/tmp/lmcache-core-{os.geteuid()}")


def server_directory(name: str, root: Path | None = None) -> Path:
    """The runtime directory of the server with this name; it need not exist yet."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(f"{name!r} is not a server name: use lower-case letters, digits, - and _, at most 64")
    return (root or runtime_root()) / name


def check_address(address: str) -> str:
    """Returns a ZMQ address unchanged. Raises `UsageError` for one that ZMQ would not connect to."""
    scheme, _, rest = address.partition("://")
    tcp = scheme == "tcp" and _is_host_port(rest)
    ipc = scheme == "ipc" and 0 < len(os.fsencode(rest)) <= SOCKET_PATH_BYTES_MAX and "\0" not in rest
    if not (tcp or ipc):
        raise UsageError(
            f"{address!r} is not a server's address: use tcp://HOST:PORT, with an IPv6 address in brackets, "
            "or ipc:///PATH with a path of at most "
            f"{SOCKET_PATH_BYTES_MAX} bytes"
        )
    return address


def _is_host_port(text: str) -> bool:
    try:
        HostPort.parse(text, port_min=1)
    except ValueError:
        return False
    return True


def make_server_directory(
    name: str, root: Path | None, access: Access = Access.OWNER, gids: Sequence[int] = ()
) -> Path:
    """Create the directory, private to us or open to groups. Raises `UsageError` if any component of the path belongs
    to another user or is writable by one: in a shared /tmp somebody else may have made it first."""
    path = server_directory(name, root)
    trust = Trust.of_server(named_root(root))
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
