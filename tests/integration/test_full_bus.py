"""A bus that is full, of a real server with subscribers that hang: of every kind of event what comes is dropped and
counted, and what was asked for is done as if nobody listened."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_testing.embedded import Json

pytest.importorskip("lmcache_mock", reason="needs the mock tier")

from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.errors import CacheError
from lmcache_core.observe.events import EVENTS
from lmcache_testing.waiting import WAIT_S, until

from ..conftest import Node

STUCK = 60  # subscribers of unwell_plugin.py: for 5 s each nobody is told anything
QUEUE = 400  # more than any of these acts brings about at once
TIER_OBJECTS = 16  # that the tier has room for
POOL_OBJECTS = 64  # that the pool of 4 MiB has room for


class World:
    """A server whose tier and whose subscribers do as files say."""

    def __init__(self, node: Node, tmp_path: Path) -> None:
        self.node = node
        self.control, self.stuck, self.told = tmp_path / "faults", tmp_path / "stuck", tmp_path / "events.jsonl"
        self.hangs = tmp_path / "stuck.hangs"
        hang = [option for n in range(STUCK) for option in (f"--subscribers.stuck{n}.path", str(self.stuck))]
        tier = ["type", "mock", "control", str(self.control), "capacity_bytes", "1MiB", "deadline_s", "20"]
        self.server = node.serve(
            *hang,
            *("--subscribers.jsonl.path", str(self.told), "--event-bus-queue-size", str(QUEUE), "--brittle.says", "no"),
            *(word if at % 2 else f"--l2.cold.{word}" for at, word in enumerate(tier)),
            *("--lease.write_ttl_s", "1"),
            size="4MiB",
        )
        self.client = node.client()
        self.numbers = iter(range(1 << 30))

    def events(self) -> Counter[str]:
        return Counter(json.loads(line)["event"] for line in self.told.read_text().splitlines())

    def figures(self) -> Json:
        found: dict[str, object] = self.client.status()["events"]
        return found

    def new(self, count: int = 1) -> list[bytes]:
        return [self.node.key(next(self.numbers)) for _ in range(count)]

    def store(self, keys: list[bytes]) -> None:
        done = self.client.store(keys, [self.node.payload(1)] * len(keys), namespace=self.node.namespace)
        assert done.stored == len(keys)

    def stored(self, count: int = 1) -> list[bytes]:
        """Objects that the tier has, too."""
        keys = self.new(count)
        self.store(keys)
        self.client.wait_stored(keys, namespace=self.node.namespace, timeout_s=WAIT_S)
        return keys

    # --- what brings events about: each is done once they are on the bus, or dropped ------------------------

    def stores(self) -> None:
        self.stored()

    def misses(self) -> None:
        assert self.client.lookup(self.new(), namespace=self.node.namespace, tiers=[]).hits == 0

    def clears(self) -> None:
        keys = self.stored()
        assert self.client.clear(self.node.namespace).objects >= 1
        self.client.lookup(keys, namespace=self.node.namespace, tiers=[])

    def loads(self) -> None:
        keys = self.stored()
        self.client.clear(self.node.namespace)
        assert self.client.lookup(keys, namespace=self.node.namespace, wait_s=WAIT_S).hits == 1

    def fills_the_pool(self) -> None:
        before = self.client.status()["l1"]["counters"]["evictions"]
        for _ in range(POOL_OBJECTS // 8 + 1):
            self.stored(8)
        assert self.client.status()["l1"]["counters"]["evictions"] > before

    def fills_the_tier(self) -> None:
        evicted = lambda: self.client.status()["tiers"]["tiers"][0]["deletes"]["evicted"]  # noqa: E731
        before = evicted()
        for _ in range(TIER_OBJECTS + 1):
            self.stored()
        until(lambda: evicted() > before, "the tier to evict")

    def comes_and_goes(self) -> None:
        with self.server.client(maps_pool=False) as client:
            client.noop()
        until(lambda: self.client.status()["sessions_connected"] == 1, "it to be gone")

    def forgets_a_lease(self) -> None:
        lease = self.client.prepare_store(self.new(), namespace=self.node.namespace)
        until(lambda: self.client.status()["l1"]["bytes_by_state"]["quarantined"], "the lease to expire")
        with pytest.raises(CacheError, match="expired"):
            lease.commit()
        until(lambda: not self.client.status()["l1"]["bytes_by_state"]["quarantined"], "the slot to be free")

    def breaks_the_tier(self) -> None:
        writes = lambda: self.client.status()["tiers"]["tiers"][0]["writes"]["breaker"]  # noqa: E731
        self.control.write_text("store error")
        until(lambda: self.store(self.new()) or writes() != "closed", "the breaker")
        self.control.unlink()
        until(lambda: self.store(self.new()) or writes() == "closed", "its end")

    def reports_blocks(self) -> None:
        blocks = EngineBlocks(hashes=[b"h" * 32], block_size=16)
        assert self.client.report_block_allocation(self.new(), blocks, namespace=self.node.namespace) == 1

    def breaks_a_request(self) -> None:
        with pytest.raises(CacheError, match="its log has the traceback"):
            self.client.operate("brittle", "anything")

    def changes_a_tier(self) -> None:
        self.client.tiers_drain("cold")
        self.client.tiers_reconfigure("cold", {"capacity_bytes": 1 << 20})


BRINGS: dict[Callable[[World], None], set[str]] = {
    World.stores: {"admitted", "tier_stored", "on_tiers"},
    World.misses: {"lookup"},
    World.clears: {"cleared", "removed"},
    World.loads: {"loaded"},
    World.fills_the_pool: {"evicted"},
    World.fills_the_tier: {"tier_removed"},
    World.comes_and_goes: {"session_opened", "session_ended"},
    World.forgets_a_lease: {"lease_expired", "quarantined"},
    World.breaks_the_tier: {"tier_state"},
    World.reports_blocks: {"blocks_reported"},
    World.breaks_a_request: {"fault"},
    World.changes_a_tier: {"tier_changed"},
}


@pytest.mark.usefixtures("unwell")
def test_a_full_bus_drops_and_counts_every_kind_of_event_and_holds_up_nothing(node: Node, tmp_path: Path) -> None:
    world = World(node, tmp_path)
    # Once while all is well: what each brings about is told.
    for act, kinds in BRINGS.items():
        before = world.events()
        act(world)
        until(
            lambda before=before, kinds=kinds: kinds <= {*(world.events() - before)},
            lambda k=kinds: (k, world.events()),
        )
    until(lambda: not world.figures()["queue"], "all to be told")
    # Nobody comes back, and nothing fits in.
    world.stuck.touch()
    world.misses()
    until(world.hangs.exists, "the first to hang")
    told, misses = world.events(), 1
    while (full := world.figures())["queue"] < QUEUE:
        world.misses()
        misses += 1
    for act, kinds in BRINGS.items():
        at_least = world.figures()["dropped"] + len(kinds)
        act(world)
        until(lambda at_least=at_least: world.figures()["dropped"] >= at_least, act)
        assert world.figures()["emitted"] == full["emitted"], act
    dropped = world.figures()["dropped"]
    # They come back: what waited is told, and of what was dropped how much it was.
    world.stuck.unlink()
    until(lambda: not world.figures()["queue"] and world.events()["missed"] > told["missed"], "them to come back")
    lines = [json.loads(line) for line in world.told.read_text().splitlines()]
    assert sum(line["events"] for line in lines if line["event"] == "missed") == world.figures()["dropped"] >= dropped
    assert world.events()["lookup"] == told["lookup"] + misses


@pytest.mark.usefixtures("unwell")
def test_a_server_ends_in_order_while_its_bus_is_full(node: Node, tmp_path: Path) -> None:
    world = World(node, tmp_path)
    world.stuck.touch()
    until(lambda: world.misses() or world.figures()["queue"] == QUEUE, "the bus to be full")
    world.server.signal(signal.SIGTERM)
    assert world.server.popen.wait(WAIT_S) == 0
    world.stuck.unlink()


def test_every_kind_of_event_is_dropped_here() -> None:
    """But four: `missed` is what tells of the others, `adopted` is the first of a server, before any waits, `recounted`
    follows the scan of a medium, which is over by then, and `eviction_changed` is of a policy that adapts."""
    here = {name for kinds in BRINGS.values() for name in kinds} | {"drain"}
    assert here == {str(kind.__struct_config__.tag) for kind in EVENTS} - {
        "missed",
        "adopted",
        "recounted",
        "eviction_changed",
    }
