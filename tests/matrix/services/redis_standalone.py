"""One Redis server, and what the other ways to run Redis share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis

from lmcache_testing import Backdoor
from services.service import Daemon, Service, ServiceError, find_binary, free_port, wait_healthy

SMALL_BYTES = 3 << 20
CURE = "Debian: apt-get install redis-server"


class RedisDaemon:
    """One `redis-server`. `door()` is redis-py, as anybody uses it."""

    def __init__(self, folder: Path, *options: str, port: int = 0, tls: dict[str, object] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self._folder = folder
        self._tls = tls or {}
        self.argv = [
            find_binary("redis-server", CURE),
            *("--bind", "127.0.0.1", "--dir", str(folder), "--daemonize", "no", "--save", "", "--appendonly", "no"),
            *(() if tls else ("--port", str(self.port))),
            *options,
        ]
        self.daemon: Daemon | None = None

    def launch(self) -> None:
        """Start the process; it may take a moment to answer."""
        self.daemon = Daemon(self.argv, self._folder / "redis.log")

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


class RedisDoor(Backdoor):
    """redis-py, on keys as the documentation names them."""

    def __init__(self, open_door: Callable[[], Any], prefix: str) -> None:
        self._open = open_door
        self._prefix = prefix

    def read(self, key: bytes) -> bytes | None:
        with self._open() as door:
            found: bytes | None = door.get(self._prefix + key.hex())
            return found

    def write(self, key: bytes, content: bytes) -> None:
        with self._open() as door:
            door.set(self._prefix + key.hex(), content)

    def remove(self, key: bytes) -> None:
        with self._open() as door:
            assert door.delete(self._prefix + key.hex()) == 1


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

    def secrets(self) -> Sequence[str]:
        """Of one of the user's own: the password in its URL."""
        password = urlsplit(self.endpoint).password if self.endpoint is not None else None
        return sorted({password, unquote(password)}) if password else ()

    def daemons(self) -> Sequence[RedisDaemon]:
        return ()

    def primaries(self) -> list[RedisDaemon]:
        """Those that hold data and take writes."""
        return list(self.daemons())

    # --- for the conformance kit ----------------------------------------------------------------------------
    def corner(self, label: str) -> dict[str, object]:
        self.clear()
        return {**self.adapter_settings(), "key_prefix": f"lmcache:{label}:", "ttl_s": 3600}

    def backdoor(self, corner: dict[str, object]) -> Backdoor:
        return RedisDoor(self.door, str(corner["key_prefix"]))

    def expire(self, corner: dict[str, object]) -> Callable[[], None]:
        def expire() -> None:
            with self.door() as door:
                for name in door.scan_iter(match=f"{corner['key_prefix']}*"):
                    assert 0 < door.pttl(name) <= 3_600_000, "stored without its time to live"
                    door.pexpire(name, -1)

        return expire

    @contextmanager
    def small(self) -> Iterator[bool]:
        if not self.ours:
            yield False
            return
        servers = self.primaries()
        try:
            for server in servers:
                with server.door() as door:
                    room = SMALL_BYTES // len(servers) + int(door.info("memory")["used_memory"])
                    door.config_set("maxmemory-policy", "allkeys-lru")
                    door.config_set("maxmemory", room)
            yield True
        finally:
            for server in servers:
                with server.door() as door:
                    door.config_set("maxmemory", 0)

    def hang(self) -> AbstractContextManager[None] | None:
        return self._stopped() if self.ours and self.name in ("redis", "redis-tls") else None

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        running = [server.daemon for server in self.daemons() if server.daemon is not None]
        for daemon in running:
            daemon.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for daemon in running:
                daemon.signal(signal.SIGCONT)

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
