"""`python -m lmcache_http SETTINGS`: what a server runs beside itself. SETTINGS: one JSON object, as `[http]` is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError

from lmcache_core.trust import SERVER_UID_VARIABLE
from lmcache_http.app import make_app
from lmcache_http.guard import Guard
from lmcache_http.node import Node
from lmcache_http.patience import PatientProtocol
from lmcache_http.settings import HttpSettings


def main() -> None:
    """Serve until SIGTERM."""
    try:
        settings = HttpSettings.model_validate_json(sys.argv[1] if len(sys.argv) > 1 else "{}")
        guard = Guard(settings)
    except (ValidationError, ValueError, OSError) as error:
        sys.exit(f"lmcache-http: {error}")
    directory, uid = os.environ.get("LMCACHE_CORE_RUNTIME_DIR"), os.environ.get(SERVER_UID_VARIABLE)
    name = os.environ.get("LMCACHE_CORE_NAME", "default")
    node = Node(name, Path(directory) if directory else None, int(uid) if uid else None)
    try:
        uvicorn.run(make_app(node, settings, guard), **where_from(settings))
    finally:
        node.close()


def where_from(settings: HttpSettings) -> dict[str, Any]:
    where: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "lifespan": "off"}
    where |= {"timeout_graceful_shutdown": 2, "limit_concurrency": 256, "http": PatientProtocol}
    if settings.unix_socket is not None:
        where["uds"] = str(settings.unix_socket)
    else:
        where |= {"host": settings.host, "port": settings.port}
    if settings.tls_cert_file is not None:
        where |= {"ssl_certfile": str(settings.tls_cert_file), "ssl_keyfile": str(settings.tls_key_file)}
    return where


if __name__ == "__main__":
    main()
