"""A real server, a client, and one tier on a real service; every byte that comes back is checked."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json

KEYS = 16
NBYTES = 256 << 10
WAIT_S = 90.0  # a safety net: failovers take seconds, breakers pause for as long
TIER = "remote"
TIER_DEADLINE_S = 3.0  # what hangs is given up after it


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition; its value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
    return value


class World:
    """Keys are this world's own, so that tests can share a service."""

    def __init__(self, client: Client, label: str, nbytes: int = NBYTES) -> None:
        self.client = client
        self._label = label
        self._nbytes = nbytes
        self.namespace = Namespace("matrix", Layout("uint8", (nbytes,)))

    def key(self, number: int) -> bytes:
        return hashlib.sha256(f"{self._label} {number}".encode()).digest()

    def content(self, number: int) -> bytes:
        return hashlib.shake_256(f"{self._label} content {number}".encode()).digest(4096) * (self._nbytes // 4096)

    def status(self) -> Json:
        return self.client.status()

    @property
    def tier(self) -> Json:
        """The tier's part of the status."""
        tiers: list[Json] = self.status()["tiers"]["tiers"]
        (tier,) = tiers
        return tier

    def store(self, first: int, count: int = KEYS) -> range:
        """Store numbers into L1; the tier follows by itself."""
        numbers = range(first, first + count)
        keys = [self.key(number) for number in numbers]
        self.client.store(keys, [self.content(number) for number in numbers], namespace=self.namespace)
        return numbers

    def read(self, numbers: range, wait_s: float = 5.0) -> int:
        """How many come back. Each byte of a hit is compared; what missed must leave its buffer untouched."""
        keys = [self.key(number) for number in numbers]
        found = self.client.lookup(keys, namespace=self.namespace, hold=True, prefix=False, wait_s=wait_s)
        into = [bytearray(self._nbytes) for _ in keys]
        result = self.client.retrieve(keys, into, namespace=self.namespace, prefix=False, promise=found.promise)
        for number, status, buffer in zip(numbers, result.statuses, into, strict=True):
            expected = self.content(number) if status is Status.HIT else bytes(self._nbytes)
            assert bytes(buffer) == expected, f"object {number} came back {status} with wrong bytes"
        return sum(status is Status.HIT for status in result.statuses)

    def quiet(self) -> bool:
        """Nothing is on its way anywhere."""
        status = self.status()
        tiers = status["tiers"]
        return (
            not tiers["stores"]["in_flight_bytes"]
            and not tiers["stores"]["arrived"]
            and not any(tiers["stores"]["dirty"].values())
            and not tiers["lookups"]["loads_out"]
            and not status["lookups_waiting"]
            and not any(lane["running"] for tier in tiers["tiers"] for lane in tier["lanes"].values())
        )

    def stored_and_forgotten(self, first: int, count: int = KEYS) -> range:
        """In the tier, and no longer in L1."""
        numbers = self.store(first, count)
        until(self.quiet, "the stores")
        self.client.clear(self.namespace)
        return numbers

    def round_trip(self, first: int) -> bool:
        """Store to the tier, forget, and get everything back from there."""
        return self.read(self.stored_and_forgotten(first)) == KEYS

    def recover(self, first: int) -> None:
        """Everything works again, without a restart of the server."""
        attempts = iter(range(first, first + 1000 * KEYS, KEYS))
        until(lambda: self.round_trip(next(attempts)), f"the recovery; {json.dumps(self.tier, default=str)[:1500]}")

    def account(self) -> None:
        """Nothing is held for ever: no lease, no quarantined slot, no error of our own."""
        self.client.end_session()
        self.client.clear()
        until(self.quiet, "quiet")  # cleared first: a tier that takes nothing is owed its objects for ever

        def nothing_held() -> bool:
            l1 = self.status()["l1"]
            return not l1["used_bytes"] and not any(l1["leases_by_kind"].values()) and not l1["quarantine_by_session"]

        until(nothing_held, "the memory that was held")
        status = self.status()
        assert status["counters"].get("internal_errors", 0) == 0
        assert status["tiers"]["faults"] == 0
