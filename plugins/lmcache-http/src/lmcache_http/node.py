"""This process's client of the server: over the lifeline, with short time-outs, and not more often than needed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_core import Client
from lmcache_core.errors import CacheError
from lmcache_http.history import COARSE_S, History
from lmcache_http.metrics import text_of

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
        self._kept: tuple[float, Mapping[str, Any]] = (float("-inf"), {})  # figures, and when they were asked for
        self._written: tuple[Mapping[str, Any], str] = ({}, "")  # figures, and their text
        self.history = History()
        self._began_unix_s = time.time() - time.monotonic()  # a clock that is set leaves the history in order
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="lmcache-http history", daemon=True).start()

    def alive(self) -> float:
        """Seconds of a round trip through the loop."""
        began = time.monotonic()
        self._probe.noop()
        return time.monotonic() - began

    def status(self) -> Mapping[str, Any]:
        """What the server says of itself, a second old at most."""
        with self._lock:
            fetched_at_s, status = self._kept
            if time.monotonic() - fetched_at_s >= STATUS_S:
                self._probe.noop()  # fails within LIVE_S: scrapers wait no longer than CALL_S
                status = self._keep(self.client.status())
            return status

    def metrics(self) -> str:
        """The same as Prometheus' text, written once for all who scrape meanwhile."""
        status = self.status()
        with self._lock:
            if self._written[0] is not status:
                self._written = status, text_of(status)
            return self._written[1]

    def known(self, name: str) -> Mapping[str, Any]:
        """The namespaces of the kept figures, or of fresh ones where those lack this id or label."""
        known: Mapping[str, Any] = self.status()["namespaces"]
        if name not in known and all(row["label"] != name for row in known.values()):
            self.changed()
            known = self.status()["namespaces"]
        return known

    def _watch(self) -> None:
        """Have a history even if nobody asks. What the server does not answer is missing from it."""
        while not self._closed.wait(COARSE_S):
            with contextlib.suppress(CacheError):
                self.status()

    def probed_status(self) -> Mapping[str, Any]:
        """The same for probes: it waits for no other request, and no longer than `LIVE_S`."""
        self._probe.noop()  # figures that are kept say nothing of a server that hangs since
        fetched_at_s, status = self._kept
        if time.monotonic() - fetched_at_s >= STATUS_S:
            status = self._keep(self._probe.status())
        return status

    def _keep(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        self._kept = time.monotonic(), status
        self.history.add(status, self._began_unix_s + self._kept[0])
        return status

    def changed(self) -> None:
        """Something was changed from here: the next request gets fresh figures."""
        with self._lock:
            self._kept = float("-inf"), {}

    def close(self) -> None:
        """Say goodbye."""
        self._closed.set()
        self._probe.close()
        self.client.close()
