"""A server with its copier, and an engine's memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Client, Layout, Namespace, PageGroup, Region
from lmcache_core.server.server import Server
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import until

PAGES = 64


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(count: int, first: int = 0) -> list[bytes]:
    return [key(first + each) for each in range(count)]


def group_of(
    buffer: Any, page_bytes: int, regions: int = 2, per_object: int = 2, pages: int = PAGES, gap: int = 0, **more: Any
) -> PageGroup:
    """Regions one behind the other in `buffer`, with gaps between pages."""
    stride = page_bytes + gap
    places = [Region(buffer, at * pages * stride, page_bytes, stride, pages) for at in range(regions)]
    nbytes = page_bytes * regions * per_object
    return PageGroup(Namespace(f"m{page_bytes}", Layout("uint8", (nbytes,))), places, per_object, **more)


@dataclass
class Node:
    """A server with a copier."""

    server: Server
    client: Client
    folder: Path

    @property
    def helper(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.status()["helpers"]["copier"]
        return found

    @property
    def pid(self) -> int:
        """Of the copier."""
        until(lambda: self.helper["pid"] is not None and self.path.exists(), "a copier")
        return int(self.helper["pid"])

    @property
    def path(self) -> Path:
        return self.folder / "run" / self.server.parts.settings.name / "copier"

    @property
    def figures(self) -> dict[str, int]:
        found: dict[str, int] = self.client.status()["operations"]["copier"]["copier"]
        return found

    @property
    def l1(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.status()["l1"]
        return found

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid
        os.kill(pid, number)
        return pid


def start_node(stack: ExitStack, folder: Path, **tables: Any) -> Node:
    tables.setdefault("copier", {})
    server = stack.enter_context(embedded_server(folder, None, **tables))
    name, run = server.parts.settings.name, folder / "run"
    client = stack.enter_context(Client.connect(name, runtime_dir=run))
    node = Node(server, client, folder)
    until(node.path.exists, "the copier's socket")
    return node


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with ExitStack() as stack:
        yield partial(start_node, stack, tmp_path)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """For tests that change nothing but objects, each in a namespace or under keys of its own."""
    with ExitStack() as stack:
        yield start_node(stack, tmp_path_factory.mktemp("node"))
