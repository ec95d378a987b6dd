"""What a peer can make the server keep is charged to it in bytes, and bounded."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from lmcache_core.kernel.memory import Memory, MemoryAccount, MemorySort
from lmcache_core.limits import FRAME_BYTES_MAX, UNREAD_PAUSE_BYTES
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import decode_reply, encode_request
from lmcache_core.protocol.unread import FRAME_OVERHEAD_BYTES, Backlog, Unread
from lmcache_core.server.server import Server

from .test_sessions import lifeline, on_loop, say_hello

PING = encode_request(m.Ping(1, bytes(60_000)))
CONNECTIONS = 12


class Deaf(Backlog):
    def __init__(self, unread: Unread, holder: str) -> None:
        self.unread = unread.open(holder)
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def small() -> Memory:
    """Two frames of 1,000 bytes for a connection, three for a holder, four for all."""
    each = 1_000 + FRAME_OVERHEAD_BYTES
    return Memory(dict.fromkeys(["unread", "leases", "requests"], (2 * each, 3 * each, 4 * each)))


def ask_until_full(sock: socket.socket) -> int:
    """How many pings the server takes from a peer that reads no answer."""
    asked = 0
    sock.settimeout(0.3)
    try:
        while asked < 400:
            sock.send(PING)
            asked += 1
    except TimeoutError:
        pass
    return asked


def test_peers_that_read_nothing_wait_for_themselves_and_get_every_answer_later(server: Server) -> None:
    with ExitStack() as closing:
        socks = [closing.enter_context(lifeline(server)) for _ in range(CONNECTIONS)]
        for sock in socks:
            assert isinstance(say_hello(sock), m.Welcome)
        asked = [ask_until_full(sock) for sock in socks]
        assert max(asked) < 400, "the server reads no more requests of a peer that reads no answers"
        account: MemoryAccount = server.parts.kernel.memory.all[MemorySort.UNREAD]
        peers = [session.peer for session in server.parts.sessions]
        held = on_loop(server, lambda: sum(len(frame) for peer in peers for frame, _ in peer.waiting))
        assert held <= account.nbytes <= 1.2 * held
        assert account.nbytes <= CONNECTIONS * (UNREAD_PAUSE_BYTES + FRAME_BYTES_MAX)
        with lifeline(server) as other:  # a peer that reads is served meanwhile
            assert isinstance(say_hello(other), m.Welcome)
        for sock, pings in zip(socks, asked, strict=True):
            sock.settimeout(10)
            for _ in range(pings):
                assert isinstance(decode_reply(memoryview(sock.recv(1 << 17))), m.Pong)
        assert on_loop(server, lambda: account.nbytes) == 0


def test_a_zmq_message_that_never_ends_ends_its_connection_and_hurts_nobody(start: Callable[..., Server]) -> None:
    server = start(zmq={"ipc": True})
    with socket.socket(socket.AF_UNIX) as endless, server.connect() as client:
        endless.settimeout(60)
        endless.connect(server.parts.carriers[0].address.removeprefix("ipc://"))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        endless.sendall(greeting + bytes((4, len(ready))) + ready)
        part = b"\x03" + struct.pack(">Q", 1000) + bytes(1000)  # and more follows
        with pytest.raises(ConnectionError):
            endless.sendall(part * 4096)  # 4 MiB: its socket's buffer and 64 KiB are taken
        assert client.ping(b"x") == b"x"


def test_a_connection_is_dropped_at_its_own_cap() -> None:
    unread = Unread(small())
    deaf = Deaf(unread, "uid 1")
    assert [unread.keep(deaf, 1_000) for _ in range(3)] == [True, True, False]
    assert deaf.dropped
    assert deaf.unread.nbytes == 0


def test_at_the_cap_of_a_holder_its_peer_with_most_unread_is_dropped() -> None:
    unread = Unread(small())
    worst, other, stranger = Deaf(unread, "uid 1"), Deaf(unread, "uid 1"), Deaf(unread, "uid 2")
    assert unread.keep(stranger, 1_000)
    assert unread.keep(worst, 1_000)
    assert unread.keep(worst, 1_000)
    assert unread.keep(other, 1_000)
    assert unread.keep(other, 500)
    assert [each.dropped for each in (worst, other, stranger)] == [True, False, False]


def test_the_accounts_of_a_holder_end_with_its_last_connection() -> None:
    memory = Memory()
    account = memory.open(MemorySort.UNREAD, "uid 1")
    account.charge(5)
    assert memory.describe("uid 1")["unread_memory_bytes"] == 5
    account.charge(-5)
    del account
    assert memory.describe("uid 1")["unread_memory_bytes"] == 0
    assert memory.all[MemorySort.UNREAD].nbytes == 0
