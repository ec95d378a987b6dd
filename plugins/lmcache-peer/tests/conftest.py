"""Nodes of a cluster on this machine: real servers, each with its helper, and clients of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_core import Client, Layout, Namespace
from lmcache_core.server.server import Server
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import until

NAMESPACE = Namespace("model", Layout("uint8", (100_000,)))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, NAMESPACE.layout.shape, dtype=torch.uint8, generator=generator)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class TestNode:
    """One server with its helper and its tier."""

    __test__ = False
    name: str
    server: Server
    client: Client

    def store(self, *numbers: int) -> None:
        statuses = self.client.store([key(each) for each in numbers], list(map(content, numbers)), namespace=NAMESPACE)
        assert statuses.stored == len(numbers)

    def load(self, *numbers: int, wait_s: float = 10.0) -> list[int]:
        """Look these up, wait until the tiers have loaded them, and read them. Returns those that are hits; their bytes
        are right."""
        keys = [key(each) for each in numbers]
        self.client.lookup(keys, namespace=NAMESPACE, wait_s=wait_s, prefix=False)
        targets = [torch.zeros_like(content(0)) for _ in numbers]
        read = self.client.retrieve(keys, targets, namespace=NAMESPACE, prefix=False)
        hits = [number for number, status in zip(numbers, read.statuses, strict=True) if status.name == "HIT"]
        for number, target in zip(numbers, targets, strict=True):
            assert number not in hits or torch.equal(target, content(number)), f"object {number} has wrong bytes"
        return hits

    def drop(self, number: int) -> None:
        """Take an object out of its pool."""
        read = self.client.retrieve([key(number)], [torch.zeros_like(content(0))], namespace=NAMESPACE)
        assert self.client.drop([key(number)], namespace=NAMESPACE, incarnations=list(read.incarnations)) == 1

    @property
    def held(self) -> int:
        """Read leases in its server: those of peers, too."""
        return int(self.client.status()["l1"]["leases_by_kind"]["read"])

    @property
    def tier(self) -> dict[str, Any]:
        """The row of its tier `peers`."""
        row: dict[str, Any] = self.client.status()["tiers"]["tiers"][0]
        return row

    def peer(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = self.tier["adapter"]["parts"].get(name, {})
        return row

    def sees(self, name: str, objects: int) -> None:
        """Wait until its tier knows so many objects of that node. It begins to look around with the first lookup."""
        self.client.lookup([key(1 << 40)], namespace=NAMESPACE, wait_s=5.0)
        until(lambda: self.peer(name).get("objects") == objects, f"{self.name} sees {objects} objects of {name}")

    @property
    def helper(self) -> int:
        """The process that serves."""
        until(lambda: self.client.status()["helpers"]["peer"]["pid"] is not None, "a helper")
        return int(self.client.status()["helpers"]["peer"]["pid"])

    @property
    def serving(self) -> dict[str, int]:
        figures: dict[str, int] = self.client.status()["operations"]["peer"]["serving"]
        return figures


StartNode = Callable[..., TestNode]


def start_node(
    stack: ExitStack,
    folder: Path,
    name: str,
    serve: dict[str, Any] | None = None,
    tier: dict[str, Any] | None = None,
    **tables: Any,
) -> TestNode:
    """Start a node. `serve`: what `[peer]` has besides a port and a name, `tier`: what `[l2.peers]` has; None: no such
    table."""
    (folder / name).mkdir()
    if serve is not None:
        tables["peer"] = {"node": name, "port": 0, **serve}
    if tier is not None:
        tables["l2"] = {"peers": {"type": "peer", "node": name, **tier}}
    server = stack.enter_context(embedded_server(folder / name, None, **tables))
    return TestNode(name, server, stack.enter_context(server.connect()))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StartNode]:
    """As `start_node`; all of them end with the test."""
    with ExitStack() as stack:
        yield partial(start_node, stack, tmp_path)
