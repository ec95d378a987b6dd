"""Masters, nodes and client processes that die, hang, or are full."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from services.mooncake_cluster import NODE_BYTES_MIN, MooncakeCluster, stop

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Outcome, Result, StoreItem
from lmcache_mooncake.adapter import MooncakeAdapter
from lmcache_mooncake.client import ABANDONED_MAX
from lmcache_mooncake.settings import MooncakeSettings

LIMIT_S = 60.0  # a safety net
NBYTES = 300_000
Open = Callable[..., MooncakeAdapter]


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(cluster: MooncakeCluster, **more: object) -> MooncakeAdapter:
            settings = {"master": cluster.address, "staging_bytes": 4 << 20, "call_timeout_s": 2, **more}
            adapter = MooncakeAdapter(MooncakeSettings.model_validate(settings), AdapterContext(tier="far"))
            stack.callback(adapter.close)
            return adapter

        yield make


def key(number: int) -> bytes:
    return b"key %4d" % number


def content(number: int) -> bytes:
    return number.to_bytes(4, "little") * (NBYTES // 4)


def soon(seconds: float = LIMIT_S) -> float:
    return time.monotonic() + seconds


def store(adapter: MooncakeAdapter, number: int, seconds: float = LIMIT_S) -> Outcome:
    return adapter.store([StoreItem(key(number), [memoryview(content(number))])], soon(seconds))[0]


def load(adapter: MooncakeAdapter, number: int, seconds: float = LIMIT_S) -> Outcome:
    """DONE only with the right bytes."""
    into = bytearray(NBYTES)
    (outcome,) = adapter.load([LoadItem(key(number), [memoryview(into)])], soon(seconds))
    if outcome.result is Result.DONE:
        assert into == content(number)
    return outcome


def until_done(call: Callable[[], Outcome]) -> Outcome:
    """The medium comes back by itself; the answers until then say that one may try again."""
    limit = soon()
    while (outcome := call()).result is not Result.DONE:
        assert outcome.result in (Result.THROTTLED, Result.FULL, Result.MISS) or outcome.retryable, outcome
        assert time.monotonic() < limit, outcome
    return outcome


def test_a_master_that_is_killed_is_used_again_once_it_is_back(
    own_cluster: Callable[..., MooncakeCluster], opened: Open
) -> None:
    cluster = own_cluster()
    adapter = opened(cluster)
    assert store(adapter, 1).result is Result.DONE
    cluster.kill_master()
    with pytest.raises(TierError):
        adapter.exists([key(1)], soon(3))
    for outcome in (store(adapter, 2, 3), load(adapter, 1, 3), adapter.delete([key(1)], soon(3))[0]):
        assert outcome.result is Result.FAILED
        assert outcome.retryable
    cluster.start_master()
    cluster.await_nodes(1)
    until_done(lambda: store(adapter, 3))
    assert load(adapter, 3).result is Result.DONE
    # A new master knows nothing of what nodes have.
    assert load(adapter, 1).result is Result.MISS


def test_objects_of_a_dead_node_are_misses_and_stores_go_to_the_others(
    own_cluster: Callable[..., MooncakeCluster], opened: Open
) -> None:
    cluster = own_cluster(64 << 20, 2)
    adapter = opened(cluster)
    numbers = range(24)
    assert all(store(adapter, number).result is Result.DONE for number in numbers)
    cluster.kill_node()
    # Until the master has noticed, its objects seem to be there.
    assert {load(adapter, number).result for number in numbers} <= {Result.DONE, Result.FAILED, Result.MISS}
    cluster.await_nodes(1)
    found = [load(adapter, number).result for number in numbers]
    assert set(found) == {Result.DONE, Result.MISS}
    assert adapter.exists([key(number) for number in numbers], soon()) == [one is Result.DONE for one in found]
    for number in numbers:
        until_done(lambda number=number: store(adapter, number))  # type: ignore[misc]
        assert load(adapter, number).result is Result.DONE


def test_a_second_replica_survives_its_node(own_cluster: Callable[..., MooncakeCluster], opened: Open) -> None:
    cluster = own_cluster(64 << 20, 2)
    adapter = opened(cluster, replicas=2)
    assert all(store(adapter, number).result is Result.DONE for number in range(8))
    cluster.kill_node()
    cluster.await_nodes(1)
    assert all(load(adapter, number).result is Result.DONE for number in range(8))


def test_a_store_without_a_node_is_full(own_cluster: Callable[..., MooncakeCluster], opened: Open) -> None:
    adapter = opened(own_cluster(64 << 20, 0))
    assert store(adapter, 1).result is Result.FULL
    assert load(adapter, 1).result is Result.MISS


def test_a_store_of_what_nobody_may_evict_is_full(own_cluster: Callable[..., MooncakeCluster], opened: Open) -> None:
    cluster = own_cluster(NODE_BYTES_MIN)
    cluster.door().ask("fill", "others", (NODE_BYTES_MIN - (1 << 20)).to_bytes(4, "little"))
    adapter = opened(cluster)
    assert Result.FULL in [store(adapter, number).result for number in range(4)]


def test_a_client_process_that_is_killed_costs_the_call_and_no_more(cluster: MooncakeCluster, opened: Open) -> None:
    adapter = opened(cluster)
    assert store(adapter, 1).result is Result.DONE
    for turn in range(3):
        pid = adapter.status()["pid"]
        stop(pid)  # so that the call is under way when it dies
        ended = subprocess.Popen([sys.executable, "-c", f"import os; os.kill({pid}, 9)"])
        outcome = load(adapter, 1)
        ended.wait()
        assert outcome.result is Result.FAILED
        assert outcome.retryable
        assert load(adapter, 1).result is Result.DONE
        assert adapter.status()["starts"] == turn + 2


def test_a_client_process_that_hangs_is_replaced_and_no_call_outlives_its_deadline(
    cluster: MooncakeCluster, opened: Open
) -> None:
    adapter = opened(cluster)
    assert store(adapter, 1).result is Result.DONE
    first = adapter.status()["pid"]
    stop(first)
    for _ in range(ABANDONED_MAX + 1):
        assert load(adapter, 1, 0.2).result is Result.FAILED
    assert load(adapter, 1).result is Result.DONE
    assert adapter.status()["pid"] != first
    assert adapter.status()["late_calls"] == 0


def test_a_late_call_writes_to_no_buffer_of_the_caller(cluster: MooncakeCluster, opened: Open) -> None:
    adapter = opened(cluster)
    assert store(adapter, 1).result is Result.DONE
    pid = adapter.status()["pid"]
    into = bytearray(NBYTES)
    stop(pid)
    (outcome,) = adapter.load([LoadItem(key(1), [memoryview(into)])], soon(0.2))
    assert outcome.result is Result.FAILED
    os.kill(pid, signal.SIGCONT)
    assert load(adapter, 1).result is Result.DONE, "by the same process, after the late one"
    assert adapter.status()["pid"] == pid
    assert not any(into)


def test_a_server_that_is_killed_leaves_no_client_process(cluster: MooncakeCluster) -> None:
    script = f"""
import os, signal, time
from lmcache_core.tiers.contract import AdapterContext
from lmcache_mooncake.adapter import MooncakeAdapter
from lmcache_mooncake.settings import MooncakeSettings
adapter = MooncakeAdapter(MooncakeSettings(master={cluster.address!r}), AdapterContext(tier="far"))
adapter.exists([b"key"], time.monotonic() + 60)
print(adapter.status()["pid"], flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = os.pidfd_open(int(server.stdout.readline()))
        try:
            server.kill()
            ended = select.poll()
            ended.register(pid, select.POLLIN)
            assert ended.poll(1000 * LIMIT_S)
        finally:
            os.close(pid)


def test_two_servers_that_replace_an_object_leave_one_of_theirs(cluster: MooncakeCluster, opened: Open) -> None:
    one, other = opened(cluster), opened(cluster)
    assert store(one, 1).result is Result.DONE
    for _ in range(10):
        for adapter in (one, other, other, one):
            assert store(adapter, 1).result is Result.DONE
            assert load(one, 1).result is load(other, 1).result is Result.DONE
    assert len(cluster.names()) == 1, "the name that was replaced is removed"
    assert one.delete([key(1)], soon())[0].result is Result.DONE
    assert not cluster.names()


def test_caches_with_two_prefixes_do_not_meet(cluster: MooncakeCluster, opened: Open) -> None:
    one, other = opened(cluster), opened(cluster, key_prefix="b/")
    assert store(one, 1).result is Result.DONE
    assert load(other, 1).result is Result.MISS
    assert one.medium() != other.medium()


@pytest.mark.parametrize("soft_pin_s", [3600, None])
def test_what_is_softly_pinned_is_evicted_last(
    own_cluster: Callable[..., MooncakeCluster], opened: Open, soft_pin_s: float | None
) -> None:
    """Older than what presses it out: without the pin it goes first. Leases end at once here: what is leased stays
    longer than what is pinned."""
    cluster = own_cluster(NODE_BYTES_MIN, 1, "--default_kv_lease_ttl=1")
    pinned, plain = opened(cluster, soft_pin_s=soft_pin_s), opened(cluster)
    old, new = range(8), range(100, 250)
    for adapter, numbers in ((pinned, old), (plain, new)):
        for number in numbers:
            until_done(lambda adapter=adapter, number=number: store(adapter, number))  # type: ignore[misc]
    names = cluster.names()
    assert len(names) < len(old) + len(new), "nothing was evicted"
    kept = [number for number in old if f"lmcache/{key(number).hex()}.0" in names]
    assert kept == (list(old) if soft_pin_s else [])
