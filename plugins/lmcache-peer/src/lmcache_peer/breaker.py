"""When a peer is asked, and when only a probe is sent to it."""

from __future__ import annotations

import threading
import time

from lmcache_peer.limits import LIES_MAX, LIES_PAUSE_S, PAUSE_S, PAUSE_S_MAX


class PeerBreaker:
    """Open after one failure: a peer that is dead or hangs costs one wait, and then nothing until a probe, which asks
    for its digest, succeeds. Open for a minute after three lies. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause_s = PAUSE_S
        self._lies = 0
        self._lied_until = 0.0
        self.opened = 0
        self.closed = True
        self.probe_at = 0.0  # monotonic; while it is open
        self.last_error = ""

    def failed(self, error: str) -> None:
        """It did not answer, or not in time."""
        with self._lock:
            self._open(error, self._pause_s)
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def lied(self, error: str) -> None:
        """It sent what is not true."""
        with self._lock:
            self.last_error = error
            self._lies += 1
            if self._lies >= LIES_MAX:
                self._lies, self._lied_until = 0, time.monotonic() + LIES_PAUSE_S
                self._open(error, LIES_PAUSE_S)

    def answered(self) -> None:
        """A probe has succeeded."""
        with self._lock:
            if time.monotonic() >= self._lied_until:
                self._pause_s = PAUSE_S
                self.closed, self.last_error = True, "" if self._lies == 0 else self.last_error

    def read_well(self) -> None:
        """An object came that is what it should be: earlier lies were accidents."""
        self._lies = 0

    def _open(self, error: str, pause_s: float) -> None:
        self.opened += self.closed
        self.closed = False
        self.last_error = error
        self.probe_at = time.monotonic() + pause_s
