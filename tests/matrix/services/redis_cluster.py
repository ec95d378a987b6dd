"""Redis Cluster: three primaries and three replicas, six processes on loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import redis

from services.redis_standalone import CURE, RedisDaemon, RedisService
from services.service import ServiceError, find_binary, free_port, wait_healthy

NODES = 6
NODE_TIMEOUT_MS = 2000


class RedisCluster(RedisService):
    name = "redis-cluster"
    restartable = False  # see `kill_primary`

    def __init__(self) -> None:
        super().__init__()
        self._servers: list[RedisDaemon] = []

    def start(self, folder: Path) -> None:
        for number in range(NODES):
            server = RedisDaemon(
                folder / str(number),
                *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
                *("--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-port", str(free_port())),
                *("--repl-diskless-sync-delay", "0", "--repl-backlog-size", "64kb"),
            )
            server.launch()
            self._servers.append(server)
        for server in self._servers:
            assert server.daemon is not None
            wait_healthy(f"cluster node {server.port}", server.answers, server.daemon)
        addresses = [f"127.0.0.1:{server.port}" for server in self._servers]
        cli = find_binary("redis-cli", CURE)
        made = subprocess.run(
            [cli, "--cluster", "create", *addresses, "--cluster-replicas", "1", "--cluster-yes"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if made.returncode:
            raise ServiceError(f"redis-cli --cluster create failed: {made.stdout[-1000:]} {made.stderr[-1000:]}")
        wait_healthy("the cluster", self.healthy, *(each.daemon for each in self._servers if each.daemon is not None))

    def daemons(self) -> Sequence[RedisDaemon]:
        return self._servers

    def healthy(self) -> bool:
        """Every living node says that all slots are served, by three primaries, each with a replica that follows."""
        return all(
            self._agrees(server) for server in self._servers if server.daemon is not None and server.daemon.running
        )

    def door(self) -> redis.Redis | redis.RedisCluster:
        if self.endpoint is not None:
            return redis.RedisCluster.from_url(self.endpoint)
        living = next(server for server in self._servers if server.answers())
        return redis.RedisCluster(host="127.0.0.1", port=living.port)

    def clear(self) -> None:
        if self.endpoint is None:
            for server in self.primaries():
                with server.door() as door:
                    door.flushall()

    def primaries(self) -> list[RedisDaemon]:
        found = []
        for server in self._servers:
            if server.daemon is not None and server.daemon.running:
                with server.door() as door:
                    if door.info("replication")["role"] == "master":
                        found.append(server)
        return found

    def adapter_settings(self) -> dict[str, object]:
        if self.endpoint is not None:
            return {"mode": "cluster", "url": self.endpoint}
        return {"mode": "cluster", "nodes": ",".join(f"127.0.0.1:{server.port}" for server in self._servers[:2])}

    def kill_primary(self) -> RedisDaemon:
        """A primary dies; its replica will take over. Gives back the dead one, to be started again."""
        dead = self.primaries()[0]
        dead.kill()
        return dead

    def _agrees(self, server: RedisDaemon) -> bool:
        try:
            with server.door() as door:
                state = door.cluster("info")
                if state["cluster_state"] != "ok" or state["cluster_slots_ok"] != "16384":
                    return False
                about = door.info("replication")
                if about["role"] == "master":
                    return about["connected_slaves"] >= 1
                return about["master_link_status"] == "up"
        except redis.exceptions.RedisError:
            return False
