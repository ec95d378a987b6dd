"""One Redis server, and what the other ways to run Redis share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from services.service import Daemon, Service, ServiceError, find_binary, free_port, wait_healthy

CURE = "Debian: apt-get install redis-server"


class RedisDaemon:
    """One `redis-server`. `door()` is redis-py, as anybody uses it."""

    def __init__(self, folder: Path, *options: str, port: int = 0, tls: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self._folder = folder
        self._tls = tls or {}
        self._argv = [
            find_binary("redis-server", CURE),
            *("--bind", "127.0.0.1", "--dir", str(folder), "--daemonize", "no", "--save", "", "--appendonly", "no"),
            *(() if tls else ("--port", str(self.port))),
            *options,
        ]
        self.daemon: Daemon | None = None

    def launch(self) -> None:
        """Start the process; it may take a moment to answer."""
        self.daemon = Daemon(self._argv, self._folder / "redis.log")

    def start(self) -> None:
        self.launch()
        assert self.daemon is not None
        wait_healthy(f"redis-server on port {self.port}", self.answers, self.daemon)

    def answers(self) -> bool:
        try:
            with self.door(socket_timeout=5) as door:
                return bool(door.ping())
        except redis.exceptions.AuthenticationError:
            return True
        except redis.exceptions.RedisError:
            return False

    def door(self, **options: Any) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, **{**self._tls, **options})

    def stop(self) -> None:
        if self.daemon is not None:
            self.daemon.stop()

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()


class RedisService(Service):
    """What all Redis services share."""

    tier_type = "redis"
    restartable = True

    def __init__(self) -> None:
        self.endpoint: str | None = None

    @classmethod
    def at(cls, endpoint: str) -> RedisService:
        """A Redis of the user's own: a URL."""
        service = cls()
        service.endpoint = endpoint
        return service

    def door(self) -> redis.Redis | redis.RedisCluster:
        """A second door to the data."""
        assert self.endpoint is not None
        return redis.Redis.from_url(self.endpoint)

    def clear(self) -> None:
        """Empty it. Never one of the user's own."""
        if self.endpoint is None:
            with self.door() as door:
                door.flushall()

    def daemons(self) -> Sequence[RedisDaemon]:
        return ()

    def stop(self) -> None:
        for daemon in self.daemons():
            daemon.stop()


class RedisStandalone(RedisService):
    """One server, no password."""

    name = "redis"

    def __init__(self) -> None:
        super().__init__()
        self.server: RedisDaemon | None = None

    def start(self, folder: Path) -> None:
        self.server = RedisDaemon(folder)
        self.server.start()

    def daemons(self) -> Sequence[RedisDaemon]:
        return [self.server] if self.server is not None else []

    def healthy(self) -> bool:
        return self.server is not None and self.server.answers()

    def kill(self) -> None:
        self._running().kill()

    def restart(self) -> None:
        self._running().start()

    def door(self) -> redis.Redis | redis.RedisCluster:
        return super().door() if self.endpoint is not None else self._running().door()

    def adapter_settings(self) -> dict[str, object]:
        if self.endpoint is not None:
            return {"url": self.endpoint}
        return {"host": "127.0.0.1", "port": self._running().port}

    def proxied(self) -> tuple[str, int] | None:
        return ("127.0.0.1", self.server.port) if self.server is not None else None

    def settings_through(self, port: int) -> dict[str, object]:
        return {**self.adapter_settings(), "port": port}

    def _running(self) -> RedisDaemon:
        if self.server is None:
            raise ServiceError(f"{self.name} was not started")
        return self.server
