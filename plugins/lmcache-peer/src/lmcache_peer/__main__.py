"""`python -m lmcache_peer SETTINGS`: what a server runs beside itself. SETTINGS: one JSON object, as `[peer]` is."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from lmcache_core.errors import CacheError
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.trust import SERVER_UID_VARIABLE
from lmcache_peer.admission import Admission
from lmcache_peer.directory import Directory, NodeEntry, directory_of
from lmcache_peer.holders import PublishedEntries
from lmcache_peer.limits import DIGEST_PERIOD_S, DIGEST_SHARE, DIRECTORY_PERIOD_S, READ_SHARE
from lmcache_peer.messages import VERSION
from lmcache_peer.node import Node
from lmcache_peer.serving import Door
from lmcache_peer.settings import ServingSettings

log = logging.getLogger("lmcache_peer")
_NO_INDEX = "this node serves nothing: its server has no index (is the C extension missing?)"


def main() -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="lmcache-peer: %(message)s")
    try:
        settings = ServingSettings.model_validate_json(sys.argv[1] if len(sys.argv) > 1 else "{}")
        admission, directory = Admission(settings), directory_of(settings, "peer")
    except (ValidationError, ValueError, OSError) as error:
        sys.exit(f"lmcache-peer: {error}")
    where, uid = os.environ.get("LMCACHE_CORE_RUNTIME_DIR"), os.environ.get(SERVER_UID_VARIABLE)
    server = os.environ.get("LMCACHE_CORE_NAME", "default")
    node = Node(server, Path(where) if where else None, int(uid) if uid else None)
    signal.signal(signal.SIGTERM, _end)
    at = HostPort(settings.host, settings.port)
    try:
        door = Door(at, settings.node_name(server), secrets.randbits(63), node, admission)
    except OSError as error:
        sys.exit(f"lmcache-peer: it cannot listen at {at}: {error.strerror}: set peer.host or peer.port to a free one")
    try:
        threading.Thread(target=door.run, name="peer-door", daemon=True).start()
        _Keeper(settings, door, directory).run()
    finally:
        door.close()
        directory.close()


def _end(*_: object) -> None:
    """Whatever the main thread waits for: a server that is ending answers nothing any more."""
    raise SystemExit(0)


class _Keeper:
    """What is done every second: the digest is made anew, the entry in the directory renewed, locks expire, and the
    server gets the figures."""

    def __init__(self, settings: ServingSettings, door: Door, directory: Directory) -> None:
        self._door, self._directory = door, directory
        self._share = settings.locked_share
        self._entries = PublishedEntries(settings, door.boot) if settings.who_has == "entries" else None
        endpoint = settings.advertise or str(door.at)
        self._entry = NodeEntry(door.name, door.boot, endpoint, VERSION)
        self._server_at = self._digest_at = self._register_at = 0.0
        self._troubles: dict[str, str] = {}  # of the server and of the directory: each has its own

    def run(self) -> None:
        """Until SIGTERM; then the entry goes, and others ask nothing any more."""
        try:
            while True:
                self.round()
                time.sleep(max(0.02, min(self._register_at, self._server_at) - time.monotonic()))
        finally:
            self._directory.leave(self._entry)
            if self._entries is not None:
                self._entries.close()

    def round(self) -> None:
        """What is due now."""
        self._door.locks.expire()
        if time.monotonic() >= self._server_at:
            self._server_at = time.monotonic() + DIGEST_PERIOD_S
            self._try("server", self._see_server)
        if time.monotonic() >= self._register_at:
            self._register_at = time.monotonic() + DIRECTORY_PERIOD_S
            self._try("directory", self._register)

    def _see_server(self) -> None:
        began, door = time.monotonic(), self._door
        door.node.refresh([], {**door.shown, "registered": int("directory" not in self._troubles)})  # connects, too
        door.locks.nbytes_max = int(self._share * door.node.pool_bytes)
        door.under_way.nbytes_max = int(READ_SHARE * door.node.pool_bytes)
        if began < self._digest_at:
            return
        began = time.monotonic()
        if self._publish():
            self._digest_at = began + DIGEST_SHARE * (time.monotonic() - began)

    def _publish(self) -> bool:
        """What this node has, in the way of its cluster. False: some of it is left for the next round."""
        door, entries = self._door, self._entries
        if entries is None:
            if not door.node.digest_into(door.digest):
                raise CacheError(_NO_INDEX)
            return True
        names = door.node.names()
        if names is None:
            raise CacheError(_NO_INDEX)
        door.digest.renew(door.digest.blank(), len(names))  # it has nothing in it: entries say what is there
        return entries.renew(names)

    def _register(self) -> None:
        self._directory.register(self._entry)

    def _try(self, what: str, call: Callable[[], None]) -> None:
        """What is away will be back: the log has its first error, and its return."""
        try:
            call()
        except CacheError as error:
            if self._troubles.get(what) != str(error):
                self._troubles[what] = str(error)
                log.warning("%s: %s", what, error)
        else:
            if self._troubles.pop(what, None) is not None:
                log.warning("%s: all is well again", what)


if __name__ == "__main__":
    main()
