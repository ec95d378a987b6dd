"""The helper's door: peers connect here, are admitted, and read what this node's pool has."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from lmcache_core.errors import CacheError
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.tiers.object.format import HEADER_BYTES, TIER_KEY_BYTES
from lmcache_peer.admission import Admission, by
from lmcache_peer.channel import Channel
from lmcache_peer.digest import PublishedDigest
from lmcache_peer.errors import LyingPeerError
from lmcache_peer.limits import (
    ACCEPT_PAUSE_S,
    CONNECTIONS_MAX,
    CONNECTIONS_OF_NODE_MAX,
    HANDSHAKE_S,
    IDLE_S,
    NOT_ADMITTED_MAX,
    REQUEST_S,
    STALL_S,
    TEXT_CHARS_MAX,
)
from lmcache_peer.locks import Locks, Share
from lmcache_peer.messages import (
    DigestRequest,
    Done,
    Found,
    LookupAndLock,
    PeerMessage,
    PeerRequest,
    Read,
    Reading,
    Refused,
    Trailer,
    Unlock,
)
from lmcache_peer.node import Held, Node, untouched

NEVER = float("inf")  # the rate of a transfer bounds it
log = logging.getLogger("lmcache_peer")
_requests: msgspec.msgpack.Decoder[PeerRequest] = msgspec.msgpack.Decoder(PeerRequest)


class Door:
    """Listens, and has a thread for each connection. `figures` counts what was served."""

    def __init__(self, at: HostPort, name: str, boot: int, node: Node, admission: Admission) -> None:
        """Raises `OSError` if it cannot listen there."""
        self.name, self.boot = name, boot
        self.node, self.admission = node, admission
        self.digest = PublishedDigest()
        self.locks = Locks()
        self.under_way = Share()
        self.figures: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._of_node: Counter[str] = Counter()
        self._not_admitted: dict[int, socket.socket] = {}  # a descriptor of its own for each, in the order they came
        self._ending = threading.Event()
        self._sock = socket.create_server((at.host, at.port), backlog=128, family=_family(at.host))
        self.at = HostPort(at.host, self._sock.getsockname()[1])

    def run(self) -> None:
        """Accept until `close`."""
        while not self._ending.is_set():
            sock = None
            number = next(self._numbers)
            try:
                sock, _ = self._sock.accept()
                self._enter(number, sock)
                threading.Thread(target=self._attend, args=(sock, number), name=f"peer-{number}", daemon=True).start()
            except (OSError, RuntimeError):  # a connection that failed, or the system has no descriptor or thread left
                self._leave(number)
                if sock is not None:
                    sock.close()
                self.figures["not_accepted"] += not self._ending.is_set()
                self._ending.wait(ACCEPT_PAUSE_S)

    def _enter(self, number: int, sock: socket.socket) -> None:
        """This one wants to be admitted. Whoever has waited longest makes room: a node needs milliseconds."""
        own, longest = sock.dup(), None
        with self._lock:
            if len(self._not_admitted) >= NOT_ADMITTED_MAX:
                longest = self._not_admitted.pop(next(iter(self._not_admitted)))
            self._not_admitted[number] = own
        if longest is not None:
            with contextlib.suppress(OSError):  # it has gone by itself
                longest.shutdown(socket.SHUT_RDWR)
            longest.close()

    def _leave(self, number: int) -> None:
        with self._lock:
            own = self._not_admitted.pop(number, None)
        if own is not None:
            own.close()

    def _attend(self, sock: socket.socket, number: int) -> None:
        node = ""
        try:
            try:
                channel, node = self.admission.answer(sock, self.name, self.boot, by(HANDSHAKE_S))
            finally:
                self._leave(number)
            with contextlib.closing(channel), self._place(node) as refusal:
                if not refusal:
                    _Conversation(self, channel, node, number).go_on()
                else:
                    self.figures["refused"] += 1
                    channel.send(Refused(refusal), by(HANDSHAKE_S))
        except (OSError, CacheError) as error:
            self.figures["broken_off" if node else "not_admitted"] += 1
            log.info("the connection of %s ended: %s", node or "an unknown node", str(error)[:TEXT_CHARS_MAX])
        finally:
            self.locks.connection_ended(node, number)

    @contextlib.contextmanager
    def _place(self, node: str) -> Iterator[str]:
        """Count a connection of this node. Yields why it has no place; empty if it has one."""
        with self._lock:
            self._of_node[node] += 1
            if self._of_node[node] > CONNECTIONS_OF_NODE_MAX:
                refusal = "this node has too many connections of yours"
            else:
                refusal = "this node has too many connections" if self._connections > CONNECTIONS_MAX else ""
        try:
            yield refusal
        finally:
            with self._lock:
                self._of_node[node] -= 1
                if not self._of_node[node]:
                    del self._of_node[node]

    @property
    def _connections(self) -> int:
        """Of admitted nodes."""
        return sum(self._of_node.values())

    @property
    def shown(self) -> dict[str, int]:
        """For `status`."""
        kept = {"locked_objects": self.locks.objects, "locked_bytes": self.locks.nbytes}
        digest = {"digest_objects": self.digest.objects, "digest_bytes": self.digest.nbytes}
        with self._lock:
            connections = {"connections": self._connections, "not_admitted_yet": len(self._not_admitted)}
        return {**self.figures, **kept, **digest, **connections, "port": self.at.port}

    def close(self) -> None:
        """Accept nobody any more."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class _Conversation:
    """One admitted connection: a request, its answer, the next request."""

    def __init__(self, door: Door, channel: Channel, node: str, number: int) -> None:
        self._door, self._channel, self._peer, self._number = door, channel, node, number

    def go_on(self) -> None:
        """Until the peer ends it. Raises `OSError` and `CacheError`."""
        while self._channel.wait_readable(IDLE_S):
            request = self._channel.receive(_requests, by(REQUEST_S))
            match request:
                case LookupAndLock():
                    self._look_up(_split(request.names))
                case Unlock():
                    self._door.locks.give_back(self._peer, _split(request.names))
                    self._send(Done())
                case Read():
                    self._read(_split(request.names), unlock=request.unlock)
                case DigestRequest():
                    self._door.node.see_server()
                    reply, content = self._door.digest.since(request.since)
                    self._send(reply)
                    self._channel.send_buffers(content, NEVER, STALL_S)
                    self._door.figures["digests"] += 1

    def _send(self, answer: PeerMessage) -> None:
        self._channel.send(answer, by(STALL_S))

    def _look_up(self, names: Sequence[bytes]) -> None:
        held = self._door.node.hold(names)
        there = bytearray(len(names))
        for each in held:
            there[each.at] = 1
        self._door.locks.keep(self._peer, self._number, held)
        self._door.figures["looked_up"] += len(names)
        self._door.figures["found"] += len(held)
        self._send(Found(bytes(there)))

    def _read(self, names: Sequence[bytes], *, unlock: bool) -> None:
        try:
            with self._door.under_way.of(self._door.node.hold(names)) as held:
                self._send_objects(names, held)
        finally:
            if unlock:
                self._door.locks.give_back(self._peer, names)

    def _send_objects(self, names: Sequence[bytes], held: Sequence[Held]) -> None:
        sizes = [0] * len(names)
        buffers: list[memoryview] = []
        for each in sorted(held, key=lambda each: each.at):
            sizes[each.at] = HEADER_BYTES + each.nbytes
            buffers += self._door.node.parts(each)
        self._send(Reading(sizes))
        self._channel.send_buffers(buffers, NEVER, STALL_S)
        moved = bytearray(len(names))
        for each, same in zip(held, untouched(held), strict=True):
            moved[each.at] = not same
        self._send(Trailer(bytes(moved)))
        self._door.figures["read"] += len(held) - sum(moved)
        self._door.figures["read_bytes"] += sum(sizes)
        self._door.figures["moved"] += sum(moved)


def _split(names: bytes) -> list[bytes]:
    """Tier keys. Raises `LyingPeerError` for what is none."""
    if len(names) % TIER_KEY_BYTES:
        raise LyingPeerError(f"{len(names)} bytes of names, and one has {TIER_KEY_BYTES}")
    return [names[at : at + TIER_KEY_BYTES] for at in range(0, len(names), TIER_KEY_BYTES)]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
