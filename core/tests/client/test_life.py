"""The life of a client: whatever ends it, and whoever is inside a slot then, no slot changes hands under a thread."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lmcache_core.client.client as client_room
import lmcache_core.client.move.leases as leases_room
import lmcache_core.client.move.retrieving as retrieving_room
from lmcache_core.client.client import Client
from lmcache_core.client.link.handshake import STEPS, Handshake
from lmcache_core.client.link.link import Link
from lmcache_core.client.link.link_states import LinkEvent, LinkState
from lmcache_core.client.link.occupancy import Occupancy, settle_page
from lmcache_core.client.move.leases import ReadLease
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, LeaseExpiredError, LimitError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.mapping import Mapping
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import unpack_positions
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

from .conftest import cut, locks_of

NBYTES = 1 << 20
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(8)]
NONE = {"promise": 0, "read": 0, "write": 0}


@pytest.fixture
def watcher(server: Server) -> Iterator[Client]:
    with server.connect("watcher") as client:
        yield client


def leases(watcher: Client) -> dict[str, int]:
    return dict(watcher.status()["l1"]["leases_by_kind"])


class Copier(threading.Thread):
    """Stores or retrieves in a thread of its own; the copy stands still, inside the slots, until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, client: Client, kind: str) -> None:
        super().__init__(daemon=True)
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.result: Any = None
        self._client, self._kind = client, kind
        room, name = (leases_room, "copy_in") if kind == "store" else (retrieving_room, "copy_out")
        copy = getattr(room, name)

        def slow(*args: object, **options: object) -> object:
            if threading.current_thread() is self:
                self.inside.set()
                assert self.go_on.wait(WAIT_S)
            return copy(*args, **options)

        monkeypatch.setattr(room, name, slow)
        self.start()
        assert self.inside.wait(WAIT_S)

    def run(self) -> None:
        if self._kind == "store":
            self.result = self._client.store(KEYS[:4], [b"o" * NBYTES] * 4, namespace=SPACE)
        else:
            self.result = self._client.retrieve(KEYS[:4], [bytearray(NBYTES) for _ in range(4)], namespace=SPACE)

    def ended(self) -> object:
        self.go_on.set()
        self.join(WAIT_S)
        assert not self.is_alive()
        return self.result


@pytest.mark.parametrize("end", ["close", "end_session"])
@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_ending_while_another_thread_copies_gives_no_slot_away(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    client = server.connect(use_index=False)
    if kind == "retrieve":
        watcher.store(KEYS[:4], [b"x" * NBYTES] * 4, namespace=SPACE)
    copier = Copier(monkeypatch, client, kind)
    getattr(client, end)(timeout_s=0.05)
    held = "write" if kind == "store" else "read"
    assert leases(watcher)[held] == 1
    others = watcher.store(KEYS[4:], [b"y" * NBYTES] * 4, namespace=SPACE)
    if kind == "store":
        assert others.stored == 0  # the pool has room for four, and they are still somebody's
    copier.ended()
    until(lambda: leases(watcher) == NONE, "the end of the lease")
    assert watcher.store(KEYS[4:], [b"y" * NBYTES] * 4, namespace=SPACE).stored == 4
    into = [bytearray(NBYTES) for _ in range(4)]
    assert watcher.retrieve(KEYS[4:], into, namespace=SPACE).hits == 4
    assert all(each == b"y" * NBYTES for each in into)
    client.close()


@pytest.mark.parametrize("end", ["close", "end_session"])
def test_ending_waits_for_a_copy_under_way_which_is_stored(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    client = server.connect()
    copier = Copier(monkeypatch, client, "store")
    ending = threading.Thread(target=lambda: getattr(client, end)(timeout_s=WAIT_S), daemon=True)
    ending.start()
    until(lambda: all(each.barred for each in client.links.occupancy.holdings), "the end to begin")
    assert copier.ended().statuses == [Status.STORED] * 4
    ending.join(WAIT_S)
    assert not ending.is_alive()
    assert leases(watcher) == NONE
    client.close()


def test_close_waits_for_a_slow_server_no_longer_than_it_is_told(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    client = server.connect()
    client.ping()
    (session,) = server.parts.sessions
    stands, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        go_on.wait(WAIT_S)

    server.parts.loop.call(stand_still)
    assert stands.wait(WAIT_S)
    client.close(timeout_s=0.0)
    go_on.set()
    assert "did not answer" not in caplog.text, "it has waited"
    until(lambda: session.ended_by == "goodbye", "the server reads the goodbye all the same")


def test_the_life_lock_of_a_former_link_stays_while_a_thread_copies_under_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect()
    copier = Copier(monkeypatch, client, "store")
    link = client.links.current()
    former = link.life_lock
    assert former is not None
    link.channel.close("the test ended it")
    (holding,) = client.links.occupancy.holdings
    with server.connect() as other:  # stands for the server's successor
        link.epoch += 1
        client.links.current()
        client.close(timeout_s=0.05)
        assert holding.life_locks == (former,)
        assert not former.closed
        assert other.ping(b"there") == b"there"
    ref = weakref.ref(former)
    del former, holding, link
    copier.ended()
    del copier
    gc.collect()
    assert ref() is None


def test_a_view_in_use_keeps_its_slot_from_everybody_after_close(server: Server, watcher: Client) -> None:
    """A call that reads into a view, as `readinto` does, holds it for as long as it runs."""
    client = server.connect()
    lease = client.prepare_store(KEYS[:4], namespace=SPACE)
    view = lease.view(0)
    in_use = memoryview(view)  # stands for a call in another thread
    client.close()
    with pytest.raises(LeaseExpiredError, match="closed"):
        lease.view(1)
    assert leases(watcher)["write"] == 1
    in_use[:3] = b"old"
    assert watcher.store(KEYS[4:], [b"y" * NBYTES] * 4, namespace=SPACE).stored == 0
    del in_use, view
    until(lambda: leases(watcher) == NONE, "the end of the lease")
    assert watcher.store(KEYS[4:], [b"y" * NBYTES] * 4, namespace=SPACE).stored == 4


def test_dropped_clients_leave_no_row_and_no_lease(server: Server, watcher: Client) -> None:
    watcher.noop()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for at in range(20):
            client = server.connect()
            lease = client.prepare_store([bytes([at]) * 32], namespace=SPACE)
            view = lease.view(0)
            view[:4] = b"here"
            del client, lease, view
    until(lambda: len(watcher.status()["sessions"]) == 1, "the end of the sessions")
    assert leases(watcher) == NONE
    assert watcher.status()["l1"]["used_bytes"] == 0
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, "the descriptors to close")


def test_a_dropped_client_ends_with_its_last_view(server: Server, watcher: Client) -> None:
    client = server.connect()
    client.store(KEYS[:1], [b"a" * NBYTES], namespace=SPACE)
    view = client.prepare_retrieve(KEYS[:1], namespace=SPACE).view(0)
    part = view[10:20]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del client, view
    assert leases(watcher)["read"] == 1
    assert bytes(part) == b"a" * 10
    del part
    until(lambda: leases(watcher) == NONE, "the end of the lease")
    assert len(watcher.status()["sessions"]) == 1


def test_a_client_that_is_dropped_says_where_it_was_made(server: Server) -> None:
    client = server.connect()  # here
    client.noop()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del client
    (warning,) = said
    assert warning.category is ResourceWarning
    line = next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here")
    )
    assert f"{__file__}:{line}" in str(warning.message)


def test_a_client_may_be_dropped_inside_any_lock_of_its_own(server: Server) -> None:
    """The finalizer runs wherever the last reference goes: here with every lock of the client taken."""
    client = server.connect()
    lease = client.prepare_store(KEYS[:1], namespace=SPACE)
    links = client.links
    locks = locks_of(links, links.occupancy, links.current(), links.current().channel)
    done = threading.Event()

    def drop(things: list[object]) -> None:
        for lock in locks:
            lock.acquire()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            things.clear()
        done.set()

    things = [client, lease, links]
    del client, lease, links
    thread = threading.Thread(target=drop, args=(things,), daemon=True)
    thread.start()
    assert done.wait(WAIT_S)


def test_a_lease_that_is_dropped_or_closed_is_settled(server: Server, watcher: Client) -> None:
    with server.connect() as client:
        client.store(KEYS[:1], [bytes(NBYTES)], namespace=SPACE)
        client.prepare_store(KEYS[1:3], namespace=SPACE)
        client.prepare_retrieve(KEYS[:1], namespace=SPACE)
        client.noop()
        assert leases(watcher) == NONE
        lease = client.prepare_store(KEYS[1:3], namespace=SPACE)
        lease.close()
        lease.close()
        assert list(lease.statuses) == [Status.ABORTED] * 2
        assert leases(watcher) == NONE


def test_a_closed_client_lends_nothing_more(server: Server) -> None:
    client = server.connect()
    lease = client.prepare_store(KEYS[:1], namespace=SPACE)
    view = lease.view(0)
    client.close()
    with pytest.raises(ValueError, match="released"):
        view[0]
    with pytest.raises(LeaseExpiredError, match="closed"):
        lease.view(0)
    with pytest.raises(UsageError, match="closed"):
        client.prepare_store(KEYS[:1], namespace=SPACE)


def test_a_verified_retrieve_whose_session_another_thread_ends_answers_with_values(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = [bytearray(NBYTES)]
    slots = ReadLease.slots

    def barred(self: ReadLease, first: int = 0) -> tuple[Mapping, list[tuple[int, int]]]:
        self._holding.bar("its session was ended")  # as another thread does while this one is at work
        return slots(self, first)

    with server.connect(use_index=False) as client:
        assert client.store(KEYS[:1], [bytes(NBYTES)], namespace=SPACE).stored == 1
        monkeypatch.setattr(ReadLease, "slots", barred)
        assert client.retrieve(KEYS[:1], into, namespace=SPACE, verify="always").hits == 1


def test_a_row_that_was_given_away_meanwhile_costs_a_try_and_raises_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_pool, taken = Link.map, []

    def given_away(link: Link, *arguments: Any) -> tuple[int, int]:
        if not taken:  # as by a server that came after the one that had given it
            taken.append(LifeLock.acquire(server.parts.segment, link.row))
        return map_pool(link, *arguments)

    monkeypatch.setattr(Link, "map", given_away)
    with server.connect() as client:
        first = client.store(KEYS[:1], [bytes(NBYTES)], namespace=SPACE)
        assert first.statuses in ([Status.UNREACHABLE], [Status.STORED])
        assert taken
        until(lambda: client.store(KEYS[1:2], [bytes(NBYTES)], namespace=SPACE).stored, "another row")
    taken[0].close()


def test_an_interrupted_reconnect_gives_no_slot_away(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("writer")
    lease = client.prepare_store(KEYS[:1], namespace=SPACE)
    view = lease.view(0)
    client.links.current().channel.close("lost")
    attach = STEPS[LinkState.ATTACHING]

    def interrupted(making: Handshake) -> LinkEvent | None:
        event = attach(making)
        if event is not None:  # the server has moved the lease to the session that is given up now
            raise KeyboardInterrupt
        return event

    with monkeypatch.context() as patch:
        patch.setitem(STEPS, LinkState.ATTACHING, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.noop()
    states = lambda: [each["state"] for each in watcher.status()["sessions"]]  # noqa: E731
    until(lambda: states().count("lost") >= 1, "the server to hear of it")
    assert leases(watcher) == {**NONE, "write": 1}
    stored = watcher.store(KEYS[:4], [b"w" * NBYTES] * 4, namespace=SPACE)
    assert stored.statuses == [Status.BUSY, *[Status.STORED] * 3]
    view[:] = b"m" * NBYTES
    assert lease.commit() == [Status.STORED]  # over the next link, which has it again
    client.close()
    until(lambda: leases(watcher) == NONE, "nothing to be held")


def test_what_is_granted_while_the_session_is_ended_goes_back(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.connect("writer") as client:
        asking = Occupancy.requesting

        def slow(self: Occupancy, *args: Any) -> None:
            asking(self, *args)
            ending = threading.Thread(target=client.end_session)
            ending.start()
            ending.join(WAIT_S)

        with monkeypatch.context() as patch:
            patch.setattr(Occupancy, "requesting", slow)
            lease = client.prepare_store(KEYS[:1], namespace=SPACE)
        assert lease.statuses == [Status.UNREACHABLE]
        client.noop()
        until(lambda: leases(watcher) == NONE, "the slot to come back")


@pytest.mark.parametrize("how", ["refused", "cut", "hung up"])
def test_a_call_that_failed_keeps_no_buffer_and_no_client(server: Server, how: str) -> None:
    class Buffer(bytearray):
        pass

    gc.disable()  # what only the collector finds may stay for ever
    try:
        now = time.monotonic()  # it stands: no link is looked at before it is used, and no pause ends
        client = Client(replace(server.connect("writer").links.target, clock=lambda: now))
        gone = [weakref.ref(client.links)]
        client.store(KEYS[:1], [b"a" * NBYTES], namespace=SPACE)
        if how == "refused":
            with pytest.raises(LeaseExpiredError):
                client.lease_status(12345)
        else:
            channel, buffer = client.links.current().channel, Buffer(NBYTES)
            gone.append(weakref.ref(buffer))  # type: ignore[arg-type]
            if how == "cut":
                cut(channel.connection)
            else:
                server.stop()
                until(channel.connection.ended, "the end of the connection")
                for _ in range(2):  # it hears of the end, and makes an attempt; then it pauses
                    with pytest.raises(DisconnectedError):
                        client.noop()
            assert client.store(KEYS[1:2], [buffer], namespace=SPACE).statuses == [Status.UNREACHABLE]
            del buffer, channel
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del client
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_closing_while_another_thread_copies_its_second_page_gives_no_slot_away(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, copy_in = server.connect("writer"), leases_room.copy_in
    inside, go_on, copies = threading.Event(), threading.Event(), iter((1, 2))

    def slow(*args: Any, **options: Any) -> object:
        if next(copies) == 2:
            inside.set()
            assert go_on.wait(WAIT_S)
        return copy_in(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(client_room, "STORE_PAGE_KEYS", 1)
        patch.setattr(leases_room, "copy_in", slow)
        copier = threading.Thread(target=lambda: client.store(KEYS[:2], [b"a" * NBYTES] * 2, namespace=SPACE))
        copier.start()
        assert inside.wait(WAIT_S)
    try:
        client.close(timeout_s=0.05)
        assert leases(watcher)["write"] == 1
    finally:
        go_on.set()
        copier.join(WAIT_S)
    until(lambda: leases(watcher) == NONE, "the slot to come back")


@pytest.mark.parametrize("way", ["dropped", "given up"])
def test_a_lease_that_ends_after_the_next_server_was_told_of_it_is_settled_over_the_next_link(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Told of it by the attach that is under way: without another word it would stay until the client ends."""
    with server.connect("writer") as client:
        held = [client.prepare_store(KEYS[:2], namespace=SPACE)]
        client.links.current().channel.close("lost")
        attach = STEPS[LinkState.ATTACHING]

        def meanwhile(making: Handshake) -> LinkEvent | None:
            event = attach(making)
            if held and event is not None:  # the server has moved it to the new session
                lease = held.pop()
                if way == "given up":
                    lease.settle_after(DisconnectedError("lost"))
                del lease
                client.links.occupancy.tidy()
            return event

        with monkeypatch.context() as patch:
            patch.setitem(STEPS, LinkState.ATTACHING, meanwhile)
            client.noop()
        assert not held
        until(lambda: leases(watcher) == NONE, "the slots to come back")
        stored = watcher.store(KEYS[:4], [b"w" * NBYTES] * 4, namespace=SPACE)
        assert stored.statuses == [Status.STORED] * 4


@pytest.mark.parametrize("in_use", [0, 100])
def test_a_lease_that_gives_views_one_after_another_keeps_nothing_of_those_that_are_gone(
    server: Server, in_use: int
) -> None:
    with server.connect("reader") as client:
        client.store(KEYS[:1], [b"a" * NBYTES], namespace=SPACE)
        with client.prepare_retrieve(KEYS[:1], namespace=SPACE) as lease:
            kept = [lease.view(0) for _ in range(in_use)]
            for _ in range(2000):
                assert lease.view(0)[0] == ord("a")
            holding = lease.holding
            assert len(holding.views) <= 4 * in_use + 200
            assert len(holding.lent) <= 4 * in_use + 200
            assert len(client.links.occupancy.gone) <= 200
        for view in kept:
            with pytest.raises(ValueError, match="released"):
                view[0]


def test_a_run_of_positions_is_said_as_a_range_and_any_others_one_by_one() -> None:
    run, others, one = (settle_page(m.AbortStore, 7, page) for page in ([3, 4, 5], [3, 5], [9]))
    assert (run.first, run.count, run.positions) == (3, 3, b"")
    assert (others.first, others.count, list(unpack_positions(others.positions))) == (0, 0, [3, 5])
    assert (one.first, one.count) == (9, 1)


def test_a_lease_of_which_a_page_was_refused_ends_with_its_last_commit(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.connect() as client:
        lease = client.prepare_store(KEYS[:1], namespace=SPACE)
        begin = server.parts.kernel.begin_store

        def refused(*arguments: object, **options: object) -> object:
            raise LimitError("one lease too many")

        monkeypatch.setattr(server.parts.kernel, "begin_store", refused)
        lease.ask(KEYS[1:2])
        monkeypatch.setattr(server.parts.kernel, "begin_store", begin)
        assert lease.statuses == [Status.GRANTED, Status.QUOTA]
        lease.view(0)[:] = bytes(NBYTES)
        assert lease.commit() == [Status.STORED, Status.QUOTA]
        with pytest.raises(LeaseExpiredError, match="has ended"):
            lease.view(0)
        assert not client.links.occupancy.holdings
    assert leases(watcher) == NONE
