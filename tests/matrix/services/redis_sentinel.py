"""A primary, a replica and three Sentinels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import redis
from redis.sentinel import Sentinel

from services.proxy import Proxies
from services.redis_standalone import RedisDaemon, RedisService
from services.service import free_port, wait_healthy

SERVICE = "cache"
OWN_SERVICE = "mymaster"  # of one of the user's own, whose endpoint is HOST:PORT,HOST:PORT of Sentinels
SENTINELS = 3
DOWN_AFTER_MS = 1500
NEVER_DOWN_MS = 3_600_000


class RedisSentinel(RedisService):
    name = "redis-sentinel"
    restartable = False  # a killed primary comes back as a replica: see `fail_over`

    def __init__(self) -> None:
        super().__init__()
        self._servers: list[RedisDaemon] = []
        self._sentinels: list[RedisDaemon] = []
        self._folder = Path()
        self._proxies: Proxies | None = None
        self._behind: list[RedisDaemon] = []

    def start(self, folder: Path) -> None:
        self._folder = folder
        primary = RedisDaemon(folder / "0", "--repl-diskless-sync-delay", "0", "--repl-backlog-size", "64kb")
        self._servers.append(primary)
        primary.start()
        replica = RedisDaemon(
            folder / "1", "--replicaof", "127.0.0.1", str(primary.port), "--repl-diskless-sync-delay", "0"
        )
        self._servers.append(replica)
        replica.start()
        for number in range(SENTINELS):
            sentinel = _sentinel(folder / f"sentinel{number}", free_port(), primary.port, SENTINELS - 1, DOWN_AFTER_MS)
            self._sentinels.append(sentinel)
            sentinel.start()
        wait_healthy("Sentinel", self.healthy, *(each.daemon for each in self._sentinels if each.daemon is not None))

    def stop(self) -> None:
        super().stop()
        if self._proxies is not None:
            self._proxies.stop()

    def daemons(self) -> Sequence[RedisDaemon]:
        return [*self._behind, *self._sentinels, *self._servers]

    def through(self) -> Proxies | None:
        """Another server and one Sentinel, which knows it by its proxy's port only, and does not think it dead as
        long as a test lasts."""
        if self.endpoint is None and self._proxies is None:
            server, watched_at = RedisDaemon(self._folder / "behind"), free_port()
            self._proxies = Proxies([("127.0.0.1", server.port), ("127.0.0.1", watched_at)], kept=True)
            near, watched = self._proxies.ports
            sentinel = _sentinel(self._folder / "before", watched_at, near, 1, NEVER_DOWN_MS)
            for each in (server, sentinel):
                self._behind.append(each)
                each.start()
            nodes = f"127.0.0.1:{watched}"
            self._proxies.settings = {"mode": "sentinel", "nodes": nodes, "sentinel_service": SERVICE}
        return self._proxies

    def healthy(self) -> bool:
        """All Sentinels know each other and the replica, and the replica follows."""
        try:
            for sentinel in self._sentinels:
                with sentinel.door() as door:
                    state = door.sentinel_master(SERVICE)
                    if state["num-other-sentinels"] != SENTINELS - 1 or state["num-slaves"] != 1 or state["is_sdown"]:
                        return False
            roles = []
            for server in self._servers:
                with server.door() as door:
                    about = door.info("replication")
                    roles.append((about["role"], about.get("master_link_status", "up")))
            return sorted(roles) == [("master", "up"), ("slave", "up")]
        except redis.exceptions.RedisError:
            return False

    def primaries(self) -> list[RedisDaemon]:
        return [self.primary()]

    def primary(self) -> RedisDaemon:
        with self._sentinels[0].door() as door:
            port = door.sentinel_master(SERVICE)["port"]
        return next(server for server in self._servers if server.port == port)

    def door(self) -> redis.Redis | redis.RedisCluster:
        if self.endpoint is None:
            return self.primary().door()
        nodes = [node.rpartition(":") for node in self.endpoint.split(",")]
        sentinels = Sentinel([(host, int(port)) for host, _, port in nodes])
        door: redis.Redis = sentinels.master_for(OWN_SERVICE)
        return door

    def adapter_settings(self) -> dict[str, object]:
        if self.endpoint is not None:
            return {"mode": "sentinel", "nodes": self.endpoint, "sentinel_service": OWN_SERVICE}
        nodes = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        return {"mode": "sentinel", "nodes": nodes, "sentinel_service": SERVICE}

    def kill_primary(self) -> RedisDaemon:
        """The primary dies; the replica will take over. Gives back the dead one, to be started again."""
        dead = self.primary()
        dead.kill()
        return dead


def _sentinel(folder: Path, port: int, primary_port: int, quorum: int, down_after_ms: int) -> RedisDaemon:
    folder.mkdir()
    (folder / "sentinel.conf").write_text(
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary_port} {quorum}\n"
        f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
        f"sentinel failover-timeout {SERVICE} 10000\n"
    )
    sentinel = RedisDaemon(folder, port=port)
    # A configuration file comes first, and Sentinels know fewer options than servers.
    where = ["--port", str(port), "--bind", "127.0.0.1"]
    sentinel.argv = [sentinel.argv[0], str(folder / "sentinel.conf"), "--sentinel", *where]
    return sentinel
