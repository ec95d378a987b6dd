"""Redis Cluster: three primaries and three replicas, six processes on loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import redis

from services.proxy import Proxies
from services.redis_standalone import CURE, RedisDaemon, RedisService
from services.service import ServiceError, find_binary, free_port, wait_healthy

NODES = 6
NODE_TIMEOUT_MS = 2000


class RedisCluster(RedisService):
    name = "redis-cluster"
    restartable = False  # see `kill_primary`

    def __init__(self, nodes: int = NODES, replicas: int = 1) -> None:
        super().__init__()
        self._servers: list[RedisDaemon] = []
        self._nodes, self._replicas = nodes, replicas
        self._folder = Path()
        self._proxies: Proxies | None = None  # in front of our nodes
        self._behind: RedisCluster | None = None  # one of which we made `through`

    def start(self, folder: Path) -> None:
        self._folder = folder
        ports = [free_port() for _ in range(self._nodes)]
        announced = self._stand_behind(ports) if not self._replicas else []
        for number, port in enumerate(ports):
            server = RedisDaemon(
                folder / str(number),
                *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
                *("--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-port", str(free_port())),
                *("--repl-diskless-sync-delay", "0", "--repl-backlog-size", "64kb"),
                *(("--cluster-announce-port", str(announced[number])) if announced else ()),
                port=port,
            )
            server.launch()
            self._servers.append(server)
        for server in self._servers:
            assert server.daemon is not None
            wait_healthy(f"cluster node {server.port}", server.answers, server.daemon)
        addresses = [f"127.0.0.1:{server.port}" for server in self._servers]
        cli = find_binary("redis-cli", CURE)
        made = subprocess.run(
            [cli, "--cluster", "create", *addresses, "--cluster-replicas", str(self._replicas), "--cluster-yes"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if made.returncode:
            raise ServiceError(f"redis-cli --cluster create failed: {made.stdout[-1000:]} {made.stderr[-1000:]}")
        wait_healthy("the cluster", self.healthy, *(each.daemon for each in self._servers if each.daemon is not None))

    def stop(self) -> None:
        if self._behind is not None:
            self._behind.stop()
        super().stop()
        if self._proxies is not None:
            self._proxies.stop()

    def daemons(self) -> Sequence[RedisDaemon]:
        return self._servers

    # --- a cluster behind proxies -----------------------------------------------------------------------------
    def through(self) -> Proxies | None:
        """Another cluster, of three nodes that announce a proxy's port as their own; clients see no other."""
        if self.endpoint is not None:
            return None
        if self._behind is None:
            self._behind = RedisCluster(nodes=3, replicas=0)
            self._behind.start(self._folder / "behind")
        return self._behind._proxies

    def _stand_behind(self, ports: Sequence[int]) -> list[int]:
        self._proxies = Proxies([("127.0.0.1", port) for port in ports], kept=True)
        nodes = ",".join(f"127.0.0.1:{port}" for port in self._proxies.ports)
        self._proxies.settings = {"mode": "cluster", "nodes": nodes}
        return self._proxies.ports

    # --- health -----------------------------------------------------------------------------------------------
    def healthy(self) -> bool:
        """Every living node says that all slots are served, by three primaries, each with a replica that follows (if
        it is to have one)."""
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
                    return about["connected_slaves"] >= self._replicas and self._announces(door)
                return about["master_link_status"] == "up"
        except redis.exceptions.RedisError:
            return False

    def _announces(self, door: redis.Redis) -> bool:
        """Clients are sent to the proxies, if there are any."""
        if self._proxies is None:
            return True
        told = {node[1] for first, last, *nodes in door.execute_command("CLUSTER", "SLOTS") for node in nodes}
        return told == set(self._proxies.ports)
