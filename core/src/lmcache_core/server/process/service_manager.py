"""Notifications to the service manager: systemd's protocol, as described in sd_notify(3).

Without NOTIFY_SOCKET in the environment, nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class ServiceManager:
    """Sends READY once, and WATCHDOG twice in each interval that the unit sets, from the loop itself: a loop that hangs
    sends nothing, and is restarted."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval_us = environ.get("WATCHDOG_USEC", "")
        self._pause_s = int(interval_us) / 2e6 if meant and interval_us.isdigit() else 0.0
        self._alive_at_s = 0.0

    def ready(self) -> None:
        """Clients can connect."""
        self._notify("READY=1")

    def stopping(self) -> None:
        """The shutdown has begun; it may take as long as the drain."""
        self._notify("STOPPING=1")

    def alive(self, now: float) -> None:
        """The loop is alive. Called in every turn with chores; sends when it is time."""
        if self._pause_s and now >= self._alive_at_s:
            self._alive_at_s = now + self._pause_s
            self._notify("WATCHDOG=1")

    def _notify(self, message: str) -> None:
        if not self._address:
            return
        # A manager that does not listen, or not now, is not worth any delay of the loop.
        with contextlib.suppress(OSError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto(message.encode(), self._address)
