"""Tenants with quotas, over a whole server with a disk: who is inside its quota loses nothing, whatever others do."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.client.client import Client
from lmcache_core.client.move.leases import WriteLease
from lmcache_core.client.results import Status
from lmcache_core.kernel.states import State
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.policies.contracts import EvictionPolicy
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tiers.object.format import HEADER_BYTES
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_fs")
pytest.importorskip("lmcache_policies")

LAYOUT = Layout("uint8", (16384,))
NBYTES = LAYOUT.nbytes
TENANTS = [Namespace(f"model {number}", LAYOUT) for number in range(3)]
QUOTAS = (16, 30, 18)  # objects, in the pool and on the disk: all that there is
QUIET, QUIET_KEYS = 0, 14  # it never wants more than that, which is inside its quota
OBJECTS = sum(QUOTAS)
LEASES_OPEN_MAX = 6


def key(number: int) -> bytes:
    return hashlib.sha256(b"tenant %d" % number).digest()


def isolated(nbytes: int) -> dict[str, object]:
    tenants = {
        f"t{number}": {"namespaces": [each.id], "quota_bytes": QUOTAS[number] * nbytes}
        for number, each in enumerate(TENANTS)
    }
    return {"type": "isolated", "tenants": tenants}


class Node:
    """A server whose pool and disk have room for `OBJECTS`, and one client of all tenants."""

    def __init__(self, folder: Path, dirty: str) -> None:
        self.disk = folder / "disk"
        stored_bytes = NBYTES + HEADER_BYTES
        made = server_settings(
            folder,
            l1={"size_bytes": OBJECTS * NBYTES, "backing": "memfd", "eviction": isolated(NBYTES)},
            l2={
                "disk": {
                    "type": "fs",
                    "path": str(self.disk),
                    "capacity_bytes": OBJECTS * stored_bytes,
                    "eviction": isolated(stored_bytes),
                }
            },
            dirty=dirty,
            store_wait_s=0.05,
            drain_s=0.2,
        )
        self.server = Server(made, load_plugins())
        assert self.server.parts.populator.wait(60)
        self.server.start()
        self.client: Client = self.server.connect()
        self.leases: list[WriteLease] = []
        self.stored: set[int] = set()  # of the quiet tenant

    def close(self) -> None:
        self.client.close()
        self.server.stop()

    def store(self, tenant: int, numbers: range) -> None:
        payloads = [hashlib.sha256(bytes([tenant, n])).digest() * (NBYTES // 32) for n in numbers]
        result = self.client.store([key(n) for n in numbers], payloads, namespace=TENANTS[tenant])
        if tenant == QUIET:
            self.stored |= {n for n, status in zip(numbers, result.statuses, strict=True) if status is Status.STORED}

    def grab(self, tenant: int, numbers: range) -> None:
        """Have slots to write to, and keep them for a while."""
        if tenant != QUIET and len(self.leases) < LEASES_OPEN_MAX:
            self.leases.append(self.client.prepare_store([key(n) for n in numbers], namespace=TENANTS[tenant]))

    def let_go(self, *, commit: bool) -> None:
        if self.leases:
            lease = self.leases.pop(0)
            if commit:
                lease.commit()
            lease.close()

    def load(self, tenant: int, numbers: range) -> None:
        """Also from the disk."""
        keys = [key(n) for n in numbers]
        into = [bytearray(NBYTES) for _ in keys]
        found = self.client.lookup(keys, namespace=TENANTS[tenant], prefix=False, wait_s=5.0, hold=True)
        self.client.retrieve(keys, into, namespace=TENANTS[tenant], prefix=False, promise=found.promise)

    def lost(self) -> set[int]:
        """What the quiet tenant had stored, and the pool has no more."""
        numbers = sorted(self.stored)
        keys = [key(n) for n in numbers]
        found = self.client.lookup(keys, namespace=TENANTS[QUIET], prefix=False, tiers=[]).statuses
        return {n for n, status in zip(numbers, found, strict=True) if status is not Status.GRANTED}

    def settle(self) -> None:
        """Until the disk has what it is to have, and nothing is on its way."""

        def quiet() -> bool:
            told = self.client.status()["tiers"]
            stores, (tier,) = told["stores"], told["tiers"]
            busy = stores["arrived"] or any(stores["dirty"].values()) or stores["in_flight_bytes"]
            return not (busy or tier["bytes_reserved"] or tier["bytes_leaving"] or told["lookups"]["loads_out"])

        until(quiet, "the disk")

    def accounts_are_right(self) -> None:
        """Books against the medium, and what the policies count against what stands in slots and files."""

        def agree() -> bool:  # what was on its way as somebody looked is there a moment later
            (tier,) = self.client.status()["tiers"]["tiers"]
            files = [path for path in self.disk.rglob("*") if path.is_file() and path.stat().st_size >= NBYTES]
            return (tier["objects"], tier["bytes_used"]) == (len(files), len(files) * (NBYTES + HEADER_BYTES))

        until(agree, "books and medium to agree")
        (disk,) = self.server.tiering.tiers  # type: ignore[union-attr]
        residents, books = self.server.parts.kernel.residents, disk.accounting

        def believed(policy: EvictionPolicy) -> dict[int, int]:
            return {namespace: tenant.used_bytes for namespace, tenant in policy.inner.owners.items()}

        def counted(entries: Iterable[Any]) -> dict[int, int]:
            found = Counter[int]()
            for entry in entries:
                found[entry.namespace] += entry.nbytes
            return {each.id: found[each.id] for each in TENANTS}

        def policies_agree() -> bool:  # promises end by themselves, and what they kept is evicted while somebody looks
            slots = [item for item in residents.allocator.walk() if item is not None]
            in_slots = [item for item in slots if item.state is not State.FREE]
            on_disk = [entry for shard in books.shards() for entry in list(shard)]
            return (believed(residents.policy), believed(books.policy)) == (counted(in_slots), counted(on_disk))

        until(policies_agree, "policies to count what is there")


NUMBERS = st.tuples(st.integers(0, 120), st.integers(1, 40)).map(lambda each: range(each[0], sum(each)))
NOISY = st.integers(1, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), NOISY, NUMBERS),
        st.tuples(st.just("store"), NOISY, NUMBERS),
        st.tuples(st.just("store"), st.just(QUIET), st.integers(0, QUIET_KEYS - 2).map(lambda n: range(n, n + 2))),
        st.tuples(st.just("grab"), NOISY, NUMBERS),
        st.tuples(st.just("load"), NOISY, NUMBERS),
        st.tuples(st.sampled_from(["commit", "abort", "settle"])),
    ),
    min_size=8,
    max_size=24,
)


@settings(max_examples=12, deadline=None)
@given(dirty=st.sampled_from(["drop", "keep", "wait"]), steps=STEPS)
def test_no_bursts_take_anything_from_a_tenant_inside_its_quota_in_pool_or_tier(
    dirty: str, steps: list[tuple[Any, ...]]
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    node = Node(folder, dirty)
    try:
        node.store(QUIET, range(4))
        for what, *about in steps:
            match what:
                case "store" | "grab" | "load":
                    getattr(node, what)(*about)
                case "commit" | "abort":
                    node.let_go(commit=what == "commit")
                case "settle":
                    node.settle()
            assert not node.lost(), f"the pool lost what a tenant inside its quota has, at {what}"
        while node.leases:
            node.let_go(commit=False)
        node.settle()
        (disk,) = node.server.tiering.tiers  # type: ignore[union-attr]
        on_disk = disk.accounting
        there = {entry.key for shard in on_disk.shards() for entry in shard if entry.namespace == TENANTS[QUIET].id}
        assert there == {key(number) for number in node.stored}, "and the disk has all of it"
        node.accounts_are_right()
    finally:
        node.close()
        shutil.rmtree(folder)
