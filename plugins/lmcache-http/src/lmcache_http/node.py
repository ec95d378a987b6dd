"""This process's client of the server: over the lifeline, with short time-outs, and not more often than needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_core.client.client import Client

LIVE_S = 1.0  # a loop that does not answer within this is not alive
CALL_S = 10.0
STATUS_S = 1.0  # figures are fetched no more often than this, however often they are scraped


class Node:
    """Thread-safe. Raises `DisconnectedError` if no server answers in time."""

    def __init__(self, name: str, runtime_dir: Path | None, server_uid: int | None = None) -> None:
        common: dict[str, Any] = {"runtime_dir": runtime_dir, "maps_pool": False, "server_uid": server_uid}
        self.name = name
        self.server_uid = server_uid
        # A separate client: a slow call of the other one must not make a living server look dead.
        self._probe = Client.connect(
            name, client_name="lmcache-http probe", call_timeout_s=LIVE_S, connect_timeout_s=LIVE_S, **common
        )
        self.client = Client.connect(name, client_name="lmcache-http", call_timeout_s=CALL_S, **common)
        self._lock = threading.Lock()
        self._status: Mapping[str, Any] = {}
        self._asked_at_s = float("-inf")

    def alive(self) -> float:
        """Seconds of a round trip through the loop."""
        began = time.monotonic()
        self._probe.noop()
        return time.monotonic() - began

    def status(self) -> Mapping[str, Any]:
        """What the server says of itself, a second old at most."""
        with self._lock:
            if time.monotonic() - self._asked_at_s >= STATUS_S:
                self._probe.noop()  # fails within LIVE_S: scrapers wait no longer than CALL_S
                self._status = self.client.status()
                self._asked_at_s = time.monotonic()
            return self._status

    def changed(self) -> None:
        """Something was changed from here: the next request gets fresh figures."""
        with self._lock:
            self._asked_at_s = float("-inf")

    def close(self) -> None:
        """Say goodbye."""
        self._probe.close()
        self.client.close()
