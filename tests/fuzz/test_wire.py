"""Garbage on the wire: it is counted and dropped, and the next request is served."""

from __future__ import annotations

import array
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from lmcache_core.limits import BATCH_KEYS_MAX, FRAME_BYTES_MAX, SEND_QUEUE_FRAMES_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, encode

from ..conftest import Node

FRAMES = 10_000


def hello(sock: socket.socket, capabilities: list[str] | None = None) -> m.Welcome:
    sock.send(
        encode(
            m.Hello(
                1,
                m.PROTOCOL_VERSION_MIN,
                m.PROTOCOL_VERSION_MAX,
                os.urandom(16),
                "fuzz",
                os.getpid(),
                capabilities or [],
            )
        )
    )
    while not isinstance(reply := decode_reply(sock.recv(FRAME_BYTES_MAX)), m.Welcome):
        assert reply.rid != 1, reply  # an answer to something else may come first
    return reply


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def drain(sock: socket.socket) -> None:
    """Read every answer that is there: who does not read is dropped, which is another test."""
    try:
        while sock.recv(FRAME_BYTES_MAX, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return


def flood(sock: socket.socket, requests: int) -> None:
    for rid in range(requests):
        sock.send(encode(m.Ping(rid, bytes(16_000))))


def garbage(seed: int) -> Iterator[bytes]:
    """Every kind in turn: noise, cut and bent requests, wrong types, unknown operations, foreign and stale ids."""
    rng = random.Random(seed)
    key = bytes(32)
    valid = [
        m.PrepareStore(7, 1, key * 4),
        m.CommitStore(7, 2**63, 0, 4),
        m.CommitStore(7, 12345, 0, 4, b"", bytes(32)),
        m.ReportDamaged(7, 12345, 0, 1),
        m.LookupRequest(7, 1, key, m.LookupOptions(hold=True)),
        m.FinishRead(7, 12345, 0, 1),
        m.PrepareRetrieve(7, 1, key, 99, 98),
        m.PrepareRetrieve(7, 1, key, 0, 0, True, True),
        m.RegisterLayout(7, 1, "float16", [2, 2], "KT", 0),
        m.Clear(7, 1),
        m.RenewLease(7, 5),
        m.LeaseStatusOf(7, 5),
        m.QueryLookupHits(7, 3),
        m.Pin(7, 1, key, 1.0),
        m.FreeLookupLocks(7, [1, 2, 3]),
        m.Attach(7, 0, 0, [1]),
        m.Hello(7, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, b"", "", 0),
    ]
    while True:
        request = encode(rng.choice(valid))
        kind = rng.randrange(8)
        if kind == 0:
            yield rng.randbytes(rng.randrange(0, 200))
        elif kind == 1:
            yield request[: rng.randrange(len(request))]
        elif kind == 2:
            bent = bytearray(request)
            bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
            yield bytes(bent)
        elif kind == 3:
            yield msgspec.msgpack.encode([rng.choice(["noop", "lookup", "nonsense", ""]), "seven", {}, None, -1])
        elif kind == 4:
            yield msgspec.msgpack.encode(["noop", rng.randrange(-5, 2**63)])
        elif kind == 5:
            yield request
        elif kind == 6:
            yield b"\x91" * rng.randrange(1, 3000)  # nested arrays without end
        else:
            yield encode(m.PrepareStore(7, 1, rng.randbytes(rng.randrange(0, 2000))))


def test_ten_thousand_pieces_of_garbage_and_then_a_normal_request(node: Node) -> None:
    server = node.serve()
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    before = descriptors(server.pid)
    pieces = garbage(seed=1)
    sock = node.socket()
    welcomed = False
    for sent in range(FRAMES):
        if sent == FRAMES // 2:
            hello(sock)
            welcomed = True
        sock.send(next(pieces))
        drain(sock)
    assert welcomed
    into = [bytearray(65536)]
    assert client.retrieve([node.key("a")], into, namespace=node.namespace).hits == 1
    assert bytes(into[0]) == node.payload(1)
    status = client.status()
    assert status["counters"]["garbage"] > FRAMES // 10
    assert status["counters"].get("internal_errors", 0) == 0
    sock.close()
    deadline = time.monotonic() + 30
    while descriptors(server.pid) > before:
        assert time.monotonic() < deadline, "descriptors leaked"
        time.sleep(0.01)


def test_an_empty_packet_is_garbage_and_no_end_of_file(node: Node) -> None:
    node.serve()
    sock = node.socket()
    hello(sock)
    sock.send(b"")
    assert isinstance(decode_reply(sock.recv(FRAME_BYTES_MAX)), m.Error)
    sock.send(encode(m.Noop(5)))
    assert decode_reply(sock.recv(FRAME_BYTES_MAX)) == m.Done(5)


def test_an_oversize_packet_is_refused_and_the_next_one_served(node: Node) -> None:
    node.serve()
    sock = node.socket()
    hello(sock)
    sock.send(encode(m.Ping(4, bytes(2 * FRAME_BYTES_MAX))))
    assert isinstance(decode_reply(sock.recv(FRAME_BYTES_MAX)), m.Error)
    sock.send(encode(m.Noop(5)))
    assert decode_reply(sock.recv(FRAME_BYTES_MAX)) == m.Done(5)


def test_too_many_keys_in_one_frame_are_refused_with_the_cure(node: Node) -> None:
    node.serve()
    sock = node.socket()
    hello(sock)
    layout = node.namespace.layout
    sock.send(encode(m.RegisterLayout(1, 1, layout.dtype, list(layout.shape), "", layout.fingerprint)))
    assert isinstance(decode_reply(sock.recv(FRAME_BYTES_MAX)), m.LayoutRegistered)
    sock.send(encode(m.LookupRequest(4, 1, bytes(32 * (BATCH_KEYS_MAX + 1)))))
    reply = decode_reply(sock.recv(FRAME_BYTES_MAX))
    assert isinstance(reply, m.Error)
    assert reply.rid == 4
    assert "pages" in reply.message


def test_stray_descriptors_are_not_collected(node: Node) -> None:
    server = node.serve()
    sock = node.socket()
    hello(sock)
    before = descriptors(server.pid)
    with open(os.devnull) as devnull:
        for rid in range(100):
            fds = array.array("i", [devnull.fileno()] * 5)
            sock.sendmsg([encode(m.Noop(rid))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            assert decode_reply(sock.recv(FRAME_BYTES_MAX)) == m.Done(rid)
    assert descriptors(server.pid) <= before  # the connection that waited for the start may have gone meanwhile


def test_a_peer_that_never_reads_waits_for_itself_and_nobody_else_does(node: Node) -> None:
    server = node.serve()
    client = node.client()
    client.ping()
    before = descriptors(server.pid)
    sock = node.socket()
    hello(sock)
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):  # its requests are not read until it reads
        flood(sock, 50 * SEND_QUEUE_FRAMES_MAX)
    assert client.ping(b"x") == b"x"
    sock.close()
    deadline = time.monotonic() + 30
    while descriptors(server.pid) > before:
        assert time.monotonic() < deadline
        client.ping()


def test_a_session_cannot_settle_the_lease_of_another(node: Node) -> None:
    node.serve()
    client = node.client()
    with client.prepare_store([node.key("a")], namespace=node.namespace) as lease:
        sock = node.socket()
        hello(sock)
        for make in (m.CommitStore, m.AbortStore, m.FinishRead):
            sock.send(encode(make(9, lease.id, 0, 1)))
            reply = decode_reply(sock.recv(FRAME_BYTES_MAX))
            assert isinstance(reply, m.Error)
            assert reply.code == "LEASE_EXPIRED"
        lease.view(0)[:] = node.payload(1)
        lease.commit()
    assert client.lookup([node.key("a")], namespace=node.namespace).hits == 1


def test_nothing_is_answered_before_hello_but_an_error(node: Node) -> None:
    node.serve()
    sock = node.socket()
    for request in (m.Noop(1), m.StatusRequest(2), m.Clear(3, None)):
        sock.send(encode(request))
        reply = decode_reply(sock.recv(FRAME_BYTES_MAX))
        assert isinstance(reply, m.Error)
        assert reply.rid == request.rid
        assert "hello" in reply.message


def test_another_protocol_version_is_refused_naming_both(node: Node) -> None:
    node.serve()
    sock = node.socket()
    sock.send(encode(m.Hello(1, 900, 901, os.urandom(16), "future", 1)))
    reply = decode_reply(sock.recv(FRAME_BYTES_MAX))
    assert isinstance(reply, m.Error)
    assert reply.code == "VERSION"
    assert "900" in reply.message


def test_a_row_that_is_not_locked_shows_nothing(node: Node) -> None:
    node.serve()
    sock = node.socket()
    sock.send(
        encode(m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "liar", 1, ["maps_pool"]))
    )
    data, ancillary, _, _ = sock.recvmsg(FRAME_BYTES_MAX, socket.CMSG_SPACE(4))
    for _, _, fd in ancillary:
        os.close(struct.unpack("i", fd)[0])
    welcome = decode_reply(data)
    assert isinstance(welcome, m.Welcome)
    sock.send(encode(m.Attach(2, welcome.row, 1234)))
    reply = decode_reply(sock.recv(FRAME_BYTES_MAX))
    assert isinstance(reply, m.Error)
    assert reply.code == "NOT_ATTACHED"


def test_zmq_messages_of_any_number_of_frames_are_survived(node: Node) -> None:
    node.serve("--zmq.ipc", "true")
    client = node.client()
    address = client.status()["server"]["also_at"][0]
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(address)
    rng = random.Random(2)
    pieces = garbage(seed=2)
    for _ in range(2000):
        frames = [next(pieces) for _ in range(rng.choice([1, 1, 2, 3, 7]))]
        dealer.send_multipart(frames)
        while dealer.poll(0):
            dealer.recv_multipart()
    dealer.send(b"")
    dealer.send(
        encode(m.Hello(4_000_000_000, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "zmq", 0))
    )
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        if dealer.poll(1000):
            reply = decode_reply(dealer.recv())
            if reply.rid == 4_000_000_000:
                assert isinstance(reply, m.Welcome)
                break
    dealer.close()
    context.term()
    assert client.ping(b"x") == b"x"
