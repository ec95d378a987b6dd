"""A primary, a replica and three Sentinels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import redis

from services.redis_standalone import RedisDaemon, RedisService
from services.service import free_port, wait_healthy

SERVICE = "cache"
SENTINELS = 3
DOWN_AFTER_MS = 1500


class RedisSentinel(RedisService):
    name = "redis-sentinel"
    restartable = False  # a killed primary comes back as a replica: see `fail_over`

    def __init__(self) -> None:
        super().__init__()
        self._servers: list[RedisDaemon] = []
        self._sentinels: list[RedisDaemon] = []

    def start(self, folder: Path) -> None:
        primary = RedisDaemon(folder / "0", "--repl-diskless-sync-delay", "0", "--repl-backlog-size", "64kb")
        self._servers.append(primary)
        primary.start()
        replica = RedisDaemon(
            folder / "1", "--replicaof", "127.0.0.1", str(primary.port), "--repl-diskless-sync-delay", "0"
        )
        self._servers.append(replica)
        replica.start()
        for number in range(SENTINELS):
            place = folder / f"sentinel{number}"
            place.mkdir()
            port = free_port()
            (place / "sentinel.conf").write_text(
                f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
                f"sentinel failover-timeout {SERVICE} 10000\n"
            )
            sentinel = RedisDaemon(place, port=port)
            # A configuration file comes first, and Sentinels know fewer options than servers.
            binary = sentinel._argv[0]
            sentinel._argv = [
                binary,
                str(place / "sentinel.conf"),
                "--sentinel",
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
            ]
            self._sentinels.append(sentinel)
            sentinel.start()
        wait_healthy("Sentinel", self.healthy, *(each.daemon for each in self._sentinels if each.daemon is not None))

    def daemons(self) -> Sequence[RedisDaemon]:
        return [*self._sentinels, *self._servers]

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
        return super().door() if self.endpoint is not None else self.primary().door()

    def adapter_settings(self) -> dict[str, object]:
        if self.endpoint is not None:
            return {"mode": "sentinel", "nodes": self.endpoint}
        nodes = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        return {"mode": "sentinel", "nodes": nodes, "sentinel_service": SERVICE}

    def kill_primary(self) -> RedisDaemon:
        """The primary dies; the replica will take over. Gives back the dead one, to be started again."""
        dead = self.primary()
        dead.kill()
        return dead
