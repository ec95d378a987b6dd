"""Where a server is found: its runtime directory on the node, or its ZMQ address."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.errors import UsageError
from lmcache_core.pool.backing import Access, grant_access

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
    """The runtime directory of the server of this name; it need not be there yet."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(f"{name!r} is no server name: use lower-case letters, digits, - and _, at most 64")
    return (root or runtime_root()) / name


def make_server_directory(
    name: str, root: Path | None, access: Access = Access.OWNER, gids: Sequence[int] = ()
) -> Path:
    """Create the directory, private to us or open to groups. Raises `UsageError` where it is another user's: in a
    shared /tmp somebody else may have made it first."""
    path = server_directory(name, root)
    try:
        path.parent.mkdir(mode=0o700 if access is Access.OWNER else 0o755, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        parts = [(part, part.stat()) for part in (path.parent, path)]
        closed = [part for part in path.parents if not part.stat().st_mode & 0o011]
    except OSError as error:
        raise UsageError(
            f"the runtime directory {path} cannot be made: {error.strerror}; set runtime_dir to a directory of yours"
        ) from error
    if access is Access.GROUP and closed:
        raise UsageError(
            f"{closed[0]} is closed to other users, so no group can reach {path}: chmod o+x it, "
            "or set runtime_dir elsewhere, here and in the clients (LMCACHE_CORE_RUNTIME_DIR)"
        )
    for part, found in parts:
        if found.st_uid != os.geteuid() and found.st_uid != 0:
            raise UsageError(
                f"{part} belongs to uid {found.st_uid}, not to us: set runtime_dir to a directory of yours"
            )
        if stat.S_IMODE(found.st_mode) & 0o002 and not found.st_mode & stat.S_ISVTX:
            raise UsageError(f"{part} is writable by everybody: chmod o-w it, or set runtime_dir elsewhere")
    grant_access(path, access, gids, owner_bits=7, group_bits=5)
    return path
