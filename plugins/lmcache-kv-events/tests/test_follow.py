"""A router's view, rebuilt from KV events, equals where the objects are, whatever was done to the tiers.

The truth is asked of the pool, and read from the directories of the tiers: on a busy machine a tier may take longer to
say what it has than an explanation waits for. The router reads sockets, with nothing of ours.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tiers.object.format import tier_key
from lmcache_core.tokens.namespace import Namespace
from lmcache_kv_events.publisher import SNAPSHOT
from lmcache_testing.embedded import Json, server_settings
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_fs")

NBYTES = 4096
SPACE = Namespace("follow", Layout("uint8", (NBYTES,)))
OBJECTS = 24
SMALL = {"type": "fs", "capacity_bytes": 8 * 8192}  # evicts what the large one keeps
LARGE = {"type": "fs"}
FAR = {"type": "fs", "capacity_bytes": 12 * 8192, "locality": "remote"}
KEYS = [hashlib.sha256(b"key %d" % number).digest() for number in range(OBJECTS)]
BLOCKS = 18  # the other objects have blocks that some have, too: as objects of two tenants may
HASHES = [(number % BLOCKS + 1).to_bytes(8, "big") for number in range(OBJECTS)]
View = set[tuple[int, str]]  # blocks, and where they are: in the pool, on tiers of this node, or of other nodes, too


def applied(view: View, events: list[Json]) -> None:
    for event in events:
        if event["type"] == "AllBlocksCleared":
            view.clear()
            continue
        where = "CPU" if event["medium"] == "CPU" else event["locality"]
        named = {(number, where) for number in event["block_hashes"]}
        (view.update if event["type"] == "BlockStored" else view.difference_update)(named)


def blocks_of(number: int) -> EngineBlocks:
    return EngineBlocks([HASHES[number]], block_size=16, parent=None)


class Router:
    """Keeps a view by the events alone, and compares with a snapshot on request."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.view: View = set()
        self.seq = -1
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(f"ipc://{folder}/replay")

    def ask(self, what: bytes) -> list[tuple[int, list[Any]]]:
        self.dealer.send_multipart([b"", what])
        found = []
        while True:
            assert self.dealer.poll(60_000)
            _, _, seq, payload = self.dealer.recv_multipart()
            if not payload:
                return found
            found.append((int.from_bytes(seq, "big", signed=True), msgspec.msgpack.decode(payload)[1]))

    def replayed(self) -> View:
        for seq, events in self.ask((self.seq + 1).to_bytes(8, "big")):
            assert seq == self.seq + 1
            applied(self.view, events)
            self.seq = seq
        return self.view

    def snapshot(self) -> View:
        view: View = set()
        for _, events in self.ask(SNAPSHOT):
            applied(view, events)
        return view


class Follows(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kv"))
        self.name = f"f{uuid4().hex[:10]}"
        self.tiers = {"small": SMALL, "large": LARGE, "far": FAR}
        self.epoch = 0

    def tier(self, name: str) -> Json:
        return {"path": str(self.folder / name), **self.tiers[name]}

    @initialize()
    def start(self) -> None:
        self.serve()
        self.store({*range(OBJECTS // 2), *range(BLOCKS, OBJECTS)})

    def serve(self) -> None:
        events = {"endpoint": f"ipc://{self.folder}/kv", "replay_endpoint": f"ipc://{self.folder}/replay"}
        l1, l2 = {"size_bytes": 4 << 20, "keep_pool": True}, {name: self.tier(name) for name in self.tiers}
        settings = server_settings(self.folder, name=self.name, l1=l1, l2=l2, subscribers={"kv_events": events})
        self.server = Server(settings).start(wait=True)
        self.client = self.server.connect()
        self.client.register_layout(SPACE)
        self.router = Router(self.folder)

    def there(self) -> list[str]:
        return [each["name"] for each in self.client.tiers_list()]

    @rule(numbers=st.sets(st.integers(0, OBJECTS - 1), min_size=1, max_size=8))
    def store(self, numbers: set[int]) -> None:
        for number in numbers:
            self.client.store([KEYS[number]], [bytes([number]) * NBYTES], namespace=SPACE, blocks=blocks_of(number))
        self.client.wait_stored([KEYS[number] for number in numbers], namespace=SPACE, timeout_s=30)

    @rule(tiers=st.booleans())
    def clear(self, tiers: bool) -> None:
        self.client.clear(SPACE, tiers=tiers)
        self.epoch += tiers

    @rule()
    def load(self) -> None:
        self.client.lookup(KEYS, namespace=SPACE, wait_s=30, prefix=False)

    @rule(name=st.sampled_from(["small", "large", "far"]), connections=st.integers(1, 9))
    def reconfigure(self, name: str, connections: int) -> None:
        if name in self.there():
            self.client.tiers_reconfigure(name, {"connections": connections})

    @rule(name=st.sampled_from(["small", "large", "far"]))
    def drain(self, name: str) -> None:
        if name in self.there():
            self.client.tiers_drain(name)

    @rule(name=st.sampled_from(["small", "large", "far"]))
    def remove_or_add(self, name: str) -> None:
        if name in self.there():
            self.client.tiers_remove(name)
        else:
            self.client.tiers_add(name, self.tier(name))

    @rule(number=st.integers(0, OBJECTS - 1))
    def drop(self, number: int) -> None:
        into = [bytearray(NBYTES)]
        found = self.client.retrieve([KEYS[number]], into, namespace=SPACE)
        self.client.drop([KEYS[number]], namespace=SPACE, incarnations=list(found.incarnations))

    @rule()
    def restart(self) -> None:
        """The next server adopts the pool, has all tiers again, and the engine reports its blocks at once."""
        self.end()
        self.serve()
        for number, key in enumerate(KEYS):
            self.client.report_block_allocation([key], blocks_of(number), namespace=SPACE)

    @precondition(lambda self: hasattr(self, "server"))
    @invariant()
    def the_view_is_the_truth(self) -> None:
        until(lambda: self.router.replayed() == self.truth(), lambda: (self.router.view, self.truth()))
        until(lambda: self.router.snapshot() == self.truth(), "a snapshot is the truth, too")

    def truth(self) -> View:
        in_pool = self.client.lookup(KEYS, namespace=SPACE, tiers=[], prefix=False).statuses
        view = {(int.from_bytes(HASHES[at], "big"), "CPU") for at, s in enumerate(in_pool) if s.name == "GRANTED"}
        for name in self.there():
            files = {each.name for each in (self.folder / name / "objects").glob("*/*")}
            for key, block in zip(KEYS, HASHES, strict=True):
                if tier_key(key, SPACE.id, self.epoch).hex() in files:
                    view.add((int.from_bytes(block, "big"), "REMOTE" if name == "far" else "LOCAL"))
        return view

    def on_this_nodes_tiers(self) -> View:
        return {each for each in self.router.view if each[1] == "LOCAL"}

    def end(self) -> None:
        self.router.context.destroy(linger=0)
        self.client.close()
        self.server.stop()

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.end()
            for left in segment_path(self.name).parent.glob(f"{segment_path(self.name).name}*"):
                left.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)  # an adapter that closes may still remove its own files there


TestFollows = Follows.TestCase
TestFollows.settings = settings(
    max_examples=8,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def follows() -> Iterator[Follows]:
    made = Follows()
    made.start()
    yield made
    made.teardown()


def test_what_one_of_two_tiers_has_lost_is_still_on_storage(follows: Follows) -> None:
    follows.store(set(range(OBJECTS)))  # more than the small one holds
    follows.clear(tiers=False)
    follows.the_view_is_the_truth()
    assert len(follows.on_this_nodes_tiers()) == BLOCKS
    follows.remove_or_add("small")
    follows.the_view_is_the_truth()
    assert len(follows.on_this_nodes_tiers()) == BLOCKS
    follows.remove_or_add("large")
    follows.the_view_is_the_truth()
    assert {where for _, where in follows.router.view} == {"REMOTE"}, "what other nodes have, too, has not left"


def test_a_block_that_another_object_still_has_is_not_reported_as_removed(follows: Follows) -> None:
    assert HASHES[0] == HASHES[BLOCKS]
    follows.drop(0)
    follows.the_view_is_the_truth()
    assert (1, "CPU") in follows.router.view
    follows.drop(BLOCKS)
    follows.the_view_is_the_truth()
    assert (1, "CPU") not in follows.router.view


@pytest.mark.parametrize("change", [{"connections": 7}, {"wrap": ["latency:0.001"]}, {"capacity_bytes": 1 << 30}])
def test_a_reconfigured_tier_that_keeps_its_objects_empties_no_view(follows: Follows, change: Json) -> None:
    follows.remove_or_add("small")
    follows.clear(tiers=False)
    follows.the_view_is_the_truth()
    before = set(follows.router.view)
    follows.client.tiers_reconfigure("large", change)
    until(lambda: all(not tier.accounting.scanning for tier in follows.server.parts.l1.tiering.tiers), "the scan")
    follows.load()
    follows.the_view_is_the_truth()
    assert before <= follows.router.view


def test_a_tier_that_comes_back_with_its_objects_brings_them_back(follows: Follows) -> None:
    follows.remove_or_add("small")
    follows.clear(tiers=False)
    follows.remove_or_add("large")
    follows.the_view_is_the_truth()
    assert not follows.on_this_nodes_tiers()
    follows.remove_or_add("large")
    follows.the_view_is_the_truth()
    assert len(follows.on_this_nodes_tiers()) == OBJECTS // 2


def test_after_a_restart_a_router_knows_what_the_next_server_has_adopted(follows: Follows) -> None:
    follows.the_view_is_the_truth()
    there = {each for each in follows.router.view if each[1] == "CPU"}
    assert len(there) == OBJECTS // 2
    follows.restart()
    follows.the_view_is_the_truth()
    assert {each for each in follows.router.view if each[1] == "CPU"} >= there
    assert len(follows.on_this_nodes_tiers()) >= OBJECTS // 2
