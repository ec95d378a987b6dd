"""The listener for routers: libzmq's peers talk to it, and whatever others send, what it keeps is bounded."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core import zmq_door
from lmcache_core.limits import HELLO_S, ZMTP_REQUESTS_MAX, ZMTP_STALLED_S, ZMTP_TOPIC_BYTES_MAX, ZMTP_TOPICS_MAX
from lmcache_core.protocol.zmtp import Bounds, Turns, Unread, ZmtpListener, encode_message
from lmcache_testing.waiting import until

MIB = 1 << 20
UNREAD_BYTES_MAX = 8 * MIB, 32 * MIB, 64 * MIB  # for a connection, a holder and all
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


class Turning:
    """A listener with its loop, which turns only when it is told to."""

    def __init__(self, kind: bytes, endpoint: str, **more: Any) -> None:
        self.turns = Turns()
        self.now = 0.0
        self.unread = Unread.within(*UNREAD_BYTES_MAX)
        self.account = self.unread.open("nobody").wholes[-1]
        bounds = Bounds(1024, 2048, 128)
        self.listener = ZmtpListener(kind, endpoint, self.turns, self.unread, lambda: self.now, bounds, **more)
        self.endpoint = endpoint
        self.answers = lambda frames: iter([encode_message(b"", b"answer to", *frames[1:])])

    @property
    def kept(self) -> int:
        """Bytes that wait for all."""
        assert self.account is not None
        return self.account.nbytes

    def turn(self) -> None:
        self.turns.turn(0.01, 100)
        while self.listener.pump():
            pass
        self.listener.answer(lambda frames: self.answers(frames))

    def until(self, true: Callable[[], object]) -> None:
        def turned() -> bool:
            self.turn()
            return bool(true())

        until(turned)

    def close(self) -> None:
        self.listener.close()
        self.listener.remove_name()
        self.turns.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[bytes], Turning]]:
    with ExitStack() as closing:

        def made(kind: bytes) -> Turning:
            turning = Turning(kind, f"ipc://{tmp_path}/{kind.decode()}")
            closing.callback(turning.close)
            return turning

        yield made


@pytest.fixture
def stranger(make: Callable[[bytes], Turning]) -> Iterator[Callable[..., socket.socket]]:
    """Opens connections that speak the protocol by hand."""
    with ExitStack() as closing:

        def opened(turning: Turning, kind: bytes = b"") -> socket.socket:
            sock = closing.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(turning.endpoint.removeprefix("ipc://"))
            sock.setblocking(False)
            if kind:
                ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
                sock.send(GREETING + bytes((4, len(ready))) + ready)
                before = sum(peer.ready for peer in turning.listener.peers.values())
                turning.until(lambda: sum(peer.ready for peer in turning.listener.peers.values()) > before)
            return sock

        yield opened


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


def ended(turning: Turning, sock: socket.socket) -> bool:
    """Whether the listener has closed this connection."""
    turning.turn()
    try:
        return sock.recv(MIB) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.XSUB])
def test_a_subscriber_of_libzmq_gets_its_topic_and_nothing_else(
    make: Callable[[bytes], Turning], context: zmq.Context[zmq.Socket[bytes]], kind: int
) -> None:
    turning = make(b"PUB")
    with context.socket(kind) as sub:
        sub.linger = 0
        sub.heartbeat_ivl = 10  # it also asks all the time whether we are there
        sub.connect(turning.endpoint)
        if kind == zmq.SUB:
            sub.subscribe(b"kv")
        else:
            sub.send(b"\x01kv")
        turning.until(lambda: any(peer.topics for peer in turning.listener.peers.values()))
        turning.listener.publish(b"other", encode_message(b"other", b"1"))
        turning.listener.publish(b"kv@node", encode_message(b"kv@node", bytes(100_000)))
        turning.until(lambda: sub.poll(0))
        assert sub.recv_multipart() == [b"kv@node", bytes(100_000)]
        for _ in range(20):
            turning.turn()
        assert len(turning.listener.peers) == 1, "its heartbeats are answered"


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_a_request_of_libzmq_is_answered(
    make: Callable[[bytes], Turning], context: zmq.Context[zmq.Socket[bytes]], kind: int
) -> None:
    turning = make(b"ROUTER")
    with context.socket(kind) as asks:
        asks.linger = 0
        asks.connect(turning.endpoint)
        asks.send_multipart([b"", b"this"] if kind == zmq.DEALER else [b"this"])
        turning.until(lambda: asks.poll(0))
        assert asks.recv_multipart()[-2:] == [b"answer to", b"this"]


def test_a_message_that_never_ends_ends_the_connection(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket]
) -> None:
    turning = make(b"ROUTER")
    sock = stranger(turning, b"DEALER")
    for _ in range(4):
        with suppress(OSError):
            sock.send(b"\x03" + struct.pack(">Q", 1000) + bytes(1000))  # more follows
    turning.until(lambda: ended(turning, sock))


def test_empty_parts_of_a_message_count_too(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket]
) -> None:
    turning = make(b"ROUTER")
    sock = stranger(turning, b"DEALER")
    sock.send(b"\x01\x00" * 1000)
    turning.until(lambda: ended(turning, sock))


def test_too_many_subscriptions_end_the_connection(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket]
) -> None:
    turning = make(b"PUB")
    sock = stranger(turning, b"SUB")
    for number in range(ZMTP_TOPICS_MAX):
        sock.send(b"\x00\x05\x01" + struct.pack(">I", number))
    turning.until(lambda: any(len(peer.topics) == ZMTP_TOPICS_MAX for peer in turning.listener.peers.values()))
    sock.send(b"\x00\x05\x00" + struct.pack(">I", 0) + b"\x00\x05\x01more")  # one fewer, and one more
    sock.send(b"\x00\x05\x01last")
    turning.until(lambda: ended(turning, sock))


def _came(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_a_long_subscription_ends_the_connection_and_a_router_keeps_none(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket]
) -> None:
    turning = make(b"PUB")
    sock = stranger(turning, b"SUB")
    sock.send(b"\x02" + struct.pack(">Q", ZMTP_TOPIC_BYTES_MAX + 2) + b"\x01" + bytes(ZMTP_TOPIC_BYTES_MAX + 1))
    turning.until(lambda: ended(turning, sock))
    router = make(b"ROUTER")
    sock = stranger(router, b"DEALER")
    before = sock.recv(1 << 16)
    assert b"READY" in before
    sock.send(b"\x04\x0e\x09SUBSCRIBEmore" + b"\x04\x09\x04PING\x00\x00id")
    router.until(lambda: b"PONG" in _came(sock))
    assert not any(peer.topics for peer in router.listener.peers.values())


def test_who_has_lost_its_proof_makes_room_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(zmq_door, "ZMQ_CONNECTIONS_MAX", 2)
    turning = Turning(b"ROUTER", f"ipc://{tmp_path}/router")
    turning.listener.bounds = turning.listener.bounds._replace(unproven=8)  # its peers can prove themselves
    with ExitStack() as closing:
        closing.callback(turning.close)

        def connect() -> socket.socket:
            sock = closing.enter_context(socket.socket(socket.AF_UNIX))
            before = len(turning.listener.peers) + turning.listener.turned_away
            sock.connect(turning.endpoint.removeprefix("ipc://"))
            sock.setblocking(False)
            turning.until(lambda: len(turning.listener.peers) + turning.listener.turned_away > before)
            return sock

        socks = [connect(), connect()]
        for peer in turning.listener.peers.values():
            turning.listener.proven(peer)
        turning.until(lambda: ended(turning, connect()))
        turning.listener.unproven(next(iter(turning.listener.peers.values())))
        newcomer = connect()
        turning.until(lambda: ended(turning, socks[0]))
        assert not ended(turning, newcomer)
        assert not ended(turning, socks[1])


def test_an_answer_is_made_as_it_is_read_and_others_are_answered_meanwhile(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket],
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:  # fmt: skip
    turning, made = make(b"ROUTER"), []
    page = encode_message(b"", bytes(100_000))

    def long(frames: list[bytes]) -> Iterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield page
        yield encode_message(b"", b"end")

    turning.answers = long
    sock = stranger(turning, b"DEALER")
    sock.send(b"\x01\x00\x00\x01x" * 3 * ZMTP_REQUESTS_MAX)
    turning.until(lambda: turning.kept > 256 << 10)
    for _ in range(50):
        turning.turn()
    (peer,) = turning.listener.peers.values()
    assert len(made) < 20
    assert len(peer.requests) <= 3 * ZMTP_REQUESTS_MAX
    assert turning.kept < MIB
    turning.answers = lambda frames: iter([encode_message(b"", b"short")])
    with context.socket(zmq.REQ) as asks:
        asks.linger = 0
        asks.connect(turning.endpoint)
        asks.send(b"x")
        turning.until(lambda: asks.poll(0))
        assert asks.recv() == b"short"
    turning.now += ZMTP_STALLED_S
    turning.listener.tend()
    assert turning.kept == 0, "who reads nothing of an answer is disconnected"


def test_a_subscriber_that_does_not_read_misses_batches_and_all_together_are_bounded(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket]
) -> None:
    turning = make(b"PUB")
    socks = [stranger(turning, b"SUB") for _ in range(10)]
    for sock in socks:
        sock.send(b"\x00\x01\x01")
    turning.until(lambda: all(peer.topics for peer in turning.listener.peers.values()))
    message = encode_message(b"", bytes(MIB))
    for _ in range(20):
        turning.listener.publish(b"", message)
        peers = list(turning.listener.peers.values())
        assert all(peer.unread.nbytes <= UNREAD_BYTES_MAX[0] for peer in peers)
        assert turning.kept == sum(peer.unread.nbytes for peer in peers)
        assert turning.kept <= UNREAD_BYTES_MAX[1], "they are one user's"
    turning.turn()
    assert turning.unread.dropped == 10 - len(turning.listener.peers) > 0


def test_who_has_hung_up_is_forgotten_with_all_that_it_asked_for(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket]
) -> None:
    turning = make(b"ROUTER")
    answered = []

    def answers(frames: list[bytes]) -> Iterator[bytes]:
        answered.append(frames)
        yield encode_message(b"", b"answer")

    turning.answers = answers
    sock = stranger(turning, b"DEALER")
    with suppress(BlockingIOError):
        while True:  # as much as the socket takes, and more than a listener reads in a turn
            sock.send(encode_message(b"", b"5"))
    sock.close()
    turning.until(lambda: not turning.listener.peers)
    assert len(answered) <= ZMTP_REQUESTS_MAX


def test_who_does_not_finish_the_handshake_is_disconnected(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket]
) -> None:
    turning = make(b"PUB")
    silent, half, whole = stranger(turning), stranger(turning), stranger(turning, b"SUB")
    half.send(GREETING[:20])
    turning.until(lambda: len(turning.listener.peers) == 3)
    turning.now = HELLO_S - 0.1
    turning.listener.tend()
    assert len(turning.listener.peers) == 3
    turning.now = HELLO_S
    turning.listener.tend()
    turning.until(lambda: ended(turning, silent))
    turning.until(lambda: ended(turning, half))
    assert not ended(turning, whole)


def test_the_address_with_most_connections_makes_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_door, "ZMQ_CONNECTIONS_MAX", 5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    turning = Turning(b"PUB", f"tcp://127.0.0.1:{port}")
    with ExitStack() as closing:
        closing.callback(turning.close)
        many = [closing.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        turning.until(lambda: turning.listener.turned_away == 3)
        one = closing.enter_context(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)))
        turning.until(lambda: turning.listener.turned_away == 4)
        for sock in (*many, one):
            sock.setblocking(False)
        for sock in many[4:]:
            turning.until(lambda sock=sock: ended(turning, sock))
        assert not any(ended(turning, sock) for sock in (*many[:4], one))


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x01" + bytes(60),
                                  GREETING[:12] + b"PLAIN".ljust(20, b"\0") + bytes(32)])  # fmt: skip
def test_who_speaks_something_else_is_disconnected(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket], sent: bytes
) -> None:
    turning = make(b"PUB")
    sock = stranger(turning)
    sock.send(sent)
    turning.until(lambda: ended(turning, sock))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.booleans(), st.lists(st.one_of(
    st.binary(max_size=80),
    st.builds(lambda flags, body: bytes((flags, len(body))) + body, st.integers(0, 7), st.binary(max_size=255)),
    st.builds(lambda body: b"\x04" + bytes((len(body),)) + body, st.sampled_from(
        [b"\x04PING\x00\x01x", b"\x04PING", b"\x09SUBSCRIBEkv", b"\x06CANCELkv", b"\xff", b"", b"\x05READY\xff"])),
), max_size=30))  # fmt: skip
def test_whatever_is_sent_harms_only_its_sender(
    make: Callable[[bytes], Turning], stranger: Callable[..., socket.socket], publishes: bool, sent: list[bytes]
) -> None:
    turning = make(b"PUB" if publishes else b"ROUTER")
    sock = stranger(turning, b"SUB" if publishes else b"DEALER")
    for data in sent:
        with suppress(OSError):
            sock.send(data)
        turning.turn()
    for peer in turning.listener.peers.values():
        assert len(peer._came) < 4096
        assert len(peer._parts) < 64
    turning.close()
    assert turning.kept == 0


def test_the_socket_of_a_dead_server_is_replaced_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    turning = Turning(b"PUB", f"ipc://{path}")
    with pytest.raises(OSError, match="in use"):
        Turning(b"PUB", f"ipc://{path}")
    turning.close()
    assert not path.exists()
