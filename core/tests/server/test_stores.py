"""A store that needs whole slabs of others is answered when they are empty, and holds nobody up until then."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_core import PageEntry, PageGroup, Region, Status
from lmcache_core.client.client import Client
from lmcache_core.errors import LeaseExpiredError
from lmcache_core.kernel.answers import Grant
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.server.server import Server
from lmcache_core.tiers.l1 import LoadGrant, Loading
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

from .conftest import keys

SMALL = Namespace("small", Layout("uint8", (4096,)))
LARGE = Namespace("large", Layout("uint8", (8 << 20,)))
WAIT_S = 60.0


@pytest.fixture
def full(server: Server, client: Client) -> Server:
    """A pool full of small objects."""
    count = server.parts.segment.info.data_bytes // 4096
    assert client.store(keys(count), [bytes(4096)] * count, namespace=SMALL).stored == count
    return server


@pytest.fixture
def go(full: Server, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The kernel takes its steps only once this is set."""
    go = threading.Event()
    step = full.parts.kernel.step
    monkeypatch.setattr(full.parts.kernel, "step", lambda now: step(now) if go.is_set() else None)
    return go


def seen(server: Server, what: Callable[[], bool]) -> bool:
    """Whether it is so, on the loop."""
    answers: list[bool] = []
    asked = threading.Event()

    def ask() -> None:
        answers.append(what())
        asked.set()

    server.parts.loop.call(ask)
    assert asked.wait(WAIT_S)
    return answers[0]


def wait_for(server: Server, what: Callable[[], bool]) -> None:
    """Until it is so."""
    assert any(seen(server, what) for _ in range(100_000)), "it never came to be"


def test_a_store_that_waits_for_room_is_answered_with_all_of_it_and_others_go_first(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        outcome: list[int] = []
        thread = threading.Thread(
            target=lambda: outcome.append(other.store(keys(1, 1 << 20), [bytes(8 << 20)], namespace=LARGE).stored)
        )
        thread.start()
        wait_for(full, lambda: full.parts.stores.under_way == 1)
        assert client.lookup(keys(4), namespace=SMALL).hits >= 0, "nobody waits for it"
        assert client.status()["stores_preparing"] == 1
        go.set()
        thread.join(WAIT_S)
        assert outcome == [1]
    status = client.status()
    assert (status["stores_preparing"], status["stores_prepared"]) == (0, 1)


def test_the_layout_of_a_store_that_waits_for_room_is_forgotten_by_nobody(
    full: Server, client: Client, go: threading.Event
) -> None:
    wanted, outcome = keys(1, 1 << 20), list[int]()
    with full.connect("other") as other:
        thread = threading.Thread(
            target=lambda: outcome.append(other.store(wanted, [b"x" * (8 << 20)], namespace=LARGE).stored)
        )
        thread.start()
        wait_for(full, lambda: full.parts.stores.under_way == 1)
        full.parts.shares.layouts.total = 16
        for nbytes in range(5000, 5032):  # so many that the session forgets its older ones
            other.lookup(keys(1), namespace=Namespace("another", Layout("uint8", (nbytes,))))
        assert full.parts.l1.counters["layouts_forgotten"] > 0
        go.set()
        thread.join(WAIT_S)
        assert outcome == [1]
        into = bytearray(8 << 20)
        assert other.retrieve(wanted, [into], namespace=LARGE).hits == 1
        assert into == b"x" * (8 << 20)


def test_a_client_that_goes_while_its_grant_is_prepared_leaves_nothing(
    full: Server, client: Client, go: threading.Event
) -> None:
    other = full.connect("other")
    other.lookup(keys(1), namespace=SMALL)
    thread = threading.Thread(target=lambda: other.store(keys(1, 1 << 20), [bytes(8 << 20)], namespace=LARGE))
    thread.start()
    wait_for(full, lambda: full.parts.stores.under_way == 1)
    peer = next(session.peer for session in full.parts.sessions if session.name == "other")
    full.parts.loop.call(peer.drop)
    wait_for(full, lambda: full.parts.stores.under_way == 0)
    go.set()
    thread.join(WAIT_S)  # its call is made again, over another connection
    other.close()
    wait_for(full, lambda: not full.parts.kernel.working)
    usage = full.parts.kernel.usage()
    assert usage.objects_by_state["writing"] == 0
    assert usage.emptying_bytes == 0


def test_an_end_of_a_session_ends_its_grants_in_preparation_and_says_so(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        other.register_layout(SMALL)
        other.register_layout(LARGE)
        channel = other.links.current().channel
        waiting = [channel.start(m.PrepareStore(0, LARGE.id, join_keys(keys(1, (1 << 20) + at)))) for at in range(3)]
        wait_for(full, lambda: full.parts.stores.under_way == 3)
        assert isinstance(channel.call(m.EndSession(0, leases=None)), m.Done)
        # Each was answered before the end, though the kernel has not taken a step since.
        for each in waiting:
            with pytest.raises(LeaseExpiredError, match="session was ended"):
                channel.poll(each)
        assert seen(full, lambda: not full.parts.stores.under_way and not full.parts.kernel.preparing)
        go.set()
        wait_for(full, lambda: not full.parts.kernel.working)
        usage = full.parts.kernel.usage()
        assert (usage.objects_by_state["writing"], usage.emptying_bytes) == (0, 0)
        assert not any(usage.leases_by_kind.values())
        # The session goes on, with new ones.
        assert other.store(keys(1, 1 << 21), [bytes(8 << 20)], namespace=LARGE).stored == 1


def test_a_page_in_preparation_of_a_lease_that_its_client_ends_is_granted_nothing(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        other.register_layout(SMALL)
        other.register_layout(LARGE)
        channel = other.links.current().channel
        go.set()
        first = channel.call(m.PrepareStore(0, LARGE.id, join_keys(keys(1, 1 << 20))))
        assert isinstance(first, m.Granted)
        assert list(first.statuses) == [Grant.GRANTED]
        wait_for(full, lambda: not full.parts.kernel.working)
        go.clear()
        second = channel.start(m.PrepareStore(0, LARGE.id, join_keys(keys(1, 1 << 21)), first.lease))
        wait_for(full, lambda: full.parts.stores.under_way == 1)
        channel.call(m.EndSession(0, leases=[first.lease]))
        with pytest.raises(LeaseExpiredError, match="session was ended"):
            channel.poll(second)
        go.set()
        wait_for(full, lambda: not full.parts.kernel.working)
        usage = full.parts.kernel.usage()
        assert not usage.objects_by_state["writing"]
        assert not any(usage.leases_by_kind.values())


def test_a_load_from_a_tier_is_given_its_slots_by_the_same_mechanism(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        other.lookup(keys(1), namespace=LARGE)  # registers the namespace
    layout_id = full.parts.l1.layout_id(LARGE.layout, set)
    answers: list[Loading] = []

    def begin() -> None:
        deadline = full.parts.clock.now + WAIT_S
        waits.append(full.parts.l1.begin_load(7, layout_id, keys(1, 1 << 21), deadline, answers.append))

    waits: list[Any] = []
    full.parts.loop.call(begin)
    wait_for(full, lambda: bool(waits))
    assert not isinstance(waits[0], Loading)
    assert client.lookup(keys(4), namespace=SMALL).hits >= 0, "nobody waits for it"
    go.set()
    wait_for(full, lambda: bool(answers))
    assert answers[0].grants == [LoadGrant.GRANTED]
    assert full.parts.kernel.usage().objects_by_state["loading"] == 1


def test_a_load_that_is_given_up_while_it_waits_leaves_nothing(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        other.lookup(keys(1), namespace=LARGE)
    layout_id = full.parts.l1.layout_id(LARGE.layout, set)
    answers: list[Loading] = []
    waits: list[Any] = []

    def begin() -> None:
        deadline = full.parts.clock.now + WAIT_S
        waits.append(full.parts.l1.begin_load(7, layout_id, keys(1, 1 << 21), deadline, answers.append))

    full.parts.loop.call(begin)
    wait_for(full, lambda: bool(waits))
    full.parts.loop.call(lambda: waits[0].cancel())
    go.set()
    wait_for(full, lambda: not full.parts.kernel.working)
    assert client.status()["l1"]["emptying_bytes"] == 0
    assert not answers


def test_those_who_gave_up_are_forgotten_while_the_oldest_still_waits(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        other.lookup(keys(1), namespace=LARGE)
    layout_id = full.parts.l1.layout_id(LARGE.layout, set)
    begun = threading.Event()

    def begin() -> None:
        deadline = full.parts.clock.now + WAIT_S
        waits: list[Any] = [
            full.parts.l1.begin_load(7, layout_id, keys(1, (1 << 21) + at), deadline, lambda loading: None)
            for at in range(1000)
        ]
        for wait in waits[1:]:
            wait.cancel()
        begun.set()

    full.parts.loop.call(begin)
    assert begun.wait(WAIT_S)
    wait_for(full, lambda: full.parts.kernel.preparing == 1 and len(full.parts.l1.preparing) == 1)
    go.set()
    wait_for(full, lambda: not full.parts.kernel.working)


def test_status_says_what_each_holder_has_of_what_all_share(full: Server, client: Client, go: threading.Event) -> None:
    with full.connect("other") as other:
        newest = keys(8, full.parts.segment.info.data_bytes // 4096 - 8)  # the others may be making headroom already
        found = client.lookup(newest, namespace=SMALL, hold=True)
        assert found.hits == 8
        thread = threading.Thread(target=lambda: other.store(keys(1, 1 << 20), [bytes(8 << 20)], namespace=LARGE))
        thread.start()
        wait_for(full, lambda: full.parts.stores.under_way == 1)
        holders = client.status()["l1"]["holders"]
        assert list(holders) == [f"uid {os.getuid()}"]
        mine = holders[f"uid {os.getuid()}"]
        assert (mine["sessions"], mine["connections"], mine["rows"]) == (2, 2, 2)
        assert (mine["namespaces"], mine["layouts"], mine["stores_waiting"]) == (2, 2, 1)
        assert (mine["promised_bytes"], mine["quarantined_bytes"], mine["lookups_waiting"]) == (8 * 4096, 0, 0)
        go.set()
        thread.join(WAIT_S)


def test_a_drain_does_not_wait_for_room(full: Server, go: threading.Event) -> None:
    with full.connect("other") as other:
        outcome: list[int] = []
        thread = threading.Thread(
            target=lambda: outcome.append(other.store(keys(1, 1 << 20), [bytes(8 << 20)], namespace=LARGE).stored)
        )
        thread.start()
        wait_for(full, lambda: full.parts.stores.under_way == 1)
        full.parts.loop.call(full.begin_drain)
        go.set()
        thread.join(WAIT_S)
        assert outcome == [0]


def test_what_a_store_offers_before_a_clear_is_not_found_after_it(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        outcome: list[int] = []
        thread = threading.Thread(
            target=lambda: outcome.append(other.store(keys(1, 1 << 20), [bytes(8 << 20)], namespace=LARGE).stored)
        )
        thread.start()
        wait_for(full, lambda: full.parts.stores.under_way == 1)
        client.clear(LARGE)
        go.set()
        thread.join(WAIT_S)
        assert outcome == [0]
        assert not other.lookup(keys(1, 1 << 20), namespace=LARGE).hits
        assert other.store(keys(1, 1 << 20), [bytes(8 << 20)], namespace=LARGE).stored == 1


def write_leases(client: Client) -> int:
    found: int = client.status()["l1"]["leases_by_kind"]["write"]
    return found


def test_a_cancel_that_crosses_the_answer_to_a_store_frees_its_slots(client: Client) -> None:
    client.register_layout(SMALL)
    channel = client.links.current().channel
    asked = channel.start(m.PrepareStore(0, SMALL.id, join_keys(keys(3, 0))))
    answer = channel.wait(asked)
    assert isinstance(answer, m.Granted)
    assert write_leases(client) == 1
    assert channel.call(m.Cancel(0, asked.rid)) == m.Done(asked.rid + 2, 3)  # it was sent before the answer came
    assert write_leases(client) == 0
    again = channel.call(m.PrepareStore(0, SMALL.id, join_keys(keys(3, 0))))
    assert isinstance(again, m.Granted)
    assert not any(again.statuses), "nobody is writing these keys"


def test_a_cancelled_store_leaves_what_others_of_its_client_write(client: Client) -> None:
    client.register_layout(SMALL)
    channel = client.links.current().channel
    first = channel.start(m.PrepareStore(0, SMALL.id, join_keys(keys(3, 0))))
    second = channel.call(m.PrepareStore(0, SMALL.id, join_keys(keys(3, 10))))
    assert isinstance(second, m.Granted)
    channel.wait(first)
    channel.call(m.Cancel(0, first.rid))
    settled = channel.call(m.CommitStore(0, second.lease, 0, 3))
    assert isinstance(settled, m.SettledReply)
    assert client.lookup(keys(3, 10), namespace=SMALL).hits == 3
    assert client.lookup(keys(3, 0), namespace=SMALL).hits == 0


def test_a_store_that_is_cancelled_while_it_waits_for_room_keeps_none_of_it(
    full: Server, client: Client, go: threading.Event
) -> None:
    with full.connect("other") as other:
        other.register_layout(LARGE)
        channel = other.links.current().channel
        asked = channel.start(m.PrepareStore(0, LARGE.id, join_keys(keys(1, 1 << 20))))
        channel.call(m.Cancel(0, asked.rid))
        wait_for(full, lambda: full.parts.stores.under_way == 1)
        go.set()
        channel.wait(asked)
        assert write_leases(client) == 0


def test_a_client_that_gives_a_store_up_returns_its_slots_without_another_call(server: Server, client: Client) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        entered.set()
        go_on.wait(WAIT_S)

    with server.connect("other") as other:
        other.register_layout(SMALL)
        pages = other.register_pages([PageGroup(SMALL, [Region(bytearray(4096), 0, 4096, 4096, 1)], 1)])
        server.parts.loop.call(hold_up)
        assert entered.wait(WAIT_S)
        job = pages.store_start([PageEntry(0, keys(1, 0), [0])], deadline_s=0.01)
        go_on.set()
        assert job.result is not None
        assert job.result.statuses == [[Status.UNREACHABLE]]
        until(lambda: write_leases(client) == 0, "the slot, long before the lease ends")
        assert client.store(keys(1, 0), [bytes(4096)], namespace=SMALL).stored == 1
