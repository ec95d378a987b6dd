"""`python -m lmcache_copier OPTIONS`: what a server runs beside itself. OPTIONS: `CopierOptions` as JSON."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from lmcache_copier.door import CopierDoor
from lmcache_copier.limits import FIGURES_S
from lmcache_copier.operation import OPERATION, FiguresReport, FiguresTaken
from lmcache_copier.options import CopierOptions
from lmcache_core import Client
from lmcache_core.errors import CacheError
from lmcache_core.protocol.address import server_directory
from lmcache_core.threads import started
from lmcache_core.trust import SERVER_UID_VARIABLE


def main() -> None:
    """Copy until SIGTERM. Nothing is ended then: the server frees what a dead worker held, and engines see the end."""
    logging.basicConfig(level=logging.WARNING, format="lmcache-copier: %(message)s")
    try:
        options = msgspec.json.decode(sys.argv[1] if len(sys.argv) > 1 else "", type=CopierOptions)
    except msgspec.MsgspecError as error:
        sys.exit(f"lmcache-copier: {error}: the server starts this process, where its settings have a table [copier]")
    where, uid = os.environ.get("LMCACHE_CORE_RUNTIME_DIR"), os.environ.get(SERVER_UID_VARIABLE)
    server, root = os.environ.get("LMCACHE_CORE_NAME", "default"), Path(where) if where else None
    client = Client.connect(
        server, runtime_dir=root, client_name="lmcache-copier", server_uid=int(uid) if uid else None
    )
    client.look()
    try:
        door = CopierDoor(server_directory(server, root), root, client, options)
    except (OSError, CacheError) as error:
        sys.exit(f"lmcache-copier: it cannot listen: {error}")

    def end(*_: object) -> None:
        door.remove_name()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    started(door.run, "door")
    while True:
        with contextlib.suppress(CacheError):  # a server that is away ends this process, or comes back
            client.call_operation(OPERATION, FiguresReport(door.figures), FiguresTaken)
        time.sleep(FIGURES_S)


if __name__ == "__main__":
    main()
