"""Nobody uses up what all share: connections without a word, sessions that vanished, rows of the worker table."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from lmcache_core.errors import CacheError, LimitError, NotAttachedError
from lmcache_core.limits import (
    HELLO_S,
    ROWS_RETURNING_MAX,
    SEND_QUEUE_FRAMES_MAX,
    SESSIONS_MAX,
    SESSIONS_PER_ORIGIN_MAX,
    UNANSWERED_PER_UID_MAX,
    WORKERS_MAX,
)
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, encode_request
from lmcache_core.server.peers import session_table as sessions
from lmcache_core.server.peers.session import Peer, Session
from lmcache_core.server.peers.session_states import SessionState
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

from .conftest import keys_of, payload


class Caller(Peer):
    """A far end that says nothing and hears nothing."""

    carrier = "zmq"
    uid = 4242
    pid = 0

    def __init__(self, origin: str = "key A") -> None:
        self.origin = origin
        self.closed = False

    def send(self, frame: bytes, fd: int = -1) -> None:
        pass

    def close(self) -> None:
        self.closed = True


V = TypeVar("V")


def on_loop(server: Server, ask: Callable[[], V]) -> V:
    """What a call gives on the loop's own thread."""
    answers: list[object] = []
    done = threading.Event()

    def run() -> None:
        try:
            answers.append(ask())
        except CacheError as error:
            answers.append(error)
        done.set()

    server.parts.loop.call(run)
    assert done.wait(WAIT_S)
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def hello(server: Server, peer: Peer, *, wants_pool: bool = False) -> Session:
    sessions = server.parts.sessions
    return sessions.open(peer, os.urandom(16), "vanished", 0, server.parts.clock.now, wants_pool=wants_pool)


def lifeline(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WAIT_S)
    sock.connect(server.address)
    return sock


def say_hello(sock: socket.socket) -> m.Reply:
    sock.send(
        encode_request(
            m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "test", os.getpid(), [])
        )
    )
    return decode_reply(memoryview(sock.recv(1 << 16)))


def test_a_connection_that_says_nothing_is_ended_after_its_deadline(server: Server) -> None:
    with lifeline(server) as silent, lifeline(server) as greeted:
        assert isinstance(say_hello(greeted), m.Welcome)
        # The server's clock is not ours to move: it is asked what it does once the deadline has passed.
        assert on_loop(server, lambda: server.parts.sessions.next_check()) is not None
        on_loop(server, lambda: server.parts.sessions.check(server.parts.clock.now + HELLO_S))
        assert silent.recv(10) == b""
        greeted.send(encode_request(m.Ping(2, b"still here")))
        assert isinstance(decode_reply(memoryview(greeted.recv(1 << 16))), m.Pong)


def test_a_uid_has_only_so_many_connections_that_have_said_nothing(server: Server) -> None:
    silent = [lifeline(server) for _ in range(UNANSWERED_PER_UID_MAX)]
    try:
        with lifeline(server) as late:
            assert isinstance(say_hello(late), m.Welcome)
            assert isinstance(say_hello(silent[1]), m.Welcome)
            assert isinstance(say_hello(silent[-1]), m.Welcome)
            assert silent[0].recv(10) == b""  # the first had to go
    finally:
        for sock in silent:
            sock.close()


def test_a_session_is_known_by_the_name_that_it_gave_itself(server: Server) -> None:
    assert on_loop(server, lambda: server.parts.sessions.name_of(hello(server, Caller()).id)) == "vanished"
    assert on_loop(server, lambda: server.parts.sessions.name_of(1 << 40)) is None


def test_vanished_hellos_of_one_origin_leave_room_for_everybody_else(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def vanish() -> None:
        for _ in range(SESSIONS_MAX + 10):
            hello(server, Caller())

    with caplog.at_level(logging.WARNING):
        on_loop(server, vanish)
    assert on_loop(server, lambda: len(server.parts.sessions)) == SESSIONS_PER_ORIGIN_MAX
    assert "held nothing, and was ended" in caplog.text
    with server.connect() as client:
        client.ping()


def test_at_the_limit_the_longest_silent_session_that_holds_nothing_is_ended(
    server: Server, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of("a")
    with server.connect(maps_pool=False) as scheduler, server.connect() as worker:
        worker.store(keys, [payload(namespace, 1)], namespace=namespace)
        promised = scheduler.lookup(keys, namespace=namespace, hold=True)
        assert promised.promise

        def fill() -> list[Session]:
            return [hello(server, Caller(f"key {i % 8}")) for i in range(SESSIONS_MAX + 5)]

        with caplog.at_level(logging.WARNING):
            opened = on_loop(server, fill)
        ended = [session.state is SessionState.ENDED for session in opened]
        assert ended == [True] * ended.count(True) + [False] * ended.count(False)  # the longest silent went first
        assert ended.count(True) == 7  # five too many, and the two of ours stay
        assert "a limit of sessions is reached" in caplog.text
        worker.ping()
        assert scheduler.free_lookup_locks(promised.promise) == 1  # it held something


def test_at_the_limit_of_an_origin_no_worker_of_it_has_to_go(server: Server, namespace: Namespace) -> None:
    keys = keys_of("a")
    with server.connect() as worker:
        worker.store(keys, [payload(namespace, 1)], namespace=namespace)
        origin = f"uid {os.geteuid()}"

        def crowd() -> None:
            for _ in range(SESSIONS_PER_ORIGIN_MAX):
                session = hello(server, Caller(origin))
                server.parts.kernel.lookup(
                    session.id, namespace.id, keys, server.parts.clock.now, hold=True, prefix=True
                )
            hello(server, Caller(origin))

        with pytest.raises(LimitError, match="each holds something"):
            on_loop(server, crowd)
        assert worker.links.current().session in {each.id for each in server.parts.sessions}


def test_rows_that_nobody_took_go_to_who_comes_next(server: Server, namespace: Namespace) -> None:
    def seat_all() -> list[Session]:
        callers = [Caller(f"key {i}") for i in range(WORKERS_MAX - ROWS_RETURNING_MAX)]
        for caller in callers:
            caller.can_pass_fd = True
        return [hello(server, caller, wants_pool=True) for caller in callers]

    seated = on_loop(server, seat_all)
    assert {session.state for session in seated} == {SessionState.SEATED}
    with server.connect() as worker:
        assert worker.store(keys_of("a"), [payload(namespace, 1)], namespace=namespace).stored == 1


def test_a_worker_that_was_given_a_row_is_believed_once_it_has_locked_it(server: Server) -> None:
    """Its number and nonce it was told in the hello; only the lock shows that the pool is mapped, and who is alive."""
    caller = Caller()
    caller.can_pass_fd = True
    session = on_loop(server, lambda: hello(server, caller, wants_pool=True))

    def attach() -> None:
        on_loop(
            server,
            lambda: server.parts.sessions.attach(session, session.row, session.nonce, [], server.parts.clock.now),
        )

    with pytest.raises(NotAttachedError, match="lock the row"):
        attach()
    assert session.state is SessionState.SEATED
    assert not session.maps_pool
    with Segment.attach_fd(server.parts.segment.worker_fd(), server.parts.segment.info) as mapped:
        lock = LifeLock.acquire(mapped, session.row)
        attach()
        assert session.maps_pool
        lock.close()


def test_the_row_of_a_dead_worker_goes_to_who_comes_before_the_clock_has_looked_at_its_lock(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LIFE_CHECK_S_MIN", 600.0)
    caller, follower = Caller(), Caller()
    caller.can_pass_fd = follower.can_pass_fd = True
    session = on_loop(server, lambda: hello(server, caller, wants_pool=True))
    with Segment.attach_fd(server.parts.segment.worker_fd(), server.parts.segment.info) as mapped:
        lock = LifeLock.acquire(mapped, session.row)
        on_loop(
            server,
            lambda: server.parts.sessions.attach(session, session.row, session.nonce, [], server.parts.clock.now),
        )
        on_loop(server, lambda: server.parts.sessions.lost(caller, server.parts.clock.now))
        server.parts.shares.rows.total = 1
        with pytest.raises(LimitError, match="worker rows"):
            on_loop(server, lambda: hello(server, follower, wants_pool=True))
        assert session.state is SessionState.LOST, "its end is not proven"
        lock.close()
        assert on_loop(server, lambda: hello(server, follower, wants_pool=True)).state is SessionState.SEATED
    assert session.ended_by == "die"


def test_where_all_rows_are_taken_no_session_that_holds_a_promise_has_to_go(
    server: Server, namespace: Namespace
) -> None:
    def seat_all() -> list[Session]:
        callers = [Caller(f"key {i}") for i in range(WORKERS_MAX - ROWS_RETURNING_MAX - 1)]  # one has stored
        for caller in callers:
            caller.can_pass_fd = True
        return [hello(server, caller, wants_pool=True) for caller in callers]

    keys = keys_of("a")
    with server.connect() as worker:
        assert worker.store(keys, [payload(namespace, 1)], namespace=namespace).stored == 1
        seated = on_loop(server, seat_all)
        holder, idle = seated[0], seated[1]  # the longest silent of all, and the next one
        hold = lambda: server.parts.kernel.lookup(holder.id, namespace.id, keys, server.parts.clock.now, hold=True)  # noqa: E731
        assert on_loop(server, hold).promise_id
        with server.connect() as other:
            assert other.store(keys_of("b"), [payload(namespace, 1)], namespace=namespace).stored == 1
            assert holder.state is SessionState.SEATED
            assert idle.state is SessionState.ENDED


def test_over_zmq_a_hello_takes_no_row_and_nobody_is_believed_without_a_proof(server: Server) -> None:
    def rows() -> int:
        return sum(server.parts.segment.tables.row_claimed(row) for row in range(WORKERS_MAX))

    sessions = on_loop(server, lambda: [hello(server, Caller(), wants_pool=True) for _ in range(WORKERS_MAX + 6)])
    assert on_loop(server, rows) == 0
    last = sessions[-1]
    with Segment.attach_fd(server.parts.segment.worker_fd(), server.parts.segment.info) as mapped:
        lock = LifeLock.acquire(mapped, NO_ROW)
        for row, nonce in ((lock.row, 1234), (0, mapped.shown(0)), (WORKERS_MAX, mapped.shown(0)), (-1, 0)):
            with pytest.raises(NotAttachedError, match="has not proved that it maps row"):
                on_loop(server, lambda row=row, nonce=nonce: server.parts.sessions.attach(last, row, nonce, [], 0.0))
        assert last.state is SessionState.OPEN
        on_loop(
            server,
            lambda: server.parts.sessions.attach(last, lock.row, mapped.shown(lock.row), [], server.parts.clock.now),
        )
        assert last.state is SessionState.ATTACHED
        with pytest.raises(NotAttachedError):  # one row is one worker's
            on_loop(
                server, lambda: server.parts.sessions.attach(sessions[-2], lock.row, mapped.shown(lock.row), [], 0.0)
            )
        lock.close()


def test_a_promise_outlives_the_connection_of_its_scheduler(server: Server, namespace: Namespace) -> None:
    keys = keys_of("a")
    with server.connect() as worker:
        worker.store(keys, [payload(namespace, 1)], namespace=namespace)
        scheduler = server.connect(maps_pool=False)
        promised = scheduler.lookup(keys, namespace=namespace, hold=True)
        sessions = on_loop(server, lambda: list(server.parts.sessions))
        lost = max(sessions, key=lambda each: each.id)
        on_loop(server, lambda: server.parts.sessions.lost(lost.peer, server.parts.clock.now))
        assert lost.state is SessionState.LOST
        assert worker.status()["l1"]["leases_by_kind"]["promise"] == 1
        lease = worker.prepare_retrieve(keys, namespace=namespace, promise=promised.promise)
        lease.finish()
        assert worker.status()["l1"]["leases_by_kind"]["promise"] == 0
        on_loop(server, lambda: server.parts.sessions.check(server.parts.clock.now + HELLO_S))
        assert lost.state is SessionState.ENDED
        scheduler.close()


def test_a_peer_that_has_said_nothing_may_hang_up(server: Server) -> None:
    on_loop(server, lambda: server.parts.sessions.lost(Caller(), server.parts.clock.now))
    assert server.parts.loop.faults == 0


def test_a_forked_child_of_an_embedded_server_watches_over_nobody(server: Server) -> None:
    with lifeline(server) as greeted:
        assert isinstance(say_hello(greeted), m.Welcome)
        session = on_loop(server, lambda: next(iter(server.parts.sessions)))
        watched = session.pidfd
        assert watched > 0
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.fstat(watched)
            except OSError:
                status = int(session.pidfd != -1)
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session.pidfd == watched
        os.fstat(watched)


def test_the_goodbye_of_a_client_that_reads_no_answers_ends_its_session(server: Server) -> None:
    with lifeline(server) as deaf:
        assert isinstance(say_hello(deaf), m.Welcome)
        session = on_loop(server, lambda: next(iter(server.parts.sessions)))

        def fill() -> None:  # no further answer has room
            assert session.peer is not None
            for nbytes in [60_000] * 4 + [1] * SEND_QUEUE_FRAMES_MAX:
                if len(session.peer.waiting) < SEND_QUEUE_FRAMES_MAX:
                    session.peer.send(bytes(nbytes))

        on_loop(server, fill)
        deaf.send(encode_request(m.EndSession(1, goodbye=True)))
    for _ in range(100):  # turns of the loop
        if on_loop(server, lambda: session.state) is SessionState.ENDED:
            break
    assert session.ended_by in ("goodbye", "drop"), (
        "its request may stay unread, as its answers do: then the hang-up ends it"
    )
    assert server.dispatch.counters["internal_errors"] == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_worker_whose_rows_are_all_locked_by_a_stranger_works_and_its_end_is_seen_at_once(
    server: Server, namespace: Namespace
) -> None:
    """The stranger keeps the locks: only the life token can show the end, of one client in a process that lives on."""
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with Segment.attach_fd(server.parts.segment.worker_fd(), server.parts.segment.info) as mapped:
        fcntl.fcntl(mapped.fileno(), fcntl.F_OFD_SETLK, whole)
        worker = server.connect()
        assert worker.store(keys_of("a"), [payload(namespace, 1)], namespace=namespace).stored == 1
        lease = worker.prepare_store(keys_of("b"), namespace=namespace)
        lock = worker.links.current().life_lock
        assert lock is not None
        assert not lock.locked
        with server.connect(maps_pool=False) as watcher:
            assert watcher.status()["l1"]["leases_by_kind"]["write"] == 1
            del lock, lease, worker
            until(lambda: watcher.status()["l1"]["leases_by_kind"]["write"] == 0, "the end of its lease")
