"""One other node, as this one asks it: its digest, its connections, what it was asked and how it answered."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash

from lmcache_core.errors import DamagedObjectError, printable
from lmcache_core.tiers.contract import LoadItem
from lmcache_core.tiers.object.format import HEADER_BYTES
from lmcache_core.tiers.object.inspect import check_object
from lmcache_peer.admission import Admission
from lmcache_peer.breaker import PeerBreaker
from lmcache_peer.channel import Channel, slowest
from lmcache_peer.digest import Digest
from lmcache_peer.directory import NodeEntry
from lmcache_peer.errors import LyingPeerError, PeerError
from lmcache_peer.limits import CHANNELS_MAX, ERROR_SHOWN_CHARS, PIECE_BYTES
from lmcache_peer.messages import (
    DigestReply,
    DigestRequest,
    Done,
    Found,
    LookupAndLock,
    PeerMessage,
    Read,
    Reading,
    Refused,
    Trailer,
)

T = TypeVar("T")
M = TypeVar("M", bound=PeerMessage)
_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    each: msgspec.msgpack.Decoder(each | Refused) for each in (Found, Done, Reading, Trailer, DigestReply)
}


class Peer:
    """Thread-safe. What it raises has been noted: `OSError` if it does not answer in time, `PeerError` if it refuses,
    `LyingPeerError` if it sends what is not true."""

    def __init__(self, entry: NodeEntry, own_name: str, admission: Admission, patience_s: float) -> None:
        self.entry = entry
        self.node = entry.node
        self.boot = entry.boot
        self.is_self = False
        self.breaker = PeerBreaker()
        self.digest = Digest()
        self.pull_at = 0.0  # monotonic; infinite while a pull is under way
        self.figures: Counter[str] = Counter()
        self._own_name = own_name
        self._admission = admission
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._gone = False

    # --- what it is asked -----------------------------------------------------------------------------------
    def lookup_and_lock(self, names: Sequence[bytes], deadline: float) -> list[bool]:
        """Which of these tier keys it has; those stay for some seconds."""

        def ask(channel: Channel, until: float) -> list[bool]:
            channel.send(LookupAndLock(b"".join(names)), until)
            there = _answer(channel, Found, until).there
            if len(there) != len(names):
                raise LyingPeerError(f"it answers for {len(there)} names, and was asked for {len(names)}")
            return [bool(each) for each in there]

        found = self._ask(ask, deadline)
        self.figures["lookups"] += 1
        self.figures["false_hits"] += found.count(False)
        return found

    def load(self, items: Sequence[LoadItem], deadline: float) -> list[int]:
        """Fill the buffers; for each item the bytes of the object, 0 if it is not there or did not stay the same. Every
        object was checked against its name and its checksum."""
        arrived = self._ask(lambda channel, until: self._receive(channel, items, deadline), deadline)
        loaded = []
        for item, (size, checksum) in zip(items, arrived, strict=True):
            try:
                if size:
                    check_object(item.key, *_page_and_payload(item.buffers), size, checksum)
                    self.breaker.read_well()
                loaded.append(size)
            except DamagedObjectError as error:
                self._lied(f"it sent a wrong object: {error}")
                loaded.append(0)
        self.figures["loaded"] += sum(map(bool, loaded))
        self.figures["loaded_bytes"] += sum(loaded)
        self.figures["missed"] += loaded.count(0)
        return loaded

    def _receive(self, channel: Channel, items: Sequence[LoadItem], deadline: float) -> list[tuple[int, int]]:
        """For each item its bytes, and the checksum of its payload."""
        patience_s = self._patience_s
        channel.send(Read(b"".join(item.key for item in items), unlock=True), time.monotonic() + patience_s)
        sizes = _answer(channel, Reading, min(deadline, time.monotonic() + patience_s)).sizes
        if len(sizes) != len(items):
            raise LyingPeerError(f"it sends {len(sizes)} objects, and was asked for {len(items)}")
        for item, size in zip(items, sizes, strict=True):
            if size > sum(part.nbytes for part in item.buffers):
                raise LyingPeerError(f"it sends {size:,} bytes for an object of {item.buffers[-1].nbytes:,}")
        checksums = _fill(channel, items, sizes, min(deadline, slowest(sum(sizes), patience_s)), patience_s)
        moved = _answer(channel, Trailer, min(deadline, time.monotonic() + patience_s)).moved
        if len(moved) != len(items):
            raise LyingPeerError(f"its trailer is for {len(moved)} objects, and it sent {len(items)}")
        self.figures["moved"] += sum(map(bool, moved))
        return [(0 if gone else size, each) for size, gone, each in zip(sizes, moved, checksums, strict=True)]

    def pull(self, deadline: float) -> None:
        """Bring its digest up to date. Also the probe that closes its breaker."""

        def ask(channel: Channel, until: float) -> None:
            digest = self.digest  # of this boot: another thread may meet the next one meanwhile
            channel.send(DigestRequest(digest.version), until)
            reply = _answer(channel, DigestReply, until)
            content = digest.room_for(reply)
            channel.fill([memoryview(content)], deadline, self._patience_s)
            digest.apply(reply, content)
            self.figures["digest_bytes_received"] += len(content)

        self._ask(ask, deadline)
        self.breaker.answered()

    # --- how ------------------------------------------------------------------------------------------------
    def _ask(self, call: Callable[[Channel, float], T], deadline: float) -> T:
        """The answer. A connection that was idle may have ended long ago: then once more, over a new one."""
        try:
            while True:
                channel, fresh = self._take(deadline)
                try:
                    answer = call(channel, min(deadline, time.monotonic() + self._patience_s))
                except ConnectionError:
                    channel.close()
                    if fresh:
                        raise
                    self._drop_idle()
                except BaseException:
                    channel.close()
                    raise
                else:
                    self._give_back(channel)
                    return answer
        except LyingPeerError as error:
            self._lied(str(error))
            raise
        except (OSError, PeerError) as error:
            self._drop_idle()  # they may lead nowhere, too: a probe makes its own
            late = isinstance(error, TimeoutError)
            self.figures["late" if late else "failed"] += 1
            self.breaker.failed(f"it did not answer in time: {error}" if late else str(error))
            raise

    def _take(self, deadline: float) -> tuple[Channel, bool]:
        with self._lock:
            if self._gone:
                raise PeerError("it is not in the directory any more")
            if self._idle:
                return self._idle.pop(), False
        if not self.entry.at.port > 0:
            raise PeerError(f"{self.entry.endpoint!r} is no address")
        until = min(deadline, time.monotonic() + self._patience_s)
        channel, greeting = self._admission.call(self._own_name, self.entry.at, until)
        try:
            self._recognise(greeting.node, greeting.boot)
        except BaseException:
            channel.close()
            raise
        return channel, True

    def _recognise(self, node: str, boot: int) -> None:
        """Whoever answers at the address is the node that the directory names, and has not been restarted since. With
        fixed nodes, whoever is there is it."""
        if self.entry.boot:
            if (node, boot) != (self.entry.node, self.entry.boot):
                raise PeerError(f"at {self.entry.endpoint} is another node, or it was restarted: {node}")
        elif boot != self.boot:
            self.node, self.boot, self.is_self = node, boot, node == self._own_name
            self.digest = Digest()
            self._drop_idle()

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if not self._gone and len(self._idle) < CHANNELS_MAX:
                self._idle.append(channel)
                return
        channel.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _lied(self, error: str) -> None:
        self.figures["lies"] += 1
        self.breaker.lied(error)

    @property
    def usable(self) -> bool:
        """Whether it is asked for objects."""
        return self.breaker.closed and not self._gone and not self.is_self

    def status(self) -> dict[str, Any]:
        """Its row."""
        return {
            "endpoint": self.entry.endpoint,
            "usable": int(self.usable),
            "opened": self.breaker.opened,
            "last_error": printable(self.breaker.last_error[:ERROR_SHOWN_CHARS]),
            "objects": self.digest.objects,
            "digest_bytes": self.digest.nbytes,
            **{what: self.figures[what] for what in SHOWN},
        }

    def close(self) -> None:
        """It is asked nothing any more."""
        self._gone = True
        self._drop_idle()


SHOWN = ("lookups", "false_hits", "loaded", "loaded_bytes", "missed", "moved", "late", "failed", "lies",
         "digest_bytes_received")  # fmt: skip


def _answer(channel: Channel, kind: type[M], deadline: float) -> M:
    answer = channel.receive(_DECODERS[kind], deadline)
    if isinstance(answer, Refused):
        raise PeerError(f"it refuses: {printable(answer.why)}")
    assert isinstance(answer, kind)
    return answer


def _fill(
    channel: Channel, items: Sequence[LoadItem], sizes: Sequence[int], deadline: float, patience_s: float
) -> list[int]:
    """Receive the objects, one after another; returns the checksums of their payloads. What has come is summed while it
    is in the processor's cache, and while the peer sends what follows."""
    sums = [xxhash.xxh3_64() for _ in items]
    waiting: list[tuple[int, memoryview]] = []
    nbytes = 0

    def receive() -> None:
        channel.fill([part for _, part in waiting], deadline, patience_s)
        for at, part in waiting:
            if at >= 0:
                sums[at].update(part)
        waiting.clear()

    for at, (item, size) in enumerate(zip(items, sizes, strict=True)):
        for in_payload, part in _pieces(item.buffers, size):
            waiting.append((at if in_payload else -1, part))
            nbytes += part.nbytes
            if nbytes >= PIECE_BYTES:
                receive()
                nbytes = 0
    receive()
    return [int(each.intdigest()) for each in sums]


def _pieces(buffers: Sequence[memoryview], size: int) -> Iterator[tuple[bool, memoryview]]:
    """The first `size` bytes of these, in pieces that are small enough; and whether each is of the payload."""
    header = HEADER_BYTES
    for buffer in buffers:
        part = buffer[:size]
        size -= part.nbytes
        if header:
            yield False, part[:header]
            part, header = part[header:], header - min(header, part.nbytes)
        for first in range(0, part.nbytes, PIECE_BYTES):
            yield True, part[first : first + PIECE_BYTES]


def _page_and_payload(buffers: Sequence[memoryview]) -> tuple[memoryview, memoryview]:
    """As the server brings them; a tool may bring an object's memory in other pieces."""
    if len(buffers) == 2 and buffers[0].nbytes == HEADER_BYTES:
        return buffers[0], buffers[1]
    whole = memoryview(b"".join(buffers))
    return whole[:HEADER_BYTES], whole[HEADER_BYTES:]
