"""The stream of events: who connects hears, who does not read is told how much it has missed, and nobody waits."""

from __future__ import annotations

import gc
import json
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_core.observe.events import BlocksReported, CacheEvent, LeaseTimedOut, ObjectsAdmitted, TierStateChanged
from lmcache_core.observe.stream import ITEMS_MAX, PACKET_BYTES_MAX, EventStream, StreamSettings
from lmcache_core.observe.subscriber import SubscriberContext
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json, embedded_server
from lmcache_testing.waiting import until


class Reader:
    """One that reads when it is asked to."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(60)
        self.sock.connect(str(path))

    def packet(self) -> list[Json]:
        return [json.loads(line) for line in self.sock.recv(PACKET_BYTES_MAX).splitlines()]

    def until(self, name: str) -> Json:
        while True:
            packet = self.packet()
            assert packet, "the stream ended"
            for event in packet:
                if event["event"] == name:
                    return event

    def all_there_is(self) -> list[Json]:
        self.sock.setblocking(False)
        found: list[dict[str, object]] = []
        try:
            while packet := self.packet():
                found += packet
        except BlockingIOError:
            pass
        self.sock.settimeout(60)
        return found


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[EventStream]:
    made = EventStream(StreamSettings(readers_max=3), SubscriberContext("node", tmp_path))
    yield made
    made.close()


@pytest.fixture
def connect(tmp_path: Path, stream: EventStream) -> Iterator[Callable[[], Reader]]:
    made: list[Reader] = []

    def reader() -> Reader:
        made.append(Reader(tmp_path / "node-events.sock"))
        return made[-1]

    yield reader
    for each in made:
        each.sock.close()


def leases(count: int, first: int = 0) -> list[CacheEvent]:
    return [LeaseTimedOut(at_s=1.0, session=1, lease=number, kind="read") for number in range(first, first + count)]


def sockets() -> set[int]:
    """The sockets of this process, by descriptor."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if path.readlink().name.startswith("socket:"):
                found.add(int(path.name))
    return found


def test_everyone_who_reads_hears_everything_in_order(stream: EventStream, connect: Callable[[], Reader]) -> None:
    readers = [connect(), connect()]
    stream.hear(leases(1000))
    for reader in readers:
        assert [event["lease"] for event in reader.all_there_is()] == list(range(1000))


def test_who_does_not_read_is_told_how_much_it_has_missed_and_others_miss_nothing(
    stream: EventStream, connect: Callable[[], Reader]
) -> None:
    sleeper, reader, told = connect(), connect(), 0
    heard: list[dict[str, object]] = []
    while told < 50_000:
        stream.hear(leases(1000, told))
        told += 1000
        heard += reader.all_there_is()
    assert [event["lease"] for event in heard] == list(range(told))
    before = sleeper.all_there_is()
    assert 0 < len(before) < told
    stream.hear(leases(1, told))
    after = sleeper.all_there_is()
    assert after[0] == {"event": "missed", "events": told - len(before)}
    assert [event["lease"] for event in after[1:]] == [told]


def test_a_reader_that_is_gone_makes_room_for_another(stream: EventStream, connect: Callable[[], Reader]) -> None:
    readers = [connect() for _ in range(3)]
    stream.hear(leases(1))
    turned_away = connect()
    stream.hear(leases(1))
    assert turned_away.packet() == []
    readers[0].sock.close()
    stream.hear(leases(1))
    late = connect()
    stream.hear(leases(1, 7))
    assert [event["lease"] for event in late.packet()] == [7]


def test_a_reader_that_only_stops_reading_makes_room_for_another(
    stream: EventStream, connect: Callable[[], Reader]
) -> None:
    for reader in [connect() for _ in range(3)]:
        reader.sock.shutdown(socket.SHUT_RD)
    stream.hear(leases(1))
    late = connect()
    stream.hear(leases(1, 7))
    assert [event["lease"] for event in late.packet()] == [7]


def test_an_ended_reader_is_forgotten_also_while_a_child_has_its_socket(
    stream: EventStream, connect: Callable[[], Reader]
) -> None:
    gc.collect()
    before = sockets()
    ended = connect()
    until(lambda: len(sockets() - before) == 2)
    (mine,) = sockets() - before - {ended.sock.fileno()}
    duplicate = os.dup(mine)  # as a child has it between fork and exec
    try:
        ended.sock.close()
        until(lambda: mine not in sockets())
        late = connect()  # its number is likely to be taken again
        stream.hear(leases(1, 7))
        assert [event["lease"] for event in late.packet()] == [7]
    finally:
        os.close(duplicate)


def test_readers_that_come_and_go_while_nothing_happens_keep_nobody_out(
    stream: EventStream, connect: Callable[[], Reader]
) -> None:
    gc.collect()
    before = sockets()
    for _ in range(200):  # more than may wait to be accepted
        gone = connect()
        until(lambda: len(sockets() - before) == 2)  # both ends
        gone.sock.close()
        until(lambda: not sockets() - before)
    reader = connect()
    stream.hear(leases(1))
    assert reader.packet()


def test_the_largest_event_fits_into_a_packet_and_says_what_it_leaves_out(
    stream: EventStream, connect: Callable[[], Reader]
) -> None:
    reader = connect()
    keys = [number.to_bytes(32, "big") for number in range(20_000)]
    small = leases(350)  # nearly a packet of their own
    trouble = TierStateChanged(at_s=1.0, tier="t" * 64, what="writes", state="open", error="é" * 100_000)
    stream.hear([*small, ObjectsAdmitted(at_s=1.0, namespace=7, keys=keys, nbytes=1), trouble])
    heard = reader.all_there_is()
    assert len(heard) == len(small) + 2
    assert len(heard[-2]["keys"]) == ITEMS_MAX
    assert heard[-2]["more_keys"] == 20_000 - ITEMS_MAX
    assert set(heard[-1]["error"]) == {"é"}


def test_an_event_with_several_long_lists_fits_into_a_packet_too(
    stream: EventStream, connect: Callable[[], Reader]
) -> None:
    reader = connect()
    keys, hashes = ([bytes([each]) * 32 for _ in range(1_500)] for each in (1, 2))
    reported = BlocksReported(
        at_s=1.0, namespace=7, keys=keys, hashes=hashes, parent=None, media=bytes(1_500), block_size=16, lora_id=None,
        lora_name=None, group=None, token_ids=[],
    )  # fmt: skip
    stream.hear([*leases(350), reported])
    heard = reader.all_there_is()[-1]
    for name in ("keys", "hashes", "media"):
        assert len(heard[name]) + heard[f"more_{name}"] == 1_500


def test_only_its_user_can_connect_and_a_leftover_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "events.sock"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    stream = EventStream(StreamSettings(path=path), SubscriberContext("node", tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    reader = Reader(path)
    peer = reader.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    assert struct.unpack("3i", peer)[0] == os.getpid()
    reader.sock.close()
    stream.close()
    assert not path.exists()


def test_a_path_of_any_length_will_do(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    stream = EventStream(StreamSettings(), SubscriberContext("node", deep))
    assert (deep / "node-events.sock").is_socket()
    stream.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.sock"
    path.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        EventStream(StreamSettings(path=path), SubscriberContext("node", tmp_path))
    assert path.read_text() == "mine"


def test_a_store_is_seen_as_admitted_and_after_a_restart_again(tmp_path: Path) -> None:
    space = Namespace("model", Layout("uint8", (4096,)))
    name, keys = f"stream-{uuid4().hex[:8]}", [bytes([number + 1]) * 32 for number in range(4)]
    for _ in range(2):
        with embedded_server(tmp_path, name=name, l1={"backing": "memfd"}, subscribers={"stream": {}}) as server:
            reader = Reader(tmp_path / "state" / f"{name}-events.sock")
            with server.connect() as client:
                assert client.store(keys, [bytes(4096)] * 4, namespace=space).stored == 4
                assert reader.until("admitted")["keys"] == [key.hex() for key in keys]
        while reader.packet():  # the rest, and then the end
            pass
        reader.sock.close()
