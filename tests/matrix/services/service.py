"""What every service of the matrix does: start in a folder, be healthy, stop by pid, and say how to reach it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

from lmcache_testing import Backdoor
from services.proxy import Proxies

START_S = 60.0  # a safety net: services answer within a second or twenty
STOP_S = 20.0


class ServiceError(Exception):
    """A service that cannot run; the message says what is missing and how to get it."""


class Service(ABC):
    """One way to stand a medium up. Built without arguments; `start` does everything else.

    `start(folder)` uses an empty folder and free ports of loopback, and returns once `healthy()` is true; it raises
    `ServiceError` otherwise. `stop` ends what was started, by pid, and is idempotent; `kill` does so with no warning,
    and `restart` brings the same service back on the same ports, with what it kept.
    """

    name: ClassVar[str]  # the backend's name in the matrix: "redis-cluster"
    tier_type: ClassVar[str]  # the adapter's name: "redis"

    @abstractmethod
    def start(self, folder: Path) -> None: ...

    @abstractmethod
    def healthy(self) -> bool: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def adapter_settings(self) -> dict[str, object]:
        """Arguments of the adapter's settings model."""

    def kill(self) -> None:
        """End it with SIGKILL. Only where `restartable`."""
        raise NotImplementedError(f"{self.name} cannot be killed")

    def restart(self) -> None:
        """Start it again after `kill` or `stop`; healthy when this returns. Only where `restartable`."""
        raise NotImplementedError(f"{self.name} cannot be restarted")

    restartable: ClassVar[bool] = False
    shared: ClassVar[bool] = True  # several servers may use it at once
    ours = True  # False: a service of the user's own, which tests must not stop, empty or configure

    def proxied(self) -> tuple[str, int] | None:
        """Host and port that a TCP proxy may stand in front of; None: there is no single one."""
        return None

    def settings_through(self, port: int) -> dict[str, object]:
        """`adapter_settings` with the port of `proxied` replaced."""
        raise NotImplementedError(f"{self.name} has no single port")

    def through(self) -> Proxies | None:
        """Proxies in front of the service, or of another of its kind whose nodes name the proxies as their own
        addresses. None: it has no port."""
        target = self.proxied()
        if target is None:
            return None
        proxies = Proxies([target])
        proxies.settings = self.settings_through(proxies.ports[0])
        return proxies

    # --- for the conformance kit ----------------------------------------------------------------------------
    def corner(self, label: str) -> dict[str, object] | None:
        """`adapter_settings` for a part of the service that is empty, and nobody else's. None: the kit is not
        applied here."""
        return None

    def backdoor(self, corner: dict[str, object]) -> Backdoor | None:
        """The medium itself: a `lmcache_testing.Backdoor`."""
        return None

    def expire(self, corner: dict[str, object]) -> Callable[[], None] | None:
        """Let all objects of the corner reach the end of their time to live."""
        return None

    @contextmanager
    def small(self) -> Iterator[bool]:
        """Within it the service holds between 1 and 4 MiB; False: it cannot be made small."""
        yield False

    def hang(self) -> AbstractContextManager[None] | None:
        """Within it the service takes requests and answers none."""
        return None

    def secrets(self) -> Sequence[str]:
        """Words that must never stand in a log, an error, a status or a repr."""
        return ()

    def tier_options(self, tier: str = "remote", settings: dict[str, object] | None = None) -> list[str]:
        """Options for `lmcache-core serve` that configure one tier on this service."""
        options = [f"--l2.{tier}.type", self.tier_type]
        for name, value in (self.adapter_settings() if settings is None else settings).items():
            options += [f"--l2.{tier}.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
        return options


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def find_binary(name: str, cure: str) -> str:
    """The path of a program. Raises `ServiceError` with the cure if it is not installed."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if found is None:
        raise ServiceError(f"{name} is not installed: {cure}")
    return found


class Daemon:
    """One process in the foreground, with its output in a file, that is ended by pid."""

    def __init__(self, argv: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # an interrupt at the terminal ends the tests, which end this
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        if self.running:
            self._popen.send_signal(number)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for one that does not hear."""
        self.signal(signal.SIGTERM)
        try:
            self._popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._popen.wait(STOP_S)

    def said(self) -> str:
        """The end of its output."""
        return self._log.read_text(errors="replace")[-2000:]


def wait_healthy(what: str, healthy: Callable[[], bool], *daemons: Daemon, seconds: float = START_S) -> None:
    """Wait until `healthy()`. Raises `ServiceError`, with the daemon's last words, if one ends or time runs out."""
    deadline = time.monotonic() + seconds
    while not healthy():
        for daemon in daemons:
            if not daemon.running:
                raise ServiceError(f"{what} ended at start: {daemon.said()}")
        if time.monotonic() > deadline:
            words = "; ".join(daemon.said() for daemon in daemons)
            raise ServiceError(f"{what} did not answer within {seconds:.0f} s: {words}")
        time.sleep(0.02)
