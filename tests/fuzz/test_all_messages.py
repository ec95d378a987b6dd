"""Every message with every kind of wrong value, over both carriers: the server serves or refuses it, and forgets it."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from lmcache_core.errors import ProtocolError
from lmcache_core.limits import FRAME_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.segment import Segment
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, encode, pool_info_from_wire
from lmcache_testing.waiting import until

from ..conftest import Node
from .frames import REPLIES, REQUESTS, Frames

BURST = 32  # frames that are sent before their answers are read
LAYOUT = Layout("uint8", (4096,))
NAMESPACES = [7, 8, 2**64 - 1]
NONE = {"promise": 0, "read": 0, "write": 0}


class Lifeline:
    """A peer that maps the pool and says anything."""

    def __init__(self, node: Node, stack: ExitStack) -> None:
        self._node = node
        self._stack = stack
        self.sessions = 0
        self._connect()

    def _connect(self) -> None:
        self.sessions += 1
        stack = self._stack.enter_context(ExitStack())
        self._peer = stack
        self._sock = stack.enter_context(self._node.socket())
        self._sock.settimeout(60)
        self._sock.send(hello(["maps_pool"]))
        frame, fds, _, _ = socket.recv_fds(self._sock, FRAME_BYTES_MAX, 1)
        welcome = decode_reply(frame)
        assert isinstance(welcome, m.Welcome)
        segment = stack.enter_context(Segment.attach_fd(fds[0], pool_info_from_wire(welcome.pool)))
        lock = LifeLock.acquire(segment, welcome.row)
        stack.callback(lock.close)
        self.burst([encode(m.Attach(2, welcome.row, segment.row_nonce(welcome.row)))])
        self.burst([registering(namespace) for namespace in NAMESPACES])

    def burst(self, frames: list[bytes]) -> list[m.Reply]:
        """The answers to these. Connects again if one of them said goodbye."""
        replies: list[m.Reply] = []
        try:
            for frame in frames:
                self._sock.send(frame)
            self._sock.send(encode(m.Noop(2**63)))
            while not (replies and replies[-1] == m.Done(2**63)):
                frame = self._sock.recv(FRAME_BYTES_MAX + 1)
                if not frame:
                    raise ConnectionResetError
                replies.append(decode_reply(frame))
        except (BrokenPipeError, ConnectionResetError):
            self._peer.close()
            self._connect()
        return replies

    def goodbye(self) -> None:
        self._sock.send(encode(m.EndSession(5, goodbye=True)))
        while self._sock.recv(FRAME_BYTES_MAX):
            pass
        self._peer.close()


class Zmq:
    """The same over ZMQ, without the pool."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        context = stack.enter_context(zmq.Context())
        self._socket = stack.enter_context(context.socket(zmq.DEALER))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def burst(self, frames: list[bytes]) -> list[m.Reply]:
        start = [hello([]), *(registering(namespace) for namespace in NAMESPACES)]  # it may have said goodbye
        last = 2**63 | int.from_bytes(os.urandom(7), "big")  # the id of none of the frames
        for frame in [*start, *frames, encode(m.Noop(last))]:
            if len(frame) <= FRAME_BYTES_MAX:  # for a longer one, the library ends the connection
                self._socket.send(frame)
        replies: list[m.Reply] = []
        while not (replies and getattr(replies[-1], "rid", 0) == last):
            assert self._socket.poll(60_000), "the server does not answer"
            replies.append(decode_reply(self._socket.recv()))
        return replies

    def goodbye(self) -> None:
        self._socket.send(encode(m.EndSession(5, goodbye=True)))
        while self._socket.poll(1000):
            self._socket.recv()


def hello(capabilities: list[str]) -> bytes:
    versions = m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX
    return encode(m.Hello(2**63 + 1, *versions, os.urandom(16), "fuzz", os.getpid(), capabilities))


def registering(namespace: int) -> bytes:
    return encode(m.RegisterLayout(3, namespace, LAYOUT.dtype, list(LAYOUT.shape), "", LAYOUT.fingerprint))


@pytest.mark.parametrize("carrier", ["lifeline", "zmq"])
def test_every_message_with_any_values_is_answered_and_leaves_nothing(
    node: Node, carrier: str, request: pytest.FixtureRequest
) -> None:
    server = node.serve("--zmq.ipc", "true")
    assert server.popen.stderr is not None
    logged: list[str] = []
    reader = threading.Thread(target=lambda: logged.extend(server.popen.stderr or ()), daemon=True)
    reader.start()
    frames = request.config.getoption("--frames")
    frames = frames if carrier == "lifeline" else frames // 10
    with server.client() as bystander, ExitStack() as stack:
        bystander.store([node.key("kept")], [node.payload(1)], namespace=node.namespace)
        peer = (
            Lifeline(node, stack) if carrier == "lifeline" else Zmq(bystander.status()["server"]["also_at"][0], stack)
        )
        source = Frames(1, REQUESTS, NAMESPACES)
        stream = iter(source)
        answers: dict[str, int] = {}
        for _ in range(0, frames, BURST):
            for reply in peer.burst([next(stream) for _ in range(BURST)]):
                name = reply.code if isinstance(reply, m.Error) else type(reply).__name__
                answers[name] = answers.get(name, 0) + 1
                source.ids += [each for field in ("lease", "promise", "job") if (each := getattr(reply, field, 0))]
            del source.ids[:-200]
        assert "INTERNAL" not in answers, "".join(logged)[-4000:]
        served = {"Granted", "SettledReply"} if carrier == "lifeline" else {"LookupReply", "NOT_ATTACHED"}
        assert served | {"USAGE", "PROTOCOL"} <= answers.keys(), answers
        assert len(source.sent) == len(REQUESTS)
        peer.goodbye()
        until(lambda: bystander.status()["l1"]["leases_by_kind"] == NONE, "nothing is held any more")
        into = bytearray(65536)
        bystander.clear()
        bystander.store([node.key("new")], [node.payload(2)], namespace=node.namespace)
        assert bystander.retrieve([node.key("new")], [into], namespace=node.namespace).hits == 1
        assert bytes(into) == node.payload(2)
        status = bystander.status()
        assert not status["counters"].get("internal_errors")
        assert not status["counters"].get("apply_faults")
        assert not status["counters"].get("undo_faults")
        assert not status["l1"]["objects_by_state"].get("writing", 0), status["l1"]["objects_by_state"]
    server.signal(15)
    reader.join(60)
    assert "Traceback" not in "".join(logged), "".join(logged)[:3000]
    print(f"{carrier}: {frames:,} frames, answers {answers}")


def test_a_clients_decoder_refuses_every_reply_out_of_range_and_raises_nothing_else() -> None:
    stream, refused = iter(Frames(2, REPLIES, NAMESPACES)), 0
    for _ in range(20_000):
        frame = next(stream)
        try:
            reply = decode_reply(frame)
        except ProtocolError:
            refused += 1
            continue
        assert msgspec.msgpack.decode(encode(reply))[0] == msgspec.msgpack.decode(frame)[0]
    assert refused > 2_000
