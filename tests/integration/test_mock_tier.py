"""Servers over backends in trouble: slow, hung, gone, full, lying. Nothing waits in vain, nothing wrong is served."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.kernel.answers import Reason
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

from ..conftest import Node

KEYS = 20
FEW = 6  # more that look damaged mean that the way is broken
FAR_S = "600"  # a deadline that no test waits for


class Backend:
    """One mock tier of the server, and the file by which it is broken and healed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.control = folder / f"{name}.faults"

    def options(self, **settings: str) -> list[str]:
        settings = {"type": "mock", "control": str(self.control), **settings}
        return [word for name, value in settings.items() for word in (f"--l2.{self.name}.{name}", value)]

    def rules(self, *rules: str) -> None:
        """In force at the tier's next call. None given: it is well again."""
        assert main(["mock", str(self.control), *(rules or ["--heal"])]) == 0

    def status(self, client: Client) -> Json:
        tiers: list[Json] = client.status()["tiers"]["tiers"]
        return next(tier for tier in tiers if tier["name"] == self.name)

    def running(self, client: Client) -> int:
        """Calls that are out on its lanes."""
        return sum(lane["running"] for lane in self.status(client)["lanes"].values())

    def holds(self, client: Client, objects: int) -> None:
        until(lambda: self.status(client)["objects"] >= objects, f"{objects} objects in tier {self.name}")


@pytest.fixture
def bad(tmp_path: Path) -> Backend:
    return Backend("bad", tmp_path)


@pytest.fixture
def good(tmp_path: Path) -> Backend:
    return Backend("good", tmp_path)


def fill(node: Node, client: Client, first: int = 0, count: int = KEYS) -> list[bytes]:
    keys = [node.key(i) for i in range(first, first + count)]
    sources = [node.payload(i) for i in range(first, first + count)]
    assert client.store(keys, sources, namespace=node.namespace).stored == count
    return keys


def read_back(node: Node, client: Client, keys: list[bytes], **lookup: object) -> list[bytes | None]:
    """Look up, wait for the loads, retrieve, and check every byte of every hit; the lookup's answer."""
    lookup.setdefault("wait_s", 30.0)
    found = client.lookup(keys, namespace=node.namespace, hold=True, **lookup)
    into = [bytearray(65536) for _ in keys]
    result = client.retrieve(keys, into, namespace=node.namespace, promise=found.promise)
    assert result.hits >= found.hits
    for at in range(result.hits):
        assert bytes(into[at]) == node.payload(int(keys[at].lstrip(b"\0") or b"0"))
    return found


# --- hung -----------------------------------------------------------------------------------------------------
def test_a_hung_tier_delays_no_hit_no_noop_and_no_other_tier(node: Node, bad: Backend, good: Backend) -> None:
    node.serve(*bad.options(deadline_s=FAR_S), *good.options(deadline_s=FAR_S), "--l2_order", "bad,good")
    client = node.client()
    keys = fill(node, client)
    bad.holds(client, KEYS)
    good.holds(client, KEYS)
    client.clear(node.namespace)
    bad.rules("any hang")
    handle = client.lookup_nowait(keys[:1], namespace=node.namespace, tiers=["bad"])
    until(lambda: bad.running(client), "the hang")

    in_pool = fill(node, client, 100)
    assert read_back(node, client, in_pool).hits == KEYS
    client.noop()
    assert read_back(node, client, keys, tiers=["good"]).hits == KEYS
    client.clear(node.namespace)
    assert read_back(node, client, keys).hits == KEYS, "asked of both: the one that answers serves it"
    good.holds(client, 2 * KEYS)
    assert bad.running(client), "all of that while the other one hung"
    handle.cancel()


def test_a_held_lookup_that_is_cancelled_while_it_waits_leaves_no_promise_before_any_other_call(
    node: Node, bad: Backend
) -> None:
    node.serve(*bad.options(deadline_s=FAR_S))
    client, onlooker = node.client(), node.client()
    keys = fill(node, client, count=4)
    bad.holds(client, 4)
    bad.rules("any hang")
    missing = [node.key(number) for number in range(100, 104)]
    handle = client.lookup_nowait([*keys, *missing], namespace=node.namespace, hold=True, prefix=False)
    until(lambda: onlooker.status()["lookups_waiting"], "the lookup")
    handle.cancel()
    until(lambda: not onlooker.status()["lookups_waiting"], "the cancel")
    assert onlooker.status()["l1"]["leases_by_kind"].get("promise", 0) == 0


def test_loads_that_hang_are_late_and_the_tier_recovers_by_itself(node: Node, bad: Backend) -> None:
    node.serve(*bad.options(deadline_s="0.3"))
    client = node.client()
    keys = fill(node, client, count=4)
    bad.holds(client, 4)
    client.clear(node.namespace)
    bad.rules("load hang")
    found = client.lookup(keys, namespace=node.namespace, wait_s=30)
    assert found.hits == 0
    assert found.reasons[0] in (Reason.LATE, Reason.TIER_ERROR)
    bad.rules()
    until(lambda: read_back(node, client, keys).hits == 4, "the tier's recovery")


def test_no_wait_ends_early_on_a_server_that_has_nothing_else_to_do(node: Node, bad: Backend) -> None:
    node.serve(*bad.options(deadline_s=FAR_S))
    client = node.client()
    keys = fill(node, client, count=3)
    bad.holds(client, 3)
    client.clear(node.namespace)
    bad.rules("load hang")
    for key, wait_s in zip(keys, (0.2, 0.05, 0.35), strict=True):
        time.sleep(wait_s / 3)  # the loop is in its wait, as long as nothing happens
        before = time.monotonic()
        assert client.lookup([key], namespace=node.namespace, wait_s=wait_s).hits == 0
        assert time.monotonic() - before >= wait_s


def test_sigterm_ends_within_the_drain_although_the_tier_hangs(node: Node, bad: Backend) -> None:
    server = node.serve(*bad.options(deadline_s=FAR_S), "--drain_s", "1")
    client = node.client()
    bad.rules("any hang")
    fill(node, client)
    until(lambda: bad.running(client), "the hang")
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert not node.shm.exists()


# --- lying ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lie", ["flipped_bits", "neighbour", "short_read"])
def test_a_lying_tier_is_a_miss_with_its_reason_and_never_wrong_bytes(node: Node, bad: Backend, lie: str) -> None:
    node.serve(*bad.options())
    client = node.client()
    keys = fill(node, client)
    bad.holds(client, KEYS)
    client.clear(node.namespace)
    bad.rules(f"load {lie}")
    for key in keys[:FEW]:  # one by one: behind a miss, the other loads of a prefix are given up
        found = read_back(node, client, [key])
        assert (found.hits, found.reasons[0]) == (0, Reason.DAMAGED)
    bad.rules()
    fill(node, client, count=FEW)  # replaces what looked damaged, if no second look has found it sound
    assert read_back(node, client, keys).hits == KEYS


def test_a_tier_that_lies_now_and_then_serves_the_rest(node: Node, bad: Backend) -> None:
    node.serve(*bad.options(seed="7"))
    client = node.client()
    keys = fill(node, client, count=40)
    bad.holds(client, 40)
    client.clear(node.namespace)
    bad.rules("load flipped_bits rate=0.3")
    hits = 0
    for key in keys:
        found = read_back(node, client, [key])
        hits += found.hits
        assert found.hits or found.reasons[0] is Reason.DAMAGED
    assert 10 < hits < 40


def test_a_tier_that_loses_what_it_took_is_a_miss(node: Node, bad: Backend) -> None:
    node.serve(*bad.options())
    client = node.client()
    bad.rules("store lost")
    keys = fill(node, client)
    bad.holds(client, KEYS)
    client.clear(node.namespace)
    assert read_back(node, client, keys).hits == 0


# --- gone, full -----------------------------------------------------------------------------------------------
def test_a_tier_that_goes_and_comes_back_is_used_again_without_a_restart(node: Node, bad: Backend) -> None:
    server = node.serve(*bad.options())
    client = node.client()
    keys = fill(node, client)
    bad.holds(client, KEYS)
    client.clear(node.namespace)
    bad.rules("any gone")

    def left_alone() -> bool:
        found = client.lookup(keys, namespace=node.namespace, wait_s=30)
        assert (found.hits, found.reasons[0]) == (0, Reason.TIER_ERROR)
        return bool(bad.status(client)["reads"]["opened"])

    until(left_alone, "the breaker")
    others = fill(node, client, 100)
    assert read_back(node, client, others).hits == KEYS, "the pool serves on"
    bad.rules()
    until(lambda: read_back(node, client, keys).hits == KEYS, "the way back")
    more = fill(node, client, 200)
    bad.holds(client, 2 * KEYS)
    assert read_back(node, client, more).hits == KEYS
    assert server.popen.poll() is None
    assert os.getpgid(server.pid)


def test_a_full_tier_leaves_the_pool_as_it_is(node: Node, bad: Backend) -> None:
    node.serve(*bad.options(medium_bytes="256KiB", eviction="none"))
    client = node.client()
    keys = fill(node, client)
    until(lambda: bad.status(client)["counts"].get("store_full", 0) > 0, "the answer FULL")
    assert read_back(node, client, keys, tiers=[]).hits == KEYS


def test_buffer_only_mode_answers_full_when_the_tier_is_slower_than_the_writers(node: Node, bad: Backend) -> None:
    node.serve(*bad.options(bandwidth_bytes_s="16MiB"), "--store_policy", "skip_l1", "--l1.eviction", "noop")
    client = node.client()
    stored: list[bytes] = []
    batch = 32

    def store_more() -> bool:
        """Whether the pool had room for all: its policy never evicts, and the tier is still busy."""
        numbers = range(len(stored), len(stored) + batch)
        keys, sources = [node.key(n) for n in numbers], [node.payload(n) for n in numbers]
        result = client.store(keys, sources, namespace=node.namespace)
        assert set(result.statuses) <= {Status.STORED, Status.FULL}
        assert result.stored == result.statuses.count(Status.STORED), "a batch is granted from its beginning"
        stored.extend(keys[: result.stored])
        return bool(result.stored == batch)

    while store_more():
        assert len(stored) < 100_000, "the pool took more than it can hold"
    assert len(stored) * 65536 >= 8 << 20
    bad.holds(client, 1)
    until(store_more, "room again")
    bad.holds(client, len(stored))
    until(lambda: client.status()["l1"]["used_bytes"] == 0, "the last drop")
    for first in range(0, len(stored), 100):
        part = stored[first : first + 100]
        assert read_back(node, client, part).hits == len(part), "an object that was taken was lost"


# --- cleared --------------------------------------------------------------------------------------------------
def test_a_clear_under_a_load_wins(node: Node, bad: Backend) -> None:
    """What was loading when the clear came does not appear, however late the tier gives it."""
    node.serve(*bad.options(deadline_s=FAR_S), "--prefetch_policy", "retain")
    client = node.client()
    keys = fill(node, client)
    bad.holds(client, KEYS)
    client.clear(node.namespace)
    bad.rules("load hang")
    handle = client.lookup_nowait(keys, namespace=node.namespace)
    until(lambda: bad.running(client), "the loads")
    client.clear(node.namespace)
    assert not client.lookup(keys, namespace=node.namespace, tiers=[]).hits
    bad.rules()
    until(lambda: handle.done and not bad.running(client), "the end of the loads")
    assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == 0, "a load outlived the clear"
    assert client.status()["l1"]["used_bytes"] == 0
    # The same without a clear, so that the absence above means something.
    assert read_back(node, client, keys).hits == KEYS
    assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == KEYS


@pytest.mark.parametrize("rule", ["any slow s=0.15", "load hang", "store hang", "any error rate=0.5"])
def test_a_server_that_was_stopped_while_its_backend_is_in_trouble_goes_on(node: Node, bad: Backend, rule: str) -> None:
    server = node.serve(*bad.options(deadline_s="0.2"))
    client = node.client()
    keys = [node.key(i) for i in range(40)]
    payloads = [node.payload(i) for i in range(40)]

    def stored_and_read() -> int:
        """How many come back from the tier; what does is right."""
        client.store(keys, payloads, namespace=node.namespace)
        until(lambda: not client.status()["tiers"]["stores"]["in_flight_bytes"], "the stores")
        client.clear(node.namespace)
        found = client.lookup(keys, namespace=node.namespace, prefix=False, hold=True, wait_s=10)
        into = [bytearray(len(payload)) for payload in payloads]
        result = client.retrieve(keys, into, namespace=node.namespace, prefix=False, promise=found.promise)
        hits = [at for at, status in enumerate(result.statuses) if status is Status.HIT]
        assert all(bytes(into[at]) == payloads[at] for at in hits)
        return len(hits)

    until(lambda: stored_and_read() == 40, "all well")
    bad.rules(rule)
    client.clear(node.namespace)
    for first in range(0, 40, 10):
        client.store([node.key(f"more {i}") for i in range(first, first + 10)], payloads[:10], namespace=node.namespace)
        handle = client.lookup_nowait(keys[first : first + 10], namespace=node.namespace, wait_s=0.1)
        server.signal(signal.SIGSTOP)
        time.sleep(0.3)  # past the deadline of everything that is under way
        server.signal(signal.SIGCONT)
        until(lambda handle=handle: handle.done, "the lookup")
    bad.rules()
    until(lambda: stored_and_read() == 40, "the recovery")
    status = client.status()
    assert status["tiers"]["faults"] == 0
    assert status["counters"].get("internal_errors", 0) == 0
