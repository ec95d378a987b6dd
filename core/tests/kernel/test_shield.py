"""What tiers do not have yet leaves a full pool last, or not at all; a page may be granted more before its answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_words import LAYOUT, MIB, OTHER, WORKER

from lmcache_core.errors import LeaseExpiredError
from lmcache_core.kernel import Kernel, KernelConfig
from lmcache_core.kernel.answers import Grant, Grants, Reason, Settled
from lmcache_core.kernel.states import State
from lmcache_core.policies.lru import LruEviction

NAMESPACE = 5
SLOTS = 8


def keys(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def store(kernel: Kernel, first: int, count: int, now: float = 0.0) -> list[tuple[bytes, int]]:
    """The names of what was committed."""
    grants = kernel.prepare_store(WORKER, NAMESPACE, LAYOUT, keys(first, count), now)
    assert set(grants.statuses) == {Grant.GRANTED}
    kernel.commit_store(WORKER, grants.lease_id, now)
    return [(each, grants.generation) for each in keys(first, count)]


def ready(kernel: Kernel) -> set[bytes]:
    return {item.key for item in kernel.residents.table.of(NAMESPACE) if item.state is State.READY}


def test_what_tiers_have_goes_first_however_lately_it_was_used(kernel: Kernel) -> None:
    store(kernel, 0, 4)
    kernel.shield(NAMESPACE, store(kernel, 4, 4))
    read = kernel.prepare_retrieve(WORKER, NAMESPACE, keys(0, 4), 1.0)
    kernel.finish_read(WORKER, read.lease_id, 1.0)
    store(kernel, 10, 4, 2.0)
    assert ready(kernel) == set(keys(4, 4) + keys(10, 4))


def test_where_nothing_else_can_go_the_oldest_does(kernel: Kernel) -> None:
    for at in range(0, SLOTS, 2):
        kernel.shield(NAMESPACE, store(kernel, at, 2))
    store(kernel, 10, 3)
    assert ready(kernel) >= set(keys(4, 4))
    assert kernel.shielded == 5


def test_what_must_be_kept_goes_for_no_store(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(keeps_dirty=True)
    names = store(kernel, 0, SLOTS)
    kernel.shield(NAMESPACE, names)
    grants = kernel.prepare_store(WORKER, NAMESPACE, LAYOUT, keys(10, 2), 1.0)
    assert list(grants.statuses) == [Grant.FULL] * 2
    kernel.unshield(NAMESPACE, names[:2])
    store(kernel, 10, 2, 2.0)
    assert ready(kernel) == set(keys(2, 6) + keys(10, 2))


def test_headroom_is_made_of_nothing_that_tiers_do_not_have(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(watermark=0.5, evict_ratio=0.5)
    kernel.shield(NAMESPACE, store(kernel, 0, SLOTS))
    assert kernel.trim(1.0) == 0


@pytest.mark.parametrize("how", ["clear", "drop", "damaged"])
def test_what_leaves_the_index_is_shielded_no_longer(kernel: Kernel, how: str) -> None:
    names = store(kernel, 0, 4)
    kernel.shield(NAMESPACE, names)
    if how == "clear":
        kernel.begin_clear(1.0, NAMESPACE)
        kernel.free_cleared(1.0)
    elif how == "drop":
        kernel.drop_incarnations(NAMESPACE, names, 1.0, Reason.DROPPED)
    else:
        read = kernel.prepare_retrieve(WORKER, NAMESPACE, keys(0, 4), 1.0)
        kernel.report_damaged(WORKER, read.lease_id, 1.0, range(4))
    assert kernel.shielded == 0
    assert kernel.usage().used_bytes == 0
    kernel.unshield(NAMESPACE, names)  # what comes later is no error


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), keeps=st.booleans())
def test_nothing_that_tiers_lack_goes_while_something_else_can(seed: int, keeps: bool) -> None:
    rng = random.Random(seed)
    config = KernelConfig(pool_bytes=SLOTS * MIB, slab_bytes=MIB, keeps_dirty=keeps, read_ttl_s=1e6, write_ttl_s=1e6)
    kernel = Kernel(config, LruEviction(), epoch=1)
    kernel.add_memory(SLOTS * MIB)
    kernel.register_layout(LAYOUT, MIB)
    kernel.open_session(WORKER, uid=1)
    kernel.attach_session(WORKER, row=1)
    dirty: dict[bytes, int] = {}  # key → generation
    reads: dict[int, list[bytes]] = {}
    for number in range(0, 400, 4):
        held = {each for read in reads.values() for each in read}
        before = ready(kernel)
        match rng.choice(("store", "store", "clean", "read", "finish", "drop")):
            case "store":
                grants = kernel.prepare_store(WORKER, NAMESPACE, LAYOUT, keys(number, rng.randint(1, 4)), 0.0)
                granted = [each for each, status in zip(keys(number, 4), grants.statuses, strict=False) if not status]
                left = ready(kernel)
                could_go = {each for each in left if each not in dirty and each not in held}
                if (before - left) & dirty.keys():
                    assert not keeps
                    assert not could_go, "one of these should have gone"
                if len(granted) < len(grants.statuses):
                    assert not could_go
                kernel.commit_store(WORKER, grants.lease_id, 0.0)
                kernel.shield(NAMESPACE, [(each, grants.generation) for each in granted])
                dirty.update(dict.fromkeys(granted, grants.generation))
            case "clean" if dirty:
                chosen = rng.sample(sorted(dirty), rng.randint(1, len(dirty)))
                kernel.unshield(NAMESPACE, [(each, dirty.pop(each)) for each in chosen])
            case "read" if before:
                chosen = rng.sample(sorted(before), 1)
                reads[kernel.prepare_retrieve(WORKER, NAMESPACE, chosen, 0.0).lease_id] = chosen
            case "finish" if reads:
                lease = rng.choice(list(reads))
                del reads[lease]
                kernel.finish_read(WORKER, lease, 0.0)
            case "drop" if before:
                chosen = rng.choice(sorted(before))
                kernel.drop(NAMESPACE, [chosen], 0.0, Reason.DROPPED)
        dirty = {each: generation for each, generation in dirty.items() if each in ready(kernel)}
        assert kernel.shielded <= len(dirty)
    kernel.unshield(NAMESPACE, list(dirty.items()))
    for lease in reads:
        kernel.finish_read(WORKER, lease, 0.0)
    assert kernel.shielded == 0
    assert all(not item.holds for item in kernel.residents.table.of(NAMESPACE))


# --- more for a page that nobody was told of --------------------------------------------------------------------


def full_page(kernel: Kernel, taken: int, wanted: int) -> Grants:
    """A page of which `SLOTS - taken` are granted: OTHER is writing the rest of the pool."""
    kernel.prepare_store(OTHER, NAMESPACE, LAYOUT, keys(100, taken), 0.0)
    grants = kernel.prepare_store(WORKER, NAMESPACE, LAYOUT, keys(0, wanted), 0.0)
    assert list(grants.statuses) == [Grant.GRANTED] * (SLOTS - taken) + [Grant.FULL] * (wanted - SLOTS + taken)
    return grants


@pytest.mark.parametrize("taken", [5, SLOTS])
def test_what_was_full_is_granted_in_its_own_position(kernel: Kernel, taken: int) -> None:
    grants = full_page(kernel, taken, 6)
    kernel.session_dead(OTHER, 1.0)
    kernel.grant_more(WORKER, NAMESPACE, LAYOUT, keys(0, 6), grants, 2.0)
    assert list(grants.statuses) == [Grant.GRANTED] * 6
    assert len(set(grants.offsets)) == 6
    assert kernel.lease_status(WORKER, grants.lease_id, 2.0).answers == bytes([Settled.OPEN] * 6)
    assert kernel.commit_store(WORKER, grants.lease_id, 2.0, range(2)) == bytes([Settled.COMMITTED] * 2)
    kernel.abort_store(WORKER, grants.lease_id, 2.0, range(2, 4))
    kernel.commit_store(WORKER, grants.lease_id, 2.0, range(4, 6))
    assert ready(kernel) == set(keys(0, 2) + keys(4, 2))
    assert kernel.usage().leases_by_kind["write"] == 0
    found = kernel.prepare_retrieve(WORKER, NAMESPACE, keys(0, 1), 2.0)
    assert found.offsets[0] == grants.offsets[0]


def test_a_second_page_is_granted_more_behind_the_first(kernel: Kernel) -> None:
    first = kernel.prepare_store(WORKER, NAMESPACE, LAYOUT, keys(50, 2), 0.0)
    kernel.prepare_store(OTHER, NAMESPACE, LAYOUT, keys(100, 6), 0.0)
    second = kernel.prepare_store(WORKER, NAMESPACE, LAYOUT, keys(0, 3), 0.0, lease_id=first.lease_id)
    assert list(second.statuses) == [Grant.FULL] * 3
    kernel.commit_store(WORKER, first.lease_id, 0.0, range(2))  # the lease is settled, and opens again
    kernel.session_dead(OTHER, 1.0)
    kernel.grant_more(WORKER, NAMESPACE, LAYOUT, keys(0, 3), second, 2.0)
    assert list(second.statuses) == [Grant.GRANTED] * 3
    kernel.commit_store(WORKER, first.lease_id, 2.0, range(2, 5))
    assert ready(kernel) == set(keys(50, 2) + keys(0, 3))


def test_a_page_whose_lease_has_expired_gets_no_more(kernel: Kernel) -> None:
    grants = full_page(kernel, 5, 6)
    with pytest.raises(LeaseExpiredError):
        kernel.grant_more(WORKER, NAMESPACE, LAYOUT, keys(0, 6), grants, 100.0)


def test_what_somebody_else_stored_meanwhile_is_said_to_be_there(kernel: Kernel) -> None:
    grants = full_page(kernel, SLOTS, 2)
    kernel.session_dead(OTHER, 1.0)
    kernel.open_session(33, uid=1, row=3)
    kernel.attach_session(33, 3)
    theirs = kernel.prepare_store(33, NAMESPACE, LAYOUT, keys(0, 1), 1.0)
    kernel.commit_store(33, theirs.lease_id, 1.0)
    kernel.grant_more(WORKER, NAMESPACE, LAYOUT, keys(0, 2), grants, 2.0)
    assert list(grants.statuses) == [Grant.EXISTS, Grant.GRANTED]
