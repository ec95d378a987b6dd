"""The server's events, for processes on its node: a connection to the socket of the `stream` subscriber."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_core.errors import DisconnectedError
from lmcache_core.observe.stream import stream_path
from lmcache_core.trust import Trust

__all__ = ["connect_events"]

CONNECT_S = 1.0


def connect_events(config: Mapping[str, Any], server_uid: int | None) -> socket.socket | None:
    """A non-blocking connection, for a server with these settings (`client.config()`); None if it streams no events.
    Its packets, of up to `PACKET_BYTES_MAX`, are whole lines of JSON; an empty one ends the stream. Raises
    `DisconnectedError`."""
    settings = config["subscribers"].get("stream")
    if settings is None:
        return None
    path = None if settings["path"] is None else Path(settings["path"])
    return _connected(stream_path(path, Path(config["state_dir"]), config["name"]), server_uid)


def _connected(path: Path, server_uid: int | None) -> socket.socket:
    """Check that the server's end belongs to its user before anything is read from it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(CONNECT_S)
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{directory}/{path.name}")  # works for paths of any length
        finally:
            os.close(directory)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid not in Trust.of_client(server_uid).uids:
            raise DisconnectedError(f"{path} belongs to uid {uid}, which is not the server's: remove it")
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise DisconnectedError(f"cannot connect to the event socket {path}: {error.strerror or error}") from error
    except BaseException:  # a refusal, or an interrupt
        sock.close()
        raise
    return sock
