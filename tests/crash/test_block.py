"""A server on a block medium that is killed while it stores: its successor has what was stored, and the right bytes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_testing.waiting import until

from ..conftest import Node

pytest.importorskip("lmcache_block")


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[Path]:
    """Large, so it goes with the test."""
    yield tmp_path / "medium"
    (tmp_path / "medium").unlink(missing_ok=True)


def options(medium: Path) -> list[str]:
    given = {"type": "block", "path": medium, "size_bytes": "64MiB", "extent_bytes": "2MiB", "io_mode": "buffered"}
    return [word for name, value in given.items() for word in (f"--l2.nvme.{name}", str(value))]


def store(client: Client, node: Node, numbers: range) -> None:
    keys = [node.key(number) for number in numbers]
    client.store(keys, [node.payload(number) for number in numbers], namespace=node.namespace)


def right_hits(client: Client, node: Node, numbers: range) -> int:
    """How many are found, each with its own bytes."""
    keys = [node.key(number) for number in numbers]
    client.lookup(keys, namespace=node.namespace, prefix=False, wait_s=30.0)
    into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
    retrieved = client.retrieve(keys, into, namespace=node.namespace)
    for number, status, content in zip(numbers, retrieved.statuses, into, strict=True):
        assert status is not Status.HIT or bytes(content) == node.payload(number), f"object {number} has other bytes"
    return retrieved.hits


def check(medium: Path) -> str:
    """What `lmcache-core check` prints."""
    command = [sys.executable, "-m", "lmcache_core", "check", "--l1.size_bytes", "16MiB", *options(medium)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


@pytest.mark.parametrize("turn", range(3))
def test_killed_server_loses_nothing_that_was_stored(node: Node, medium: Path, turn: int) -> None:
    rng = random.Random(turn)
    server = node.serve(*options(medium))
    client = node.client()
    stored = range(60)
    store(client, node, stored)
    assert all(each.stored for each in client.wait_stored([node.key(n) for n in stored], namespace=node.namespace))
    more = range(100, 100 + rng.randrange(20, 80))
    store(client, node, more)  # on their way when it ends
    server.kill()
    client.close()
    node.shm.unlink(missing_ok=True)
    node.serve(*options(medium))
    again = node.client()
    until(lambda: again.status()["tiers"]["tiers"][0]["objects"] >= len(stored))
    assert right_hits(again, node, stored) == len(stored)
    right_hits(again, node, more)


def test_medium_of_a_running_server_is_refused_by_another_until_that_is_killed(node: Node, medium: Path) -> None:
    server = node.serve(*options(medium))
    client = node.client()
    store(client, node, range(4))
    assert all(each.stored for each in client.wait_stored([node.key(n) for n in range(4)], namespace=node.namespace))
    assert "another process uses" in check(medium)
    server.kill()
    assert "an object was stored, loaded and deleted" in check(medium)
