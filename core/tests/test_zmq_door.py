"""A bound ZMQ socket has no more connections than it may, whoever opens them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from lmcache_core import zmq_door
from lmcache_core.zmq_door import ZmqDoor
from lmcache_testing.waiting import until

UNPROVEN_MAX = 8
STRANGERS = 60


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[zmq.Socket[bytes]]:
    monkeypatch.setattr(zmq_door, "ZMQ_UNPROVEN_MAX", UNPROVEN_MAX)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.linger = 0
        yield bound


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_silent_connections_take_few_descriptors_and_a_proven_one_stays(router: zmq.Socket[bytes]) -> None:
    with ExitStack() as closing:
        door = ZmqDoor(router)
        closing.callback(door.close)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer = closing.enter_context(router.context.socket(zmq.DEALER))
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        identity = router.recv()
        first = router.recv(copy=False)
        door.look()
        door.proven(int(first.get(zmq.SRCFD)), "key a")
        before = descriptors()
        for _ in range(STRANGERS):
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))

        def few() -> bool:
            while door.look():
                pass
            return door.turned_away >= STRANGERS - UNPROVEN_MAX and descriptors() <= before + STRANGERS + UNPROVEN_MAX

        until(few)
        assert len(door) == UNPROVEN_MAX + 1
        router.send_multipart([identity, b"still here"])
        assert dealer.poll(5_000)
        assert dealer.recv() == b"still here"
        door.unproven(int(first.get(zmq.SRCFD)))  # it has no session any more: the oldest of its address goes
        closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        before = len(door)
        until(lambda: not door.look() and door.turned_away > STRANGERS - UNPROVEN_MAX)
        assert len(door) <= before, "one goes for the one that has come"


def test_connections_that_have_ended_are_not_counted(router: zmq.Socket[bytes]) -> None:
    with ExitStack() as closing:
        door = ZmqDoor(router)
        closing.callback(door.close)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port)):
            until(lambda: door.look() or len(door) == 1)
        until(lambda: not door.look() and len(door) == 0)
        assert door.turned_away == 0


def test_all_doors_together_leave_half_of_the_descriptors_to_others(
    router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_door, "_descriptors_max", lambda: 80)
    assert 4 * zmq_door.door_seats() <= 80 * zmq_door.ZMQ_CONNECTIONS_FRACTION_ALL, "one server's doors cannot meet"
    taken = 36  # by doors of other servers in this process
    zmq_door.SEATS.add(taken)
    with ExitStack() as closing:
        closing.callback(zmq_door.SEATS.add, -taken)
        door = ZmqDoor(router)
        closing.callback(door.close)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(10):
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: not door.look() and len(door) + door.turned_away == 10)
        assert len(door) == 4
    assert not zmq_door.SEATS.full


def connected(port: int) -> socket.socket:
    """A connection whose handshake is over, and which has sent a whole message."""
    sock = socket.create_connection(("127.0.0.1", port))
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    sock.sendall(bytes((4, len(ready))) + ready)
    came = b""
    while not came.endswith(b"\x08Identity" + bytes(4)):
        came += sock.recv(1 << 10)
    sock.sendall(b"\x00\x05hello")
    return sock


def send_without_end(sock: socket.socket, nbytes: int) -> None:
    """So many bytes of a message whose last part does not come."""
    part_bytes = 250
    sock.sendall((b"\x01" + bytes((part_bytes - 2,)) + bytes(part_bytes - 2)) * (nbytes // part_bytes))


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.2)
    try:
        return bool(sock.recv(1))
    except TimeoutError:
        return True
    except ConnectionError:
        return False


@pytest.fixture
def crowd(router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ZmqDoor, list[socket.socket]]]:
    """Four connections of one holder that leave 10 KB unfinished, and one of another that leaves 25."""
    monkeypatch.setattr(zmq_door, "ZMQ_COMMANDS_BYTES_A_S", 1000)
    monkeypatch.setattr(zmq_door, "ZMQ_COMMANDS_BYTES_MAX", 1000)
    with ExitStack() as closing:
        door = ZmqDoor(router)
        closing.callback(door.close)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        came: list[socket.socket] = []
        for nbytes in (10_000, 10_000, 10_000, 10_000, 25_000):
            came.append(closing.enter_context(connected(port)))
            until(lambda: not door.look() and len(door) == len(came))
            assert router.poll(5_000)
            router.recv()
            door.proven(int(router.recv(copy=False).get(zmq.SRCFD)), f"key of {nbytes}")
            send_without_end(came[-1], nbytes)
        yield door, came


def test_many_unfinished_messages_of_one_holder_do_not_end_that_of_another(
    crowd: tuple[ZmqDoor, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_door, "ZMQ_UNFINISHED_BYTES_ALL_MAX", 60_000)
    door, came = crowd
    until(lambda: door.end_unfinished(0.0) or door.turned_away)
    assert [is_open(each) for each in came].count(False) == 1
    assert is_open(came[-1]), "the largest, but its holder has less than the other"


def test_a_message_without_end_is_no_heartbeat_however_slowly_it_comes(
    crowd: tuple[ZmqDoor, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_door, "ZMQ_UNFINISHED_BYTES_ALL_MAX", 58_000)
    door, _ = crowd
    minutes = count(60.0, 60.0)  # in one of which 60,000 bytes of each could be commands, by their rate alone
    until(lambda: door.end_unfinished(next(minutes)) or door.turned_away)
    assert door.turned_away == 1


def test_what_has_come_is_what_was_heard_but_for_the_handshake(
    router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of a few bytes more than the handshake nobody is shut down who ends its messages; one who sends a
    part more is."""
    monkeypatch.setattr(zmq_door, "ZMQ_COMMANDS_BYTES_A_S", 0)
    monkeypatch.setattr(zmq_door, "ZMQ_UNFINISHED_BYTES_MAX", 1024)
    public, secret = zmq.curve_keypair()
    authenticator = ThreadAuthenticator(router.context)
    authenticator.start()
    with ExitStack() as closing:
        closing.callback(authenticator.stop)
        authenticator.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
        router.curve_publickey, router.curve_secretkey, router.curve_server = public, secret, True
        door = ZmqDoor(router)
        closing.callback(door.close)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer = closing.enter_context(router.context.socket(zmq.DEALER))
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = public, secret, public
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")  # what is heard before the connection is counted does not count
        assert router.poll(5_000)
        until(lambda: door.look() or len(door) == 1)
        for nbytes in (0, 1, 33, 221, 222, 223, 255, 256, 1000, 60_000):
            dealer.send_multipart([bytes(nbytes)] * 3)
        for _ in range(11):
            assert router.poll(5_000)
            router.recv()
            more = True
            while more:
                part = router.recv(copy=False)
                door.received(int(part.get(zmq.SRCFD)), part.buffer.nbytes)
                more = bool(router.getsockopt(zmq.RCVMORE))
        door.end_unfinished(1.0)  # until then what waits in the library counts as unfinished
        assert not door.turned_away
        dealer.send_multipart([bytes(1000), b""])
        assert router.poll(5_000)
        door.end_unfinished(2.0)
        assert door.turned_away == 1
