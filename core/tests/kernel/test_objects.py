"""The table of residents, and what is remembered of those that are gone."""

from __future__ import annotations

from kernel_words import LAYOUT, MIB, NS, NS2, WORKER, keys

from lmcache_core.kernel import Incarnation, Kernel, KernelConfig, Reason
from lmcache_core.kernel.objects import SHARD_FROM_KEYS, ObjectTable
from lmcache_core.kernel.reasons import MissReasons
from lmcache_core.policies.lru import LruEviction


def item(number: int, namespace: int = NS) -> Incarnation:
    made = Incarnation()
    made.key, made.namespace = keys(number)[0], namespace
    return made


def test_a_namespace_that_grows_is_split_and_loses_nothing() -> None:
    table = ObjectTable()
    items = [item(number * 7919) for number in range(SHARD_FROM_KEYS + 500)]
    for made in items:
        within = table.made(NS, 1)
        within.shards[(made.key[0] ^ made.key[31]) & within.mask][made.key] = made
    assert len(table.of(NS).shards) > 1
    assert all(table.of(NS).get(made.key) is made for made in items)
    assert len(table.of(NS)) == len(items) == len(set(table.of(NS)))
    table.remove(items[:-1])
    assert list(table.of(NS)) == items[-1:]


def test_an_empty_namespace_costs_nothing_more() -> None:
    table = ObjectTable()
    for namespace in (NS, NS2):
        made = item(1, namespace)
        table.made(namespace, 1).shards[0][made.key] = made
    table.remove([table.of(NS).get(keys(1)[0]), table.of(NS2).get(keys(1)[0])])  # type: ignore[list-item]
    assert table.namespaces == {}


def test_a_reason_belongs_to_its_namespace() -> None:
    reasons = MissReasons(100)
    reasons.note([item(1)], Reason.EVICTED)
    assert reasons.of(NS, keys(1)[0]) == Reason.EVICTED
    assert reasons.of(NS2, keys(1)[0]) == Reason.NEVER_STORED


def test_reasons_are_bounded_and_the_oldest_are_forgotten_first() -> None:
    reasons = MissReasons(100)
    for number in range(1000):
        reasons.note([item(number)], Reason.EVICTED)
    known = [number for number in range(1000) if reasons.of(NS, keys(number)[0]) == Reason.EVICTED]
    assert 75 <= len(known) <= 100
    assert known == list(range(1000 - len(known), 1000))


def test_thousands_of_residents_are_found_evicted_and_cleared() -> None:
    kernel = Kernel(KernelConfig(pool_bytes=16 * MIB, slab_bytes=MIB), LruEviction(), epoch=1)
    kernel.add_memory(16 * MIB)
    kernel.register_layout(LAYOUT, 4096)
    kernel.open_session(WORKER, uid=1)
    kernel.attach_session(WORKER, 1)
    for first in range(0, 8192, 512):
        page = keys(*range(first, first + 512))
        lease = kernel.prepare_store(WORKER, NS, LAYOUT, page, 0.0).lease_id
        kernel.commit_store(WORKER, lease, 0.0)
    newest, older = keys(*range(8191, 8191 - 1024, -1)), keys(*range(1024))
    assert not any(kernel.lookup(WORKER, NS, newest, 0.0).statuses)
    assert all(kernel.lookup(WORKER, NS, older, 0.0).statuses)
    assert kernel.clear(0.0, NS).objects == 4096
    assert kernel.usage().used_bytes == 0
