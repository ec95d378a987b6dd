"""Mooncake Store: a master, and two nodes that lend memory. A file mooncake.py here would hide the library."""

from __future__ import annotations

from pathlib import Path

from services.mooncake_cluster import MooncakeCluster
from services.service import Service, ServiceError

NODES = 2
NODE_BYTES = 256 << 20


class Mooncake(Service):
    name = "mooncake"
    tier_type = "mooncake"
    restartable = True

    def __init__(self) -> None:
        self._cluster: MooncakeCluster | None = None
        self._address = ""

    @classmethod
    def at(cls, endpoint: str) -> Mooncake:
        """A master of the user's own: HOST:PORT."""
        service = cls()
        service._address = endpoint
        return service

    def start(self, folder: Path) -> None:
        self._cluster = MooncakeCluster(folder, NODE_BYTES, NODES)
        self._address = self._cluster.address

    def healthy(self) -> bool:
        return self._running().answers()

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def kill(self) -> None:
        """The master: nodes live on, and what they have is forgotten."""
        self._running().kill_master()

    def restart(self) -> None:
        cluster = self._running()
        cluster.start_master()
        cluster.await_nodes(NODES)

    def adapter_settings(self) -> dict[str, object]:
        return {"master": self._address, "staging_bytes": 16 << 20}

    @property
    def cluster(self) -> MooncakeCluster:
        return self._running()

    def _running(self) -> MooncakeCluster:
        if self._cluster is None:
            raise ServiceError(f"{self.name} was not started")
        return self._cluster
