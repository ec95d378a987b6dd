"""A tier that hangs under a real server: stores go on, nobody waits for it for ever, and the server ends without it."""

from __future__ import annotations

import signal
from itertools import count
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

from ..conftest import Node

BATCH = 16
ROUNDS = 32  # twice the pool


def late(client: Client) -> int:
    """Lookups and loads that waited in vain."""
    (tier,) = client.status()["tiers"]["tiers"]
    counts: Json = tier["counts"]
    return sum(counts.get(what, 0) for what in ("lookup_late", "load_late"))


@pytest.mark.parametrize("operation", ["store", "exists", "load", "delete", "scan", "any"])
def test_a_tier_that_hangs_holds_up_neither_stores_nor_the_end(node: Node, tmp_path: Path, operation: str) -> None:
    control = tmp_path / "control"
    tier = ("--l2.m.type", "mock", "--l2.m.control", str(control), "--l2.m.deadline_s", "1")
    server = node.serve(*tier, "--dirty", "keep", "--l2.m.capacity_bytes", "1MiB", "--drain_s", "600")
    client, namespace = node.client(), node.namespace
    first = [node.key(number) for number in range(8)]
    client.store(first, [node.payload(number) for number in range(8)], namespace=namespace)
    client.wait_stored(first, namespace=namespace)
    client.clear(namespace=namespace)
    control.write_text(f"{operation} hang\n")
    rounds = count()

    def goes_on() -> bool:
        number = next(rounds)
        keys = [node.key(1000 + BATCH * number + each) for each in range(BATCH)]
        stored = client.store(keys, [node.payload(number)] * BATCH, namespace=namespace)
        before = late(client)
        client.lookup([first[number % 8]], namespace=namespace, wait_s=2.0)
        return stored.stored == BATCH and late(client) == before and number > ROUNDS

    until(goes_on)
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0, "long before it has drained"


@pytest.mark.parametrize("owed", ["stores", "deletes"])
def test_a_drain_does_not_wait_for_a_tier_whose_lanes_are_known_to_hang(node: Node, tmp_path: Path, owed: str) -> None:
    """Its own deadlines are longer than any drain: lookups have shown that it hangs."""
    control = tmp_path / "control"
    tier = ("--l2.m.type", "mock", "--l2.m.control", str(control), "--l2.m.deadline_s", "600")
    server = node.serve(*tier, "--drain_s", "600")
    client, namespace = node.client(), node.namespace
    first = [node.key(number) for number in range(8)]
    client.store(first, [node.payload(number) for number in range(8)], namespace=namespace)
    client.wait_stored(first, namespace=namespace)
    control.write_text("any hang\n")
    if owed == "stores":
        client.store([node.key("new")], [node.payload(9)], namespace=namespace)
    else:
        found = client.lookup(first, namespace=namespace, identify=True)
        client.drop(first, namespace=namespace, incarnations=found.incarnations)
    numbers = count()

    def known_to_hang() -> bool:
        client.lookup([node.key(f"elsewhere {next(numbers)}")], namespace=namespace, wait_s=0.5)
        (tier,) = client.status()["tiers"]["tiers"]
        return bool(tier["reads"]["opened"])

    until(known_to_hang)
    assert client.status()["tiers"]["tiers"][0]["writes"]["breaker"] == "closed"
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert server.popen.stderr is not None
    text = server.popen.stderr.read()
    assert ("1 that tier m does not have" if owed == "stores" else "tier m may still have 8") in text
    assert "tier m was given up: lookup not done by its deadline" in text


def test_a_second_signal_ends_the_drain(node: Node) -> None:
    """Half a second after the first one: one that follows at once may be the same Ctrl-C, passed on by a wrapper."""
    slow = ["--l2.slow.type", "mock", "--l2.slow.bandwidth_bytes_s", "1024", "--l2.slow.deadline_s", "600"]
    server = node.serve(*slow, "--drain_s", "600")
    client = node.client()
    keys = [node.key(number) for number in range(8)]
    assert client.store(keys, [node.payload(0)] * 8, namespace=node.namespace).stored == 8
    client.close()

    def ended() -> bool:
        server.signal(signal.SIGTERM)
        return server.popen.poll() is not None

    until(ended)
    assert server.popen.returncode == 0
