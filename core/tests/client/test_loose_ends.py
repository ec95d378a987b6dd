"""What comes between two steps that rely on each other: a late answer, a refused page, a thread, an interrupt."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link.channel import Channel, Pending
from lmcache_core.client.link.link_states import LinkState
from lmcache_core.client.link.occupancy import Holding, Occupancy
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.move import leases as leases_room
from lmcache_core.client.move import retrieving
from lmcache_core.client.move.leases import Lease, ReadLease, WriteLease
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError, DisconnectedError, LeaseExpiredError, UsageError
from lmcache_core.limits import BATCH_KEYS_MAX, LEASES_PER_SESSION_MAX, NAMESPACES_PER_SESSION_MAX, STORE_PAGE_KEYS
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import Segment
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

from .conftest import cut

NBYTES = 4096
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
NONE = {"promise": 0, "read": 0, "write": 0}


def keys_of(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(l1={"size_bytes": 8 << 20}, drain_s=0.1)


@pytest.fixture
def watcher(server: Server) -> Iterator[Client]:
    with server.connect(maps_pool=False) as watcher:
        yield watcher


def asking(server: Server) -> Client:
    """A client that asks for every hit, and waits for as long as it takes."""
    with server.connect(use_index=False) as client:
        return Client(replace(client.links.target, call_timeout_s=WAIT_S))


def fill(client: Client, count: int = 4) -> list[bytes]:
    keys = keys_of(count)
    assert client.store(keys, [b"o" * NBYTES] * count, namespace=SPACE).stored == count
    return keys


@contextmanager
def hanging(server: Server, impatient: Client | None = None) -> Iterator[Callable[[], None]]:
    """Its loop does not turn until the block ends, or what this gives is called. `impatient` does not wait for it."""
    hangs, over = threading.Event(), threading.Event()
    channel = None if impatient is None else impatient.links.link.channel  # type: ignore[union-attr]

    def hang() -> None:
        hangs.set()
        over.wait(WAIT_S)

    server.parts.loop.call(hang)
    assert hangs.wait(WAIT_S)
    if channel is not None:
        channel.timeout_s = 0.1
    try:
        yield over.set
    finally:
        over.set()
        if channel is not None:
            channel.timeout_s = WAIT_S


def held(watcher: Client) -> dict[str, int]:
    return dict(watcher.status()["l1"]["leases_by_kind"])


def comes_to(watcher: Client, kinds: dict[str, int], *clients: Client) -> bool:
    """Whether the server is left with these leases, once it has heard all that the clients have to say."""
    for client in clients:

        def heard(client: Client = client) -> bool:
            with suppress(DisconnectedError):
                client.noop()
                return not client.links.link.channel._owed  # type: ignore[union-attr]
            return False

        until(heard, "a server that goes on")
        client.noop()  # what a late answer granted was undone before this
        client.noop()
    return held(watcher) == kinds


def hang_up(client: Client) -> None:
    channel = client.links.link.channel  # type: ignore[union-attr]
    cut(channel.connection)
    until(channel.found_lost, "the end of the connection")


@contextmanager
def interrupted_at(function: Callable[..., object], text: str) -> Iterator[None]:
    """An interrupt before the line of `function` that has this text."""
    lines, first = inspect.getsourcelines(function)
    line, raised = next(first + at for at, each in enumerate(lines) if text in each), []

    def local(frame: FrameType, event: str, arg: object) -> object:
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raised.append(line)
            raise KeyboardInterrupt
        return local

    with suppress(KeyboardInterrupt):
        sys.settrace(lambda frame, event, arg: local if frame.f_code is function.__code__ else None)
        try:
            yield
        finally:
            sys.settrace(None)
    assert raised


@pytest.mark.parametrize("how", ["commit", "finish"])
def test_a_lease_that_another_thread_has_ended_is_said_to_have_ended(server: Server, how: str) -> None:
    """Its owner made no mistake: the positions were granted to it."""
    with server.connect() as client:
        client.store(keys_of(1), [bytes(NBYTES)], namespace=SPACE)
        make = client.prepare_store if how == "commit" else client.prepare_retrieve
        lease = make(keys_of(2)[how == "commit" :], namespace=SPACE)
        ending = threading.Thread(target=client.end_session)
        ending.start()
        ending.join()
        with pytest.raises(LeaseExpiredError, match="has ended"):
            getattr(lease, how)([0])
        with pytest.raises(UsageError, match="position 7 is not open"):
            getattr(lease, how)([7])


@pytest.mark.parametrize("what", ["view", "tensor"])
@pytest.mark.parametrize("end", ["close", "finish", "end_session"])
@pytest.mark.parametrize("step", ["slot", "lend", "note"])
def test_what_is_lent_as_another_thread_ends_the_lease_shows_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, what: str, end: str, step: str
) -> None:
    """Whoever ends a lease takes back what it has lent; what is lent after that would show another's object."""
    if what == "tensor":
        pytest.importorskip("torch")
    with server.connect(use_index=False) as client:
        lease = client.prepare_retrieve(fill(client), namespace=SPACE)
        ends = {"close": lease.close, "finish": lease.finish, "end_session": lambda: client.end_session(0.0)}
        place: tuple[type, str] = {
            "slot": (Segment, "slot"), "lend": (Occupancy, "lend"), "note": (Holding, f"note_{what}"),
        }[step]  # fmt: skip
        method, ended = getattr(*place), []

        def late(*arguments: object, **options: object) -> object:
            if not ended:
                ended.append(threading.Thread(target=ends[end]))
                ended[0].start()
                ended[0].join()
            return method(*arguments, **options)

        monkeypatch.setattr(*place, late)
        with pytest.raises(LeaseExpiredError, match="has ended"):
            getattr(lease, what)(0)


@pytest.mark.parametrize("positions", ["01", 3, 1.5, [1.0], [True, False], ["1"], [None], [[1]], "array", "mask"])
def test_invalid_positions_are_refused_with_a_message(server: Server, positions: Any) -> None:
    numpy = pytest.importorskip("numpy")
    positions = {"array": numpy.array(3), "mask": numpy.array([True, False])}.get(str(positions), positions)
    with server.connect() as client, client.prepare_store(keys_of(2), namespace=SPACE) as lease:
        for settle in (lease.commit, lease.abort):
            with pytest.raises(UsageError, match="position"):
                settle(positions)
        assert lease.granted == [0, 1]


# --- answers that come late -----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [[0, 7, 2, 3], [3, 2, 1, 0], [5, 5, 0, 5], [1, 0, 3, 2]])
def test_positions_are_settled_as_they_are_named_in_whatever_order(server: Server, positions: list[int]) -> None:
    """As numbers, 0, 7, 2, 3 end as far from where they begin as the run 0, 1, 2, 3 does."""
    with server.connect() as client:
        with client.prepare_store(keys_of(8), namespace=SPACE) as lease:
            for position in positions:
                lease.view(position)[:] = bytes([position]) * NBYTES
            lease.commit(positions)
            stored = [at for at, status in enumerate(lease.statuses) if status is Status.STORED]
        assert stored == sorted(set(positions))
        read = [bytearray(NBYTES) for _ in range(8)]
        found = client.retrieve(keys_of(8), read, namespace=SPACE, prefix=False, verify="always")
        assert [at for at, status in enumerate(found.statuses) if status is Status.HIT] == stored
        assert [read[at][0] for at in stored] == stored


@pytest.mark.parametrize("prefix", [True, False])
def test_more_than_a_session_may_hold_is_read_a_part_at_a_time(start: Callable[..., Server], prefix: bool) -> None:
    large = Namespace("large", Layout("uint8", (1 << 20,)))
    server = start(l1={"size_bytes": 16 << 20}, drain_s=0.1, holding={"read_fraction_per_session_max": 0.25})
    with server.connect(use_index=False) as client:
        contents = [bytes([at]) * (1 << 20) for at in range(12)]
        assert client.store(keys_of(12), contents, namespace=large).stored == 12
        into = [bytearray(1 << 20) for _ in range(13)]
        found = client.retrieve(keys_of(13), into, namespace=large, prefix=prefix)
        assert found.hits == 12
        assert found.statuses[12] is Status.MISS
        assert into[:12] == contents


def test_a_handle_that_was_told_of_no_promise_leaves_none(server: Server, watcher: Client) -> None:
    with asking(server) as client:
        keys = fill(client)
        with hanging(server, client):
            handle = client.lookup_nowait(keys, namespace=SPACE, hold=True, wait_s=0.0)
            until(lambda: handle.done, "its time")
            assert handle.result is not None
            assert (handle.result.statuses[0], handle.result.promise) == (Status.UNREACHABLE, None)
        assert comes_to(watcher, NONE, client)


def test_a_promise_that_comes_as_the_call_gives_up_is_told_and_kept_or_neither(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_out = Channel._time_out
    with asking(server) as client:
        keys = fill(client)
        with hanging(server, client) as goes_on:

            def late(self: Channel, pending: Pending, why: str) -> None:
                goes_on()
                until(lambda: (self.listen(), pending.settled)[1], "the answer")  # another thread reads for everybody
                time_out(self, pending, why)

            monkeypatch.setattr(Channel, "_time_out", late)
            found = client.lookup(keys, namespace=SPACE, hold=True)
        monkeypatch.undo()
        assert comes_to(watcher, {**NONE, "promise": len(found.promise.numbers)}, client)


def test_a_promise_that_was_dropped_before_the_reconnect_is_freed_by_it(server: Server, watcher: Client) -> None:
    with asking(server) as client:
        keys = fill(client)
        handles = [client.lookup_nowait(keys, namespace=SPACE, hold=True)]
        until(lambda: handles[0].done, "the answer")
        assert held(watcher)["promise"] == 1
        hang_up(client)
        handles.clear()
        gc.collect()
        assert comes_to(watcher, NONE, client)


@pytest.mark.parametrize("way", ["freed", "dropped"])
def test_a_promise_that_was_given_back_to_a_server_that_hangs_is_freed_over_the_next_connection(
    server: Server, watcher: Client, way: str
) -> None:
    """What was to say so had no room in the socket when the connection ended."""
    with asking(server) as client:
        keys = fill(client)
        handles = [client.lookup_nowait(keys, namespace=SPACE, hold=True)]
        until(lambda: handles[0].done, "the answer")
        found = handles[0].wait(WAIT_S) if way == "freed" else None
        channel = client.links.link.channel  # type: ignore[union-attr]
        with hanging(server, client):
            while not channel._owed:
                channel.post(m.Noop(0))
            if found is not None:
                assert client.free_lookup_locks(found.promise) == 0
            handles.clear()
            gc.collect()
            channel.listen()
            hang_up(client)
        assert comes_to(watcher, NONE, client)


@pytest.mark.parametrize("way", [Client.end_session, None], ids=["end_session", "close"])
def test_a_grant_that_comes_while_its_lease_is_let_go_of_is_given_back(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch, way: Callable[[Client], None] | None
) -> None:
    left = Holding.left
    with asking(server) as client:
        keys = fill(client)
        with hanging(server) as goes_on:
            lease = ReadLease(client.links, SPACE)
            with interrupted_at(Channel.wait, "self._serve("):
                lease.ask(keys)
            page = lease.holding.page
            assert page is not None

            def slow(self: Holding) -> list[int]:
                found = left(self)
                if self is lease.holding:
                    goes_on()
                    assert self.link is not None
                    channel = self.link.channel
                    until(lambda: (channel.listen(), (page.pending.record or page.pending).reply)[1], "the answer")
                return found

            monkeypatch.setattr(Holding, "left", slow)
            lease.close() if way is None else way(client)
        monkeypatch.undo()
        assert comes_to(watcher, NONE, client)


# --- leases of more than one page -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", [ReadLease.finish, WriteLease.abort, WriteLease.commit], ids=lambda way: way.__name__)
def test_settling_pages_that_meets_a_hang_leaves_none_of_them_held(
    start: Callable[..., Server], way: Callable[[ReadLease], object]
) -> None:
    server = start(drain_s=0.1)
    with asking(server) as client, server.connect(maps_pool=False) as watcher:
        keys = keys_of(2 * BATCH_KEYS_MAX + 5)
        if way is ReadLease.finish:
            fill(client, len(keys))
            lease: Any = client.prepare_retrieve(keys, namespace=SPACE)
        else:
            lease = client.prepare_store(keys, namespace=SPACE)
        assert len(lease.granted) == len(keys)
        with hanging(server, client), suppress(CacheError):
            way(lease)
        lease.close()
        assert comes_to(watcher, NONE, client)


def test_a_page_that_was_refused_commits_no_slot_of_another_key(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session was at its limit of leases for one page, and not for the next."""
    server, page = start(l1={"size_bytes": 64 << 20}, drain_s=0.1), STORE_PAGE_KEYS
    with asking(server) as client, asking(server) as other:
        keys = fill(other, page) + keys_of(4 * page, page)
        many = [client.prepare_store(keys_of(1, 1 << 20 | at), namespace=SPACE) for at in range(LEASES_PER_SESSION_MAX)]
        ask, asked = WriteLease.ask, []

        def asking_on(self: WriteLease, keys: Sequence[bytes]) -> None:
            asked.append(keys)
            if len(asked) == 3:
                for each in many:
                    each.close()
            ask(self, keys)

        monkeypatch.setattr(WriteLease, "ask", asking_on)
        lease = client.prepare_store(keys, namespace=SPACE)
        assert len(asked) == 5
        assert set(lease.statuses[page : 2 * page]) == {Status.QUOTA}
        with suppress(CacheError):
            for position in (chosen := [at for at in lease.granted if at < 3 * page]):
                lease.view(position)[:] = b"w" * NBYTES
            lease.commit(chosen, checksums=False)
        lease.close()
        stored = [key for key, status in zip(keys, lease.statuses, strict=True) if status is Status.STORED]
        into = [bytearray(NBYTES) for _ in keys]
        found = other.retrieve(keys, into, namespace=SPACE, prefix=False)
        for key, status, there in zip(keys, found.statuses, into, strict=True):
            if status is Status.HIT:
                assert there == (b"w" if key in stored else b"o") * NBYTES


def test_a_page_whose_answer_was_lost_with_the_connection_is_given_back(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is declared to the next session, and with it what the server granted last."""
    wait = Channel.wait
    with asking(server) as client:
        lease = WriteLease(client.links, SPACE)
        lease.ask(keys_of(5))
        with hanging(server) as goes_on:

            def lost(self: Channel, pending: Pending, timeout_s: float | None = None) -> object:
                monkeypatch.undo()
                cut(self.connection)
                goes_on()
                return wait(self, pending, timeout_s)

            monkeypatch.setattr(Channel, "wait", lost)
            lease.ask(keys_of(5, 5))
        assert lease.statuses == [Status.GRANTED] * 5 + [Status.UNREACHABLE] * 5
        client.noop()
        until(lambda: client.lease_status(lease.id).open_positions == 5, "what was granted last")
        lease.abort()
        assert comes_to(watcher, NONE, client)


def declare_to_the_next(server: Server, client: Client) -> None:
    """The link is lost, and the next has just told the server which leases go on; it is not open yet."""
    with hanging(server):
        assert client.links.step() is None, "there is no link without an answer"
    making = client.links.making
    assert making is not None
    until(lambda: (making.step(), making.channel.state is LinkState.ATTACHING)[1], "the welcome")


def test_a_page_whose_answer_was_lost_is_given_back_where_its_lease_ends_before_the_next_link_is_open(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is declared by then; what ends it names what it knows of, and this page it does not know of."""
    wait = Channel.wait
    with asking(server) as client:
        lease = WriteLease(client.links, SPACE)
        lease.ask(keys_of(5))
        with hanging(server) as goes_on:

            def lost(self: Channel, pending: Pending, timeout_s: float | None = None) -> object:
                monkeypatch.undo()
                cut(self.connection)
                goes_on()
                return wait(self, pending, timeout_s)

            monkeypatch.setattr(Channel, "wait", lost)
            lease.ask(keys_of(5, 5))
        declare_to_the_next(server, client)
        del lease
        gc.collect()
        client.noop()
        assert comes_to(watcher, NONE, client)


def test_a_lease_that_ends_as_its_connection_does_is_ended_over_the_next(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stood when it was looked at, and was lost, and the lease declared, before the end was said."""
    post = Channel.post
    with asking(server) as client:
        lease = client.prepare_store(keys_of(5), namespace=SPACE)

        def late(self: Channel, make: object, *more: Any) -> None:
            monkeypatch.undo()
            hang_up(client)
            declare_to_the_next(server, client)
            post(self, make, *more)

        monkeypatch.setattr(Channel, "post", late)
        del lease
        gc.collect()
        client.noop()
        assert comes_to(watcher, NONE, client)


def test_a_retrieve_whose_lease_expires_between_pages_says_so_by_value(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(l1={"size_bytes": 16 << 20}, drain_s=0.1, lease={"read_ttl_s": 0.05})
    with asking(server) as client:
        keys = fill(client, BATCH_KEYS_MAX + 1)
        slots = ReadLease.slots

        def slow(self: ReadLease, first: int) -> object:
            until(lambda: (client.noop(), self.expired)[1], "its time")  # a long copy
            return slots(self, first)

        monkeypatch.setattr(ReadLease, "slots", slow)
        found = client.retrieve(keys, [bytearray(NBYTES) for _ in keys], namespace=SPACE)
        assert (found.hits, found.statuses[-1]) == (BATCH_KEYS_MAX, Status.EXPIRED)


# --- another thread -------------------------------------------------------------------------------------------


def test_a_lookup_that_waited_for_room_is_sent_once_however_many_threads_call(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asking(server) as client:
        keys = fill(client, BATCH_KEYS_MAX)
        link = client.links.link
        assert link is not None
        with hanging(server):
            handles = []
            while not link.channel._owed:
                handles.append(client.lookup_nowait(keys, namespace=SPACE, hold=True))
        send, others = link.channel.connection.send_waiting, []

        def meanwhile(frames: deque[bytes]) -> None:
            waiting = len(frames)
            send(frames)
            if len(frames) < waiting and not others:
                others.append(threading.Thread(target=client.noop))
                others[0].start()
                others[0].join(0.05)  # it may wait for us

        monkeypatch.setattr(link.channel.connection, "send_waiting", meanwhile)
        until(lambda: all(handle.done for handle in handles), "the answers")
        others[0].join()
        told = [promise for handle in handles for promise in handle.result.promise.numbers]  # type: ignore[union-attr]
        assert len(told) == len(handles)
        client.noop()
        assert held(watcher)["promise"] == len(told)


@pytest.mark.skipif(native is None, reason="the index is read by the C extension alone")
def test_an_optimistic_lease_that_another_threads_reconnect_overtakes_is_one_all_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, overtaken = Occupancy.requesting, []
    with server.connect() as client:
        keys = fill(client)
        hang_up(client)

        def slow(self: Occupancy, *arguments: Any) -> None:
            if not overtaken:
                overtaken.append(threading.Thread(target=client.noop))
                overtaken[0].start()
                overtaken[0].join()
            ask(self, *arguments)

        monkeypatch.setattr(Occupancy, "requesting", slow)
        with client.prepare_retrieve(keys, namespace=SPACE, optimistic=True) as lease:
            assert bytes(lease.view(0)) == b"o" * NBYTES
        assert set(lease.statuses) == {Status.HIT}


# --- interrupts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["self._link = link", "previous.life_lock = None", "self.occupancy.hand_over"])
def test_an_interrupt_as_the_next_link_is_taken_into_use_gives_nobodys_slots_away(server: Server, line: str) -> None:
    with asking(server) as client:
        lease = client.prepare_store(keys_of(1), namespace=SPACE)
        view = lease.view(0)  # another thread writes there all the while
        hang_up(client)
        with interrupted_at(Links._install, line):
            client.noop()
        client.noop()
        assert client.lease_status(lease.id).state == "open"
        view[:] = b"w" * NBYTES
        del view
        assert lease.commit() == [Status.STORED]


def test_an_interrupt_before_the_session_is_ended_leaves_leases_that_can_be_ended(
    server: Server, watcher: Client
) -> None:
    with asking(server) as client:
        lease = client.prepare_retrieve(fill(client), namespace=SPACE)
        with interrupted_at(Links.end_session, "self.call("):
            client.end_session()
        lease.close()
        assert comes_to(watcher, NONE, client)


@pytest.mark.parametrize("line", ["link.say_goodbye", "if link is None"])
def test_a_client_whose_close_is_interrupted_can_be_closed(server: Server, watcher: Client, line: str) -> None:
    client = asking(server)
    lease = client.prepare_retrieve(fill(client), namespace=SPACE)
    with interrupted_at(Links.close, line):
        client.close()
    client.close()
    until(lambda: watcher.status()["sessions_connected"] == 1, "the end of its session")
    until(lambda: held(watcher) == NONE, "the end of its lease")
    assert lease.statuses[0] is Status.ABORTED


# --- what is kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_call", ["store", "retrieve", "lookup"])
@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_a_copying_call_that_was_interrupted_as_it_ended_leaves_nothing_whatever_call_is_next(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch, kind: str, next_call: str
) -> None:
    class Buffer(bytearray):
        pass

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    client = asking(server)
    there, others = fill(client), keys_of(2, first=10)
    buffer = Buffer(NBYTES)
    gone = weakref.ref(buffer)
    with monkeypatch.context() as patch:
        module, copy = (leases_room, "copy_in") if kind == "store" else (retrieving, "copy_out")
        patch.setattr(module, copy, interrupted)
        with interrupted_at(Lease.close, "if not self._holding.over"):
            if kind == "store":
                client.store(others[:1], [buffer], namespace=SPACE)
            else:
                client.retrieve(there[:1], [buffer], namespace=SPACE)
    del buffer
    match next_call:
        case "store":
            client.store(others[1:], [bytes(NBYTES)], namespace=SPACE)
        case "retrieve":
            client.retrieve(there[1:], [bytearray(NBYTES) for _ in there[1:]], namespace=SPACE)
        case "lookup":
            client.lookup(there, namespace=SPACE)
    assert comes_to(watcher, NONE, client)
    assert not client.links.occupancy.holdings
    gc.collect()
    assert gone() is None
    client.close()


def test_registrations_of_lookups_that_nobody_waited_for_are_forgotten_by_age(server: Server) -> None:
    with asking(server) as client:
        client.noop()
        link, calls = client.links.current(), []
        for number in range(NAMESPACES_PER_SESSION_MAX + 50):
            call = link.start_binding(Namespace(f"model-{number}", SPACE.layout))
            assert call is not None
            calls.append(weakref.ref(call))
            del call
            if number % 64 == 0:
                client.noop()
        client.noop()  # all of them are answered
        assert sum(call() is not None for call in calls) == NAMESPACES_PER_SESSION_MAX


@pytest.mark.parametrize("kind", [WriteLease, ReadLease], ids=lambda kind: kind.__name__)
def test_tensors_that_were_dropped_are_not_kept_by_their_lease(server: Server, kind: type) -> None:
    torch = pytest.importorskip("torch")
    with asking(server) as client:
        keys = fill(client) if kind is ReadLease else keys_of(1)
        with getattr(client, "prepare_retrieve" if kind is ReadLease else "prepare_store")(
            keys, namespace=SPACE
        ) as lease:
            for _ in range(1000):
                lease.tensor(0)
            gc.collect()
            tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
            ours = [
                each for each in tensors if not isinstance(each, torch.nn.Parameter)
            ]  # those are other tests' models
            assert not [each for each in ours if each.numel() == NBYTES]
            assert not lease.holding.occupied  # so that whoever closes the client need not leave it
            assert len(lease.holding.tensors) < 200
            kept = lease.tensor(0)
        assert kept.numel() == 0  # what somebody still has is empty when the lease is over
