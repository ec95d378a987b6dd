"""The door of a real helper, from outside: garbage, readers that stop or die, and what anybody may keep there."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from lmcache_core import Namespace
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_peer.admission import Admission
from lmcache_peer.channel import Channel
from lmcache_peer.errors import PeerError
from lmcache_peer.limits import CONNECTIONS_MAX, CONNECTIONS_OF_NODE_MAX, FRAME_BYTES_MAX
from lmcache_peer.messages import (
    VERSION,
    Challenge,
    Done,
    Found,
    Hello,
    LookupAndLock,
    PeerAnswer,
    Read,
    Reading,
    Refused,
    Trailer,
    Unlock,
)
from lmcache_peer.settings import PeerTierSettings
from lmcache_testing.waiting import until

from .conftest import NAMESPACE, StartNode, TestNode, content, free_port, key, start_node

POOL_BYTES = 96 << 20
LARGE = Namespace("large", type(NAMESPACE.layout)("uint8", (16 << 20,)))
_answers: msgspec.msgpack.Decoder[PeerAnswer] = msgspec.msgpack.Decoder(PeerAnswer)


def deadline() -> float:
    return time.monotonic() + 30.0


def name(number: int, namespace: Namespace = NAMESPACE, epoch: int = 0) -> bytes:
    return tier_key(key(number), namespace.id, epoch)


class Door:
    """A node, and the way to its helper."""

    def __init__(self, node: TestNode, port: int) -> None:
        self.node, self.port = node, port

    @contextmanager
    def channel(self, who: str = "reader") -> Iterator[Channel]:
        """Admitted as this node."""
        admission = Admission(PeerTierSettings(nodes=("127.0.0.1:1",)))
        channel, _ = admission.call(who, HostPort("127.0.0.1", self.port), deadline())
        try:
            yield channel
        finally:
            channel.close()

    def locked(self, objects: int) -> None:
        """Wait until so many are locked, and as many read leases are held."""
        until(lambda: self.node.serving.get("locked_objects") == objects, f"{objects} locked objects")


def lock(channel: Channel, *names: bytes) -> bytes:
    channel.send(LookupAndLock(b"".join(names)), deadline())
    answer = channel.receive(_answers, deadline())
    assert isinstance(answer, Found)
    return answer.there


@pytest.fixture(scope="module")
def _one_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    port = free_port()
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("door")
        a = start_node(stack, folder, "a", serve={"port": port}, l1={"size_bytes": POOL_BYTES})
        a.store(1, 2, 3)
        until(lambda: a.serving.get("digest_objects") == 3, "the helper")
        yield Door(a, port)


@pytest.fixture
def door(_one_door: Door) -> Iterator[Door]:
    """The same helper for all tests here; it is asked for nothing any more when one ends."""
    yield _one_door
    until(lambda: _one_door.node.serving["connections"] == 0 == _one_door.node.held, "the end of what a test did")


def test_what_is_locked_stays_until_it_is_unlocked_and_no_longer_than_its_connection(door: Door) -> None:
    with door.channel() as one, door.channel() as two:
        assert lock(one, name(1), name(2), name(9)) == b"\x01\x01\x00"
        assert lock(two, name(2)) == b"\x01"
        door.locked(3)
        two.send(Unlock(name(1)), deadline())  # another connection of the same node
        assert isinstance(two.receive(_answers, deadline()), Done)
        door.locked(2)
    door.locked(0)
    assert door.node.held == 0


def test_nobody_unlocks_what_another_node_has_locked(door: Door) -> None:
    with door.channel("b") as b, door.channel("c") as c:
        lock(b, name(1))
        c.send(Unlock(name(1)), deadline())
        c.receive(_answers, deadline())
        door.locked(1)


def test_locks_expire_by_themselves(door: Door) -> None:
    with door.channel() as channel:
        lock(channel, name(1))
        door.locked(1)
        door.locked(0)
        assert door.node.held == 0


def test_more_than_a_share_of_the_pool_is_found_but_not_kept(door: Door) -> None:
    door.node.store(*range(100, 300))
    with door.channel() as channel:
        for first in range(100, 300, 50):
            names = [name(number) for number in range(first, first + 50)]
            assert lock(channel, *names) == b"\x01" * 50
        until(lambda: 0 < door.node.serving["locked_bytes"] <= POOL_BYTES // 10, "a share of the pool")
        assert door.node.serving["locked_objects"] < 200


@pytest.mark.parametrize("epoch", [1, 7])
def test_an_object_of_another_epoch_is_not_there(door: Door, epoch: int) -> None:
    with door.channel() as channel:
        assert lock(channel, name(1, epoch=epoch)) == b"\x00"


def test_a_namespace_that_nobody_uses_is_not_there(door: Door) -> None:
    other = Namespace("other", NAMESPACE.layout)
    with door.channel() as channel:
        assert lock(channel, name(1, other), name(1)) == b"\x00\x01"
    assert other.id not in {int(each, 16) for each in door.node.client.status()["namespaces"]}


def test_a_reader_that_stops_reading_loses_its_pins(door: Door) -> None:
    large = torch.ones(LARGE.layout.shape, dtype=torch.uint8)
    door.node.client.store([key(1)], [large], namespace=LARGE)
    with door.channel() as channel:
        channel.send(Read(name(1, LARGE), unlock=False), deadline())
        until(lambda: door.node.held == 1, "the lease of the read")
        until(lambda: door.node.held == 0, "its end")
    until(lambda: door.node.serving.get("broken_off"), "the count")


def test_a_reader_that_dies_in_the_middle_frees_at_once_what_it_read(door: Door) -> None:
    large = torch.ones(LARGE.layout.shape, dtype=torch.uint8)
    door.node.client.store([key(1)], [large], namespace=LARGE)
    with door.channel() as channel:
        lock(channel, name(1), name(2))
        channel.send(Read(name(1, LARGE), unlock=False), deadline())
        until(lambda: door.node.held >= 1, "the lease of the read")
    until(lambda: door.node.held == 0, "nothing stays")
    door.locked(0)


def test_an_object_that_is_cleared_while_it_is_sent_has_moved(door: Door) -> None:
    """Its bytes stay while they are sent, and the trailer says that it is not what the pool has now."""
    large = torch.ones(LARGE.layout.shape, dtype=torch.uint8)
    door.node.client.store([key(1)], [large], namespace=LARGE)
    with door.channel() as channel:
        channel.send(Read(name(1, LARGE), unlock=False), deadline())
        answer = channel.receive(_answers, deadline())
        assert isinstance(answer, Reading)
        door.node.client.clear(LARGE)
        room = bytearray(HEADER_BYTES + LARGE.layout.nbytes)
        channel.fill([memoryview(room)], deadline())
        trailer = channel.receive(_answers, deadline())
        assert trailer == Trailer(b"\x01")
        assert set(room[HEADER_BYTES:]) == {1}


def test_slow_readers_leave_half_of_the_pool_to_its_owner(door: Door) -> None:
    large = torch.ones(LARGE.layout.shape, dtype=torch.uint8)
    door.node.client.clear(LARGE)
    assert door.node.client.store([key(1), key(2), key(3), key(4)], [large] * 4, namespace=LARGE).stored == 4
    names = [name(number, LARGE, epoch) for number in range(1, 5) for epoch in (0, 1, 2)]

    def sizes(channel: Channel) -> int:
        channel.send(Read(b"".join(names), unlock=False), deadline())
        reading = channel.receive(_answers, deadline())
        assert isinstance(reading, Reading)
        return sum(map(bool, reading.sizes))

    with door.channel() as slow:
        sent = sizes(slow)
        assert 0 < sent <= POOL_BYTES // 2 // LARGE.layout.nbytes
        with door.channel("other") as other:
            assert sizes(other) == POOL_BYTES // 2 // LARGE.layout.nbytes - sent
    until(lambda: door.node.held == 0, "their ends")
    with door.channel("other") as other:
        assert sizes(other) == sent, "there is room again"
    door.node.client.clear(LARGE)  # which may have evicted what the other tests read
    mine = (1, 2, 3)
    door.node.client.store([key(each) for each in mine], list(map(content, mine)), namespace=NAMESPACE)


def test_one_node_has_only_so_many_connections(door: Door) -> None:
    admission = Admission(PeerTierSettings(nodes=("127.0.0.1:1",)))
    at = HostPort("127.0.0.1", door.port)
    channels = [admission.call("b", at, deadline())[0] for _ in range(CONNECTIONS_OF_NODE_MAX)]
    until(lambda: door.node.serving["connections"] == len(channels), "all of them")
    over, _ = admission.call("b", at, deadline())
    assert isinstance(over.receive(_answers, deadline()), Refused)
    with door.channel("c") as other:
        assert lock(other, name(1)) == b"\x01"
    for channel in (*channels, over):
        channel.close()
    until(lambda: door.node.serving["connections"] == 0, "their ends")


def test_strangers_that_connect_and_wait_keep_no_node_out(door: Door) -> None:
    """More of them than the door has places for nodes, all at once: who has waited longest makes room."""
    with ExitStack() as strangers:
        for number in range(2 * CONNECTIONS_MAX):
            address = ("127.0.0.1", door.port)
            strangers.enter_context(closing(socket.create_connection(address, timeout=30)))
            if number % 64 == 0 or number > 2 * CONNECTIONS_MAX - 4:
                with door.channel() as channel:
                    assert lock(channel, name(1)) == b"\x01"
    until(lambda: door.node.serving["not_admitted_yet"] == 0, "their ends")


def test_a_door_without_descriptors_opens_again_by_itself(door: Door) -> None:
    before = resource.prlimit(door.node.helper, resource.RLIMIT_NOFILE)
    with closing(socket.socket()) as stranger:
        resource.prlimit(door.node.helper, resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            stranger.connect(("127.0.0.1", door.port))
            until(lambda: door.node.serving.get("not_accepted"), "a connection that has no descriptor")
        finally:
            resource.prlimit(door.node.helper, resource.RLIMIT_NOFILE, before)
        with door.channel() as channel:
            assert lock(channel, name(1)) == b"\x01"


def test_garbage_at_the_door_harms_nobody(door: Door) -> None:
    pid, dice = door.node.helper, random.Random(1)
    frames = [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        struct.pack("<I", FRAME_BYTES_MAX + 1),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 60) + b"\x91" * 60,
        *(dice.randbytes(dice.randrange(1, 5000)) for _ in range(40)),
    ]
    for admitted in (False, True):
        for frame in frames:
            if admitted:
                with door.channel("fuzz") as channel:
                    channel.send_buffers([memoryview(frame)], deadline())
                continue
            with socket.create_connection(("127.0.0.1", door.port), timeout=30) as sock:
                sock.sendall(frame)
    with door.channel() as channel:
        for wrong in (LookupAndLock(b"x"), Read(name(1) + b"x", unlock=True)):
            with door.channel() as other:
                other.send(wrong, deadline())
                with pytest.raises(ConnectionError):
                    other.receive(_answers, deadline())
        assert lock(channel, name(1)) == b"\x01"
    assert door.node.helper == pid
    assert Path(f"/proc/{pid}").exists()
    assert os.getpid() != pid


def test_a_reader_of_another_version_is_refused_and_told_why(door: Door) -> None:
    with socket.create_connection(("127.0.0.1", door.port), timeout=30) as sock:
        channel = Channel(sock)
        challenge = channel.receive(msgspec.msgpack.Decoder(Challenge), deadline())
        assert challenge.version == VERSION
        channel.send(Hello(VERSION + 1, "b", bytes(32), b""), deadline())
        refused = channel.receive(msgspec.msgpack.Decoder(Refused), deadline())
        assert f"version {VERSION}" in refused.why


def test_what_is_read_is_what_was_stored(door: Door) -> None:
    with door.channel() as channel:
        channel.send(Read(name(1) + name(9) + name(3), unlock=True), deadline())
        reading = channel.receive(_answers, deadline())
        size = HEADER_BYTES + NAMESPACE.layout.nbytes
        assert reading == Reading([size, 0, size])
        rooms = [bytearray(size), bytearray(size)]
        channel.fill(list(map(memoryview, rooms)), deadline())
        assert channel.receive(_answers, deadline()) == Trailer(bytes(3))
    for number, room in zip((1, 3), rooms, strict=True):
        assert bytes(room[HEADER_BYTES:]) == content(number).numpy().tobytes()


def test_a_secret_keeps_strangers_out_on_both_sides(node: StartNode, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for path in (right, wrong):
        path.write_text(path.name * 8)
        path.chmod(0o600)
    port = free_port()
    a = node("a", serve={"port": port, "secret_file": str(right)})
    until(lambda: a.serving.get("port") == port, "the helper")
    for secret in (None, str(wrong)):
        admission = Admission(PeerTierSettings(nodes=("127.0.0.1:1",), secret_file=secret))
        with pytest.raises(PeerError, match="secret"):
            admission.call("b", HostPort("127.0.0.1", port), deadline())
    b = node("b", tier={"nodes": [f"127.0.0.1:{port}"], "secret_file": str(right)})
    a.store(1)
    b.sees("a", 1)
    assert b.load(1) == [1]
    c = node("c", tier={"nodes": [f"127.0.0.1:{port}"], "secret_file": str(wrong)})
    assert c.load(1) == []
    assert "secret" in next(iter(c.tier["adapter"]["parts"].values()))["last_error"]
