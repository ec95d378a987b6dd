"""`python -m lmcache_http SETTINGS`: what a server runs beside itself. SETTINGS: one JSON object, as `[http]` is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError

from lmcache_core.protocol.hostport import HostPort
from lmcache_core.trust import SERVER_UID_VARIABLE
from lmcache_http.app import make_app
from lmcache_http.events import EventStreams
from lmcache_http.guard import Guard
from lmcache_http.node import Node
from lmcache_http.patience import PatientLoop, PatientProtocol
from lmcache_http.settings import HttpSettings


def main() -> None:
    """Serve until SIGTERM."""
    try:
        settings = HttpSettings.model_validate_json(sys.argv[1] if len(sys.argv) > 1 else "{}")
        guard = Guard(settings)
    except (ValidationError, ValueError, OSError) as error:
        cure = "; correct http.token_file or http.read_token_file" if isinstance(error, OSError) else ""
        sys.exit(f"lmcache-http: {error}{cure}")
    directory, uid = os.environ.get("LMCACHE_CORE_RUNTIME_DIR"), os.environ.get(SERVER_UID_VARIABLE)
    name = os.environ.get("LMCACHE_CORE_NAME", "default")
    node = Node(name, Path(directory) if directory else None, int(uid) if uid else None)
    streams = EventStreams(node.server_uid)
    server = _Server(uvicorn.Config(make_app(node, settings, guard, streams), **where_from(settings)), streams)
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    try:
        # uvicorn exits where it cannot listen; the last line says which setting that is.
        with contextlib.suppress(SystemExit), asyncio.Runner(loop_factory=PatientLoop) as runner:
            runner.run(server.serve())
    finally:
        node.close()
        if settings.unix_socket is not None:
            settings.unix_socket.unlink(missing_ok=True)
    if not server.started:
        at, setting = HostPort(settings.host, settings.port), "http.host or http.port"
        where, setting = (at, setting) if settings.unix_socket is None else (settings.unix_socket, "http.unix_socket")
        sys.exit(f"lmcache-http: it cannot listen at {where}: set {setting} to a free one")


class _Server(uvicorn.Server):
    """Ends the streams of events as it ends: it waits for answers, and these have no end of their own."""

    def __init__(self, config: uvicorn.Config, streams: EventStreams) -> None:
        super().__init__(config)
        self._streams = streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As in any server, and one line that says so: it listens later than the server beside it is ready."""
        await super().startup(sockets)
        if self.started:
            config = self.config
            at = config.uds or f"{'https' if config.is_ssl else 'http'}://{HostPort(config.host, config.port)}"
            sys.stderr.write(f"lmcache-http: listening at {at}\n")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As in any server."""
        self._streams.end()
        await super().shutdown(sockets)


def where_from(settings: HttpSettings) -> dict[str, Any]:
    where: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "lifespan": "off"}
    where |= {"timeout_graceful_shutdown": 2, "backlog": 128, "http": PatientProtocol}
    if settings.unix_socket is not None:
        where["uds"] = str(settings.unix_socket)
    else:
        where |= {"host": settings.host, "port": settings.port}
    if settings.tls_cert_file is not None:
        where |= {"ssl_certfile": str(settings.tls_cert_file), "ssl_keyfile": str(settings.tls_key_file)}
    return where


if __name__ == "__main__":
    main()
