"""Many threads on one connection: every reply finds its thread, and no thread waits for one that has come."""

from __future__ import annotations

import os
import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.client.link.channel import Channel, Pending
from lmcache_core.client.link.connection import Connection, LifelineConnection, ZmqConnection
from lmcache_core.errors import DisconnectedError
from lmcache_core.limits import FRAME_BYTES_MAX, OWED_FRAMES_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode, read_request
from lmcache_core.trust import Trust
from lmcache_testing.waiting import WAIT_S, until


class Script(Connection):
    """A connection whose replies are put in by the test: a message, or an exception that `receive` raises."""

    carrier = "script"

    def __init__(self) -> None:
        self.sent: list[m.Request] = []
        self.coming: queue.SimpleQueue[m.Message | BaseException] = queue.SimpleQueue()
        self.closed = threading.Event()
        self.full = threading.Event()  # the server does not read

    def connect(self) -> bool:
        return True

    def poll(self, deadline: float) -> None:
        self.closed.wait(max(0.0, deadline - time.monotonic()))

    def send(self, frame: bytes, deadline: float) -> bool:
        if self.full.is_set():
            return False
        self.sent.append(read_request(frame))
        return True

    def send_waiting(self, frames: deque[bytes]) -> None:
        while frames and self.send(frames[0], 0.0):
            frames.popleft()

    def receive(self, deadline: float) -> memoryview | None:
        while not self.closed.is_set():
            with suppress(queue.Empty):
                coming = self.coming.get(timeout=max(0.0, min(0.05, deadline - time.monotonic())))
                if isinstance(coming, BaseException):
                    raise coming
                return memoryview(encode(coming))
            if time.monotonic() >= deadline:
                return None
        raise DisconnectedError("closed")

    def received(self) -> None: ...

    def ended(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    def close_in_child(self) -> None:
        self.closed.set()


class Caller(threading.Thread):
    """One call on a thread of its own; what came of it."""

    def __init__(self, channel: Channel, payload: bytes, timeout_s: float = WAIT_S) -> None:
        super().__init__(daemon=True)
        self.pending = channel.start(m.Ping(0, payload))
        self.outcome: Any = None
        self._channel = channel
        self._timeout_s = timeout_s
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._channel.wait(self.pending, self._timeout_s)
        except (DisconnectedError, KeyboardInterrupt) as error:
            self.outcome = error

    def ended(self) -> Any:
        self.join(WAIT_S)
        assert not self.is_alive(), "the call never ended"
        return self.outcome


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def channel(script: Script) -> Iterator[Channel]:
    channel = Channel(script, lambda notice: None)
    yield channel
    channel.close()


def in_line(channel: Channel, count: int) -> list[Caller]:
    """Callers of whom the first reads and the others wait, in this order."""
    callers = [Caller(channel, b"0")]
    until(lambda: channel.waiting == 1)
    for number in range(1, count):
        callers.append(Caller(channel, str(number).encode()))
        until(lambda number=number: channel.waiting == number + 1)  # type: ignore[misc]
    return callers


def test_a_handle_that_is_only_polled_is_never_left_to_read_for_others(script: Script, channel: Channel) -> None:
    reader = Caller(channel, b"reader")
    until(lambda: channel.waiting == 1)
    handle = channel.start(m.Ping(0, b"polled"))
    assert channel.poll(handle) is None
    waiter = Caller(channel, b"waiter")
    until(lambda: channel.waiting == 2)
    script.coming.put(m.Pong(reader.pending.rid, b"reader"))
    assert reader.ended().payload == b"reader"
    script.coming.put(m.Pong(waiter.pending.rid, b"waiter"))
    assert waiter.ended().payload == b"waiter"


def test_a_reply_that_comes_while_its_thread_lies_down_is_seen(script: Script, channel: Channel) -> None:
    reader = Caller(channel, b"reader")
    until(lambda: channel.waiting == 1)
    late = channel.start(m.Ping(0, b"late"))
    # Whoever takes the lock next has looked for its reply just before: the reply comes in between.
    lock, came = channel._lock, threading.Event()

    class Between:
        def __enter__(self) -> None:
            if not came.is_set() and threading.current_thread() is not reader:
                came.set()
                script.coming.put(m.Pong(late.rid, b"late"))
                until(lambda: late.settled)
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    channel._lock = Between()  # type: ignore[assignment]
    started = time.monotonic()
    reply = channel.wait(late, WAIT_S)
    assert isinstance(reply, m.Pong)
    assert time.monotonic() - started < WAIT_S / 2  # it did not sleep until its timeout
    script.coming.put(m.Pong(reader.pending.rid, b""))
    reader.ended()


def test_a_lost_server_ends_every_waiting_call(script: Script, channel: Channel) -> None:
    callers = in_line(channel, 8)
    script.coming.put(DisconnectedError("gone"))
    assert all(isinstance(caller.ended(), DisconnectedError) for caller in callers)
    assert channel.lost
    with pytest.raises(DisconnectedError):
        channel.call(m.Noop(0))


def test_an_interrupted_reader_costs_no_other_thread_its_call(script: Script, channel: Channel) -> None:
    callers = in_line(channel, 4)
    script.coming.put(KeyboardInterrupt())
    assert isinstance(callers[0].ended(), KeyboardInterrupt)
    for caller in callers[1:]:
        script.coming.put(m.Pong(caller.pending.rid, b"well"))
        assert caller.ended().payload == b"well"
    assert not channel.lost


def test_an_interrupt_that_eats_the_wake_up_leaves_the_others_reading(script: Script, channel: Channel) -> None:
    callers = in_line(channel, 3)
    wake_one, kept = channel._wake_one, threading.local()

    def interrupted() -> None:
        if threading.current_thread() is callers[0] and not hasattr(kept, "once"):
            kept.once = True
            raise KeyboardInterrupt
        wake_one()

    channel._wake_one = interrupted  # type: ignore[method-assign]
    script.coming.put(m.Pong(callers[0].pending.rid, b""))
    assert isinstance(callers[0].ended(), KeyboardInterrupt)
    for caller in callers[1:]:
        script.coming.put(m.Pong(caller.pending.rid, b"well"))
        assert caller.ended().payload == b"well"


def undo_of(reply: m.Reply) -> m.Message | None:
    assert isinstance(reply, m.LookupReply)
    return m.FreeLookupLocks(0, [reply.promise])


def undone(script: Script) -> list[int]:
    return [promise for sent in script.sent if isinstance(sent, m.FreeLookupLocks) for promise in sent.promises]


def found(rid: int, promise: int) -> m.LookupReply:
    return m.LookupReply(rid, b"", b"", 0, True, promise, 60.0, 0)


@pytest.mark.parametrize("way", ["dropped", "dropped late", "abandoned", "abandoned late", "told"])
def test_what_an_answer_granted_that_nobody_took_is_undone_by_whoever_reads_next(
    script: Script, channel: Channel, way: str
) -> None:
    pending: Pending | None = channel.start(m.LookupRequest(0, 1, b"", m.LookupOptions(hold=True)), undo_of)
    assert pending is not None
    answer = found(pending.rid, 7)
    if way in ("dropped late", "abandoned late", "told"):
        script.coming.put(answer)
        assert channel.poll(pending) == answer
    if way == "told":
        pending.tell()
    if way.startswith("abandoned"):
        channel.cancel(pending)
    else:
        pending = None
    if way in ("dropped", "abandoned"):
        script.coming.put(answer)
    other = channel.start(m.Noop(0))
    script.coming.put(m.Done(other.rid))
    channel.wait(other, WAIT_S)
    assert undone(script) == ([] if way == "told" else [7])
    del pending
    channel.wait(other, WAIT_S)
    channel.start(m.Noop(0))
    assert len(undone(script)) <= 1
    assert channel.under_way <= 1  # nothing is kept of calls that have ended


def silence(channel: Channel) -> None:
    """A call meets a hang."""
    with pytest.raises(DisconnectedError, match="does not answer"):
        channel.wait(channel.start(m.Ping(0, b"unheard")), 0.0)
    assert channel.silent


def test_a_call_that_times_out_ends_itself_alone(script: Script, channel: Channel) -> None:
    callers = in_line(channel, 3)
    hasty = Caller(channel, b"hasty", timeout_s=0.05)
    assert isinstance(hasty.ended(), DisconnectedError)
    assert not channel.lost
    for caller in callers:
        script.coming.put(m.Pong(caller.pending.rid, b"late"))
    assert all(caller.ended().payload == b"late" for caller in callers)


def test_after_a_hang_calls_end_at_once_until_the_server_is_heard(script: Script, channel: Channel) -> None:
    silence(channel)
    unheard = script.sent[-1].rid
    for _ in range(3):
        with pytest.raises(DisconnectedError, match="silent"):
            channel.call(m.Noop(0))
    assert not any(isinstance(each, m.Noop) for each in script.sent), "nothing more was asked"
    script.coming.put(m.Pong(unheard, b"late"))  # its answer comes, late, on the same connection
    pending = channel.start(m.Noop(0))
    script.coming.put(m.Done(pending.rid))
    assert isinstance(channel.wait(pending), m.Done)
    assert not channel.silent
    assert not channel.lost


def test_a_late_call_alone_is_no_hang_while_others_are_answered(script: Script, channel: Channel) -> None:
    late = channel.start(m.Ping(0, b"late"))
    script.coming.put(m.Pong(channel.start(m.Ping(0, b"")).rid, b""))
    with pytest.raises(DisconnectedError):
        channel.wait(late, 0.0)
    assert not channel.silent


def test_what_ends_something_is_sent_to_a_silent_server_and_goes_when_it_reads_again(
    script: Script, channel: Channel
) -> None:
    silence(channel)
    unheard = script.sent[-1].rid
    with pytest.raises(DisconnectedError):
        channel.call(m.FinishRead(0, 7))
    assert isinstance(script.sent[-1], m.FinishRead)
    script.full.set()
    for lease in (8, 9):
        with pytest.raises(DisconnectedError):
            channel.call(m.AbortStore(0, lease))
    assert isinstance(script.sent[-1], m.FinishRead)
    script.full.clear()
    script.coming.put(m.Pong(unheard, b""))
    channel.listen()
    assert [each.lease for each in script.sent[-2:]] == [8, 9]  # type: ignore[union-attr]


def test_a_call_that_was_never_sent_is_not_taken_back(script: Script, channel: Channel) -> None:
    silence(channel)
    for _ in range(3):
        with pytest.raises(DisconnectedError, match="silent"):
            channel.call_held_back(m.Noop(0))
    assert not [each for each in script.sent if isinstance(each, m.Cancel)]
    assert not channel._owed


def test_waiting_for_a_while_changes_nothing(script: Script, channel: Channel) -> None:
    pending = channel.start(m.Ping(0, b""))
    assert channel.wait_for(pending, 0.0) is None
    assert not channel.silent
    script.coming.put(m.Pong(pending.rid, b"here"))
    reply = channel.wait_for(pending, WAIT_S)
    assert isinstance(reply, m.Pong)
    assert reply.payload == b"here"


def test_a_server_that_does_not_read_is_not_waited_for_by_who_must_not_block(script: Script, channel: Channel) -> None:
    script.full.set()
    calls = [channel.start(m.Ping(0, b"%d" % n), blocks=False) for n in range(3)]
    assert channel.poll(calls[0]) is None
    assert not channel.silent
    assert not script.sent
    script.full.clear()
    assert channel.poll(calls[0]) is None
    assert [each.payload for each in script.sent] == [b"0", b"1", b"2"]  # type: ignore[union-attr]


def test_a_server_that_does_not_read_for_the_time_of_a_call_hangs(script: Script) -> None:
    channel = Channel(script, lambda notice: None, timeout_s=0.01)
    script.full.set()
    with pytest.raises(DisconnectedError, match="read"):
        channel.call(m.Noop(0))
    assert channel.silent
    channel.close()


def test_a_call_that_is_abandoned_while_another_thread_waits_for_it_ends_that_wait(
    script: Script, channel: Channel
) -> None:
    callers = in_line(channel, 3)
    channel.cancel(callers[1].pending)
    assert isinstance(callers[1].ended(), DisconnectedError)
    assert not channel.lost
    for caller in (callers[0], callers[2]):
        script.coming.put(m.Pong(caller.pending.rid, b"well"))
        assert caller.ended().payload == b"well"


def test_a_server_that_does_not_know_us_ends_the_connection_so_that_the_next_call_says_hello(
    script: Script, channel: Channel
) -> None:
    caller = Caller(channel, b"")
    script.coming.put(m.Error(caller.pending.rid, "DISCONNECTED", "say hello", "reconnect"))
    assert isinstance(caller.ended(), DisconnectedError)
    assert channel.lost


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(6)),
    abandoned=st.sets(st.integers(0, 5), max_size=2),
    polled=st.lists(st.integers(0, 5), max_size=6),
    strays=st.integers(0, 2),
)
def test_replies_in_any_order_find_their_threads(
    order: list[int], abandoned: set[int], polled: list[int], strays: int
) -> None:
    script = Script()
    channel = Channel(script, lambda notice: None)
    callers = in_line(channel, 6)
    for number in polled:
        channel.poll(callers[number].pending)
    for number in abandoned - {0}:
        channel.cancel(callers[number].pending)
    for _ in range(strays):
        script.coming.put(m.Pong(10_000, b"nobody's"))
    for number in order:
        script.coming.put(m.Pong(callers[number].pending.rid, str(number).encode()))
    for number, caller in enumerate(callers):
        outcome = caller.ended()
        if number in abandoned - {0}:
            assert isinstance(outcome, DisconnectedError)
        else:
            assert outcome.payload == str(number).encode()
    assert not channel.lost
    assert not channel.waiting
    channel.close()


def answer_out_of_order(sock: socket.socket, seed: int) -> None:
    """A server that keeps some requests back and answers them in an order of its own."""
    rng = random.Random(seed)
    kept: list[m.Ping] = []
    sock.settimeout(0.001)
    while True:
        try:
            frame = sock.recv(FRAME_BYTES_MAX)
            if not frame:
                return
            request = read_request(frame)
            assert isinstance(request, m.Ping)
            kept.append(request)
        except TimeoutError:
            pass
        except OSError:
            return
        rng.shuffle(kept)
        while kept and (len(kept) > 3 or rng.random() < 0.5):
            request = kept.pop()
            try:
                sock.send(encode(m.Pong(request.rid, request.payload)))
            except OSError:  # the client has what it waited for, and is gone
                return


def busy(channel: Channel, seed: int, failures: list[str]) -> None:
    rng = random.Random(seed)
    for number in range(150):
        payload = f"{seed} {number}".encode()
        try:
            pending = channel.start(m.Ping(0, payload))
            if not finished(channel, pending, payload, rng):
                failures.append(f"{payload!r}: the wrong reply")
        except DisconnectedError as error:
            failures.append(f"{payload!r}: {error}")
            return


def finished(channel: Channel, pending: Pending, payload: bytes, rng: random.Random) -> bool:
    way = rng.randrange(4)
    if way == 0:
        channel.cancel(pending)
        return True
    if way == 1:
        while (reply := channel.poll(pending)) is None:
            time.sleep(0.0005)
    else:
        reply = channel.wait(pending, WAIT_S)
    return isinstance(reply, m.Pong) and reply.payload == payload


def test_eight_threads_that_wait_poll_and_abandon_never_miss_a_reply() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(LifelineConnection(ours), lambda notice: None)
    server = threading.Thread(target=answer_out_of_order, args=(theirs, 1), daemon=True)
    server.start()
    failures: list[str] = []
    threads = [threading.Thread(target=busy, args=(channel, seed, failures), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    channel.close()
    server.join(WAIT_S)
    theirs.close()


def test_what_a_hung_server_is_owed_is_never_dropped_but_said_anew_over_the_next_connection(
    channel: Channel, script: Script
) -> None:
    script.full.set()
    for _ in range(OWED_FRAMES_MAX):
        channel.post(m.Noop(0))
    assert not channel.lost
    channel.post(m.Noop(0))
    assert channel.lost


def descriptors() -> dict[str, str]:
    """What this process has open, by number."""
    found = {}
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found[each.name] = str(each.readlink())
    return found


def test_a_connection_that_is_left_to_the_parent_closes_the_descriptors_that_it_has_opened_itself(
    tmp_path: Path,
) -> None:
    before = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline = LifelineConnection(ours)
    with theirs, (tmp_path / "pool").open("wb") as pool:
        socket.send_fds(theirs, [encode(m.Noop(1))], [pool.fileno()])
        assert lifeline.receive(time.monotonic() + WAIT_S) is not None  # nobody has taken the descriptor yet
        lifeline.close_in_child()
    assert descriptors() == before

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/router")
        connection = ZmqConnection(f"ipc://{tmp_path}/router", None, Trust.of_client(None))
        child = os.fork()
        if not child:
            opened = descriptors()
            connection.close_in_child()
            closed = [opened[number] for number in opened.keys() - descriptors().keys()]
            os._exit(int(closed != ["anon_inode:[eventfd]"]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        connection.close()
