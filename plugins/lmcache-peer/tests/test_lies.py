"""A peer that sends what is not true costs a miss, is counted, and is not asked after the third time."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from lmcache_core import Layout
from lmcache_core.limits import PLUGIN_STATUS_BYTES_MAX
from lmcache_core.protocol.codec import encode
from lmcache_core.serde.chain import CodecChain
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem
from lmcache_core.tiers.object.format import HEADER_BYTES, build_header, object_kind, split_tier_key, tier_key
from lmcache_peer.adapter import PeerAdapter
from lmcache_peer.admission import Admission
from lmcache_peer.channel import Channel
from lmcache_peer.client import Peer
from lmcache_peer.digest import BLOCK_BYTES, place_of
from lmcache_peer.directory import NodeEntry
from lmcache_peer.messages import (
    VERSION,
    Challenge,
    DigestReply,
    DigestRequest,
    Done,
    Found,
    Hello,
    LookupAndLock,
    PeerRequest,
    Read,
    Reading,
    Trailer,
    Welcome,
)
from lmcache_peer.settings import PeerTierSettings
from lmcache_testing.waiting import until

LAYOUT = Layout("uint8", (5000,))
NAME = tier_key(bytes(range(32)), 7, 0)
OTHER = tier_key(bytes(32), 7, 0)
FAR_S = 30.0


def whole(name: bytes, payload: bytes, **changes: Any) -> bytes:
    """An object as a tier has it."""
    key, namespace, epoch = split_tier_key(name)
    page = bytearray(HEADER_BYTES)
    fields = {
        "key": key,
        "namespace": namespace,
        "epoch": epoch,
        "encoded_bytes": len(payload),
        "checksum": xxhash.xxh3_64_intdigest(payload),
    } | changes
    build_header(memoryview(page), object_kind(LAYOUT, CodecChain(())), **fields)
    return bytes(page) + payload


PAYLOAD = bytes(range(250)) * 20
TRUE = whole(NAME, PAYLOAD)


def deadline() -> float:
    return time.monotonic() + FAR_S


class Liar:
    """A peer that has everything, and answers a read as it is told. Speaks the protocol by the package's own frames."""

    def __init__(self) -> None:
        self.reading: Callable[[Channel, Read], None] = lambda channel, read: self.send(channel, [TRUE])
        self.finding: Callable[[Channel, LookupAndLock], None] = lambda channel, asked: channel.send(
            Found(b"\x01" * (len(asked.names) // len(NAME))), deadline()
        )
        self.digest: Callable[[Channel], None] = self.all_there
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._socks: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @staticmethod
    def all_there(channel: Channel) -> None:
        channel.send(DigestReply(1, 1, True, 1, 1), deadline())
        channel.send_buffers([memoryview(b"\xff" * BLOCK_BYTES)], deadline())

    @staticmethod
    def send(channel: Channel, objects: Sequence[bytes], moved: bytes | None = None) -> None:
        channel.send(Reading([len(each) for each in objects]), deadline())
        channel.send_buffers([memoryview(each) for each in objects], deadline())
        channel.send(Trailer(bytes(len(objects)) if moved is None else moved), deadline())

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(sock)
            threading.Thread(target=self._attend, args=(sock,), daemon=True).start()

    def _attend(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the reader has had enough
            channel = Channel(sock)
            channel.send(Challenge(VERSION, "liar", 1, bytes(32)), deadline())
            channel.receive(msgspec.msgpack.Decoder(Hello), deadline())
            channel.send(Welcome(b""), deadline())
            while True:
                match channel.receive(msgspec.msgpack.Decoder(PeerRequest), deadline()):
                    case LookupAndLock() as asked:
                        self.finding(channel, asked)
                    case Read() as read:
                        self.reading(channel, read)
                    case DigestRequest():
                        self.digest(channel)
                    case _:
                        channel.send(Done(), deadline())

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join()


@pytest.fixture
def liar() -> Iterator[Liar]:
    liar = Liar()
    yield liar
    liar.close()


@pytest.fixture
def adapter(liar: Liar) -> Iterator[PeerAdapter]:
    settings = PeerTierSettings(nodes=(liar.endpoint,), patience_s=0.3)
    with PeerAdapter(settings, AdapterContext("peers")) as adapter:
        yield adapter


def load(adapter: PeerAdapter, name: bytes = NAME) -> tuple[Result, bytes]:
    page, payload = bytearray(HEADER_BYTES), bytearray(LAYOUT.nbytes)
    (outcome,) = adapter.load([LoadItem(name, [memoryview(page), memoryview(payload)])], deadline())
    return outcome.result, bytes(page + payload)


def row(adapter: PeerAdapter) -> dict[str, Any]:
    figures: dict[str, Any] = next(iter(adapter.status()["parts"].values()))
    return figures


def test_a_true_object_is_loaded_whole(adapter: PeerAdapter) -> None:
    assert list(adapter.exists([NAME, b"short"], deadline())) == [True, False]
    assert load(adapter) == (Result.DONE, TRUE)
    assert row(adapter)["lies"] == 0


FLIPPED = TRUE[:-1] + bytes([TRUE[-1] ^ 1])
LIES: dict[str, Callable[[Channel, Read], object]] = {
    "wrong bytes": lambda channel, read: Liar.send(channel, [FLIPPED]),
    "another key": lambda channel, read: Liar.send(channel, [whole(OTHER, PAYLOAD)]),
    "another epoch": lambda channel, read: Liar.send(channel, [whole(NAME, PAYLOAD, epoch=1)]),
    "another namespace": lambda channel, read: Liar.send(channel, [whole(NAME, PAYLOAD, namespace=8)]),
    "too short": lambda channel, read: Liar.send(channel, [TRUE[:-1]]),
    "half a header": lambda channel, read: Liar.send(channel, [TRUE[:100]]),
    "garbage": lambda channel, read: Liar.send(channel, [bytes(len(TRUE))]),
    "too long": lambda channel, read: Liar.send(channel, [TRUE + b"x"]),
    "four gigabytes": lambda channel, read: channel.send(Reading([(1 << 32) - 1]), deadline()),
    "two objects for one": lambda channel, read: Liar.send(channel, [TRUE, TRUE]),
    "none for one": lambda channel, read: Liar.send(channel, []),
    "a trailer for two": lambda channel, read: Liar.send(channel, [TRUE], b"\x00\x00"),
    "a frame out of order": lambda channel, read: channel.send(Done(), deadline()),
    "a frame without an end": lambda channel, read: channel.send_buffers(
        [memoryview(struct.pack("<I", (1 << 32) - 1))], deadline()
    ),
    "no frame": lambda channel, read: channel.send_buffers(
        [memoryview(b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1")], deadline()
    ),
    "a negative size": lambda channel, read: channel.send_buffers(
        [memoryview(struct.pack("<I", len(body := b"\x92\xa7Reading\x91\xff")) + body)], deadline()
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_a_miss_and_the_third_opens_the_breaker(lie: str, liar: Liar, adapter: PeerAdapter) -> None:
    liar.reading = LIES[lie]  # type: ignore[assignment]
    adapter.exists([NAME], deadline())
    for number in range(1, 4):
        assert load(adapter)[0] is Result.MISS
        assert row(adapter)["lies"] == number
    assert row(adapter)["usable"] == 0
    liar.reading = lambda channel, read: liar.send(channel, [TRUE])
    assert list(adapter.exists([NAME], deadline())) == [False], "it is not asked"


def test_an_object_that_moved_is_a_miss_and_no_lie(liar: Liar, adapter: PeerAdapter) -> None:
    liar.reading = lambda channel, read: liar.send(channel, [TRUE], b"\x01")
    assert load(adapter)[0] is Result.MISS
    assert (row(adapter)["lies"], row(adapter)["moved"]) == (0, 1)


def test_an_endless_answer_ends_with_the_patience_of_its_reader(liar: Liar, adapter: PeerAdapter) -> None:
    def trickle(channel: Channel, read: Read) -> None:
        channel.send(Reading([len(TRUE)]), deadline())
        while True:
            channel.send_buffers([memoryview(b"x")], deadline())
            time.sleep(0.05)

    liar.reading = trickle
    assert load(adapter)[0] is Result.MISS
    assert row(adapter)["late"] == 1


def test_a_good_object_between_lies_makes_them_accidents(liar: Liar, adapter: PeerAdapter) -> None:
    for _ in range(2):
        for _ in range(2):
            liar.reading = lambda channel, read: liar.send(channel, [FLIPPED])
            assert load(adapter)[0] is Result.MISS
        liar.reading = lambda channel, read: liar.send(channel, [TRUE])
        assert load(adapter)[0] is Result.DONE
    assert (row(adapter)["lies"], row(adapter)["usable"]) == (4, 1)


DIGEST_LIES: dict[str, Callable[[Channel], object]] = {
    "no power of two": lambda channel: channel.send(DigestReply(1, 3, True, 3, 1), deadline()),
    "a gigabyte": lambda channel: channel.send(DigestReply(1, 1 << 24, True, 1 << 24, 1), deadline()),
    "a difference to nothing": lambda channel: channel.send(DigestReply(1, 1024, False, 1, 1), deadline()),
    "more changes than blocks": lambda channel: channel.send(DigestReply(1, 1, False, 2, 1), deadline()),
    "no blocks": lambda channel: channel.send(DigestReply(1, 0, True, 0, 0), deadline()),
    "an answer to something else": lambda channel: channel.send(Found(b""), deadline()),
}


@pytest.mark.parametrize("lie", DIGEST_LIES)
def test_a_digest_that_cannot_be_is_a_lie(lie: str, liar: Liar, adapter: PeerAdapter) -> None:
    liar.digest = DIGEST_LIES[lie]  # type: ignore[assignment]
    adapter.members.begin(deadline())
    until(lambda: row(adapter)["lies"] >= 1, "the lie to be counted")
    assert load(adapter)[0] is Result.MISS


def test_a_slow_digest_is_asked_for_once_at_a_time(liar: Liar, adapter: PeerAdapter) -> None:
    """However long it takes: what waits for a thread never grows, and other peers keep theirs."""
    blocks, under_way, most, ended = 1 << 17, [0], [0], threading.Event()

    def slow(channel: Channel) -> None:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        channel.send(DigestReply(1, blocks, True, blocks, 1), deadline())
        for _ in range(15):
            channel.send_buffers([memoryview(b"\xff" * BLOCK_BYTES)], deadline())
            ended.wait(0.1)
        under_way[0] -= 1
        channel.send_buffers([memoryview(b"\xff" * (blocks - 15) * BLOCK_BYTES)], deadline())

    liar.digest = slow
    adapter.members.begin(deadline())
    until(lambda: row(adapter)["digest_bytes_received"] >= 2 * blocks * BLOCK_BYTES, "two digests")
    ended.set()
    assert most[0] == 1


def test_a_peer_whose_old_connections_lead_nowhere_costs_its_patience_once(liar: Liar, adapter: PeerAdapter) -> None:
    """As behind a router that has forgotten them: the first probe makes a connection of its own."""
    met: set[Channel] = set()
    together, ended = threading.Barrier(3), threading.Event()

    def read(channel: Channel, asked: Read) -> None:
        met.add(channel)
        together.wait(30)
        liar.send(channel, [TRUE])

    adapter.exists([NAME], deadline())
    liar.reading = read
    readers = [threading.Thread(target=load, args=(adapter,)) for _ in range(3)]
    for each in readers:
        each.start()
    for each in readers:
        each.join()

    def digest(channel: Channel) -> None:
        if channel in met:
            ended.wait(30)
        liar.all_there(channel)

    liar.digest = digest
    until(lambda: row(adapter)["usable"] == 0, "a pull over an old connection")
    until(lambda: row(adapter)["usable"] == 1, "a probe")
    ended.set()
    assert row(adapter)["late"] == 1


def test_an_address_that_cannot_be_one_is_a_peer_that_fails(liar: Liar, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret" * 8)
    (tmp_path / "secret").chmod(0o600)
    settings = PeerTierSettings(
        nodes=("a..b:7600", liar.endpoint), plaintext="trusted_network", secret_file=str(tmp_path / "secret")
    )
    with PeerAdapter(settings, AdapterContext("peers")) as adapter:
        adapter.exists([NAME], deadline())
        until(lambda: all(each["failed"] > 1 for each in adapter.status()["parts"].values()), "both to be tried again")
        rows = adapter.status()["parts"]
    assert "cannot be a host name" in rows["a..b:7600"]["last_error"]
    assert rows[liar.endpoint]["failed"] > 1


def test_a_lookup_answered_for_other_names_is_a_lie(liar: Liar, adapter: PeerAdapter) -> None:
    liar.finding = lambda channel, asked: channel.send(Found(b"\x01\x01\x01"), deadline())
    assert list(adapter.exists([NAME], deadline())) == [False]
    assert row(adapter)["lies"] == 1


def test_status_fits_its_frame_however_many_nodes_there_are() -> None:
    nodes = tuple(f"127.0.0.{number}:{port}" for number in range(1, 5) for port in range(1, 100))
    with PeerAdapter(PeerTierSettings(nodes=nodes, patience_s=0.1), AdapterContext("peers")) as adapter:
        adapter.exists([NAME], deadline())
        until(lambda: adapter.status()["failed"] > 50, "refused connections")
        status = adapter.status()
        assert len(encode(status)) <= PLUGIN_STATUS_BYTES_MAX
        assert (status["nodes"], len(status["parts"])) == (len(nodes), 16)


def test_status_fits_its_frame_however_long_names_and_errors_are(adapter: PeerAdapter, liar: Liar) -> None:
    adapter.close()  # nobody replaces its peers any more
    peers = []
    for number in range(100):
        entry = NodeEntry(f"{number:03}".rjust(200, "n"), 1, "h" * 190 + ":7600", VERSION)
        peers.append(Peer(entry, "me", Admission(PeerTierSettings(nodes=(liar.endpoint,))), 0.3))
        peers[-1].breaker.failed("\U0001f600" * 200)
    adapter.members.peers = tuple(peers)
    status = adapter.status()
    assert len(encode(status)) <= PLUGIN_STATUS_BYTES_MAX
    assert 4 < len(status["parts"]) < 16


def test_the_tier_refuses_to_store_and_to_delete(adapter: PeerAdapter) -> None:
    (stored,) = adapter.store([StoreItem(NAME, [memoryview(TRUE)])], deadline())
    (deleted,) = adapter.delete([NAME], deadline())
    for outcome, word in ((stored, "stores"), (deleted, "deletes")):
        assert outcome.result is Result.FAILED
        assert not outcome.retryable
        assert f"{word} nothing" in outcome.error


def test_a_key_named_twice_is_loaded_twice(adapter: PeerAdapter) -> None:
    rooms = [(bytearray(HEADER_BYTES), bytearray(LAYOUT.nbytes)) for _ in range(2)]
    items = [LoadItem(NAME, [memoryview(page), memoryview(payload)]) for page, payload in rooms]
    assert [each.result for each in adapter.load(items, deadline())] == [Result.DONE] * 2
    assert [bytes(page + payload) for page, payload in rooms] == [TRUE, TRUE]


def test_place_of_ignores_the_epoch() -> None:
    assert place_of(tier_key(bytes(32), 7, 0)) == place_of(tier_key(bytes(32), 7, 9))
    assert place_of(tier_key(bytes(32), 7, 0)) != place_of(tier_key(bytes(32), 8, 0))
