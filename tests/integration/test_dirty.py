"""What becomes of objects whose room is needed before a tier has them: dropped last, kept, or waited for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link.channel import Pending
from lmcache_core.client.results import Status
from lmcache_core.kernel.answers import Grant
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tiers.contract import L2Adapter
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_mock")

NAMESPACE = Namespace("model", Layout("uint8", (16384,)))
NBYTES = NAMESPACE.layout.nbytes
SLOTS = 256  # of the pool of 4 MiB


def key(number: int) -> bytes:
    return hashlib.sha256(b"dirty %d" % number).digest()


def payload(number: int) -> bytes:
    return hashlib.sha256(b"bytes %d" % number).digest() * (NBYTES // 32)


class World:
    """A server of 256 slots with one tier, whose adapter does as it is told."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server = server
        self.client = client

    @property
    def adapter(self) -> L2Adapter:
        assert self.server.tiering is not None
        (only,) = self.server.tiering.tiers
        return only.adapter

    def store(self, first: int, count: int, client: Client | None = None) -> list[Status]:
        numbers = range(first, first + count)
        payloads = [payload(number) for number in numbers]
        return list((client or self.client).store([key(n) for n in numbers], payloads, namespace=NAMESPACE).statuses)

    def in_l1(self, first: int, count: int) -> int:
        """How many of these the pool has."""
        keys = [key(number) for number in range(first, first + count)]
        return self.client.lookup(keys, namespace=NAMESPACE, prefix=False, tiers=[]).hits

    def stores(self) -> Json:
        told: Json = self.client.status()["tiers"]["stores"]
        return told

    def quiet(self) -> bool:
        told = self.stores()
        return not told["arrived"] and not any(told["dirty"].values()) and not told["in_flight_bytes"]

    def hangs(self) -> None:
        """From here on the tier takes nothing, until `goes_on`."""
        self.adapter.set_faults("store hang")

    def goes_on(self) -> None:
        self.adapter.set_faults()


@pytest.fixture
def start(start: Callable[..., Server]) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def make(**settings: Any) -> World:
            settings.setdefault("l2", {"bad": {"type": "mock", "deadline_s": 60.0}})
            l1 = {"size_bytes": SLOTS * NBYTES, "backing": "memfd", "watermark": 1.0}
            server = start(l1=l1, drain_s=0.2, **settings)
            return World(server, stack.enter_context(server.connect()))

        yield make


def test_what_the_tier_has_leaves_a_full_pool_before_what_it_does_not_have(start: Callable[..., World]) -> None:
    at = start(dirty="drop")
    at.store(0, 100)
    until(at.quiet, "the first hundred to be stored")
    at.hangs()
    at.store(100, 100)
    # The clean ones are the most recently used now: by use alone the others would go.
    assert at.in_l1(0, 100) == 100
    buffers = [bytearray(NBYTES) for _ in range(100)]
    at.client.retrieve([key(n) for n in range(100)], buffers, namespace=NAMESPACE)
    assert at.store(200, 156) == [Status.STORED] * 156
    assert at.in_l1(100, 256) == 256, "whatever no tier has"
    assert at.in_l1(0, 100) == 0
    assert at.stores()["reached_no_tier"] == {"objects": 0, "bytes": 0}
    at.goes_on()


def test_where_nothing_is_clean_the_oldest_goes_and_is_counted(start: Callable[..., World]) -> None:
    at = start(dirty="drop", store_in_flight_bytes_max=32 * NBYTES)
    at.hangs()
    for first in range(0, 400, 50):
        assert at.store(first, 50) == [Status.STORED] * 50
    in_flight = at.stores()["in_flight_bytes"] // NBYTES
    assert in_flight, "what a lane reads stays"
    kept = at.in_l1(0, 400)
    assert kept == SLOTS
    assert at.in_l1(400 - (SLOTS - in_flight), SLOTS - in_flight) == SLOTS - in_flight, "the newest"
    at.goes_on()
    until(at.quiet, "what is left to be stored")
    lost = 400 - SLOTS
    assert at.stores()["counts"]["lost_evicted"] == lost
    assert at.stores()["reached_no_tier"] == {"objects": lost, "bytes": lost * NBYTES}


def test_keep_refuses_a_store_rather_than_lose_one(start: Callable[..., World]) -> None:
    at = start(dirty="keep")
    at.hangs()
    at.store(0, SLOTS)
    assert at.store(SLOTS, 10) == [Status.FULL] * 10
    at.goes_on()
    until(at.quiet, "the stores")
    assert at.store(SLOTS, 10) == [Status.STORED] * 10
    assert at.stores()["reached_no_tier"] == {"objects": 0, "bytes": 0}


def waiting(at: World) -> int:
    count: int = at.client.status()["stores_waiting"]
    return count


def test_a_store_waits_for_the_room_that_its_tiers_make_and_holds_up_nobody(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS)
    answers: list[list[Status]] = []
    with at.server.connect() as other:
        writer = threading.Thread(target=lambda: answers.append(at.store(SLOTS, 20, other)))
        writer.start()
        until(lambda: waiting(at) == 1, "the store to wait")
        # The loop serves everybody else meanwhile.
        assert at.in_l1(0, SLOTS) == SLOTS
        assert answers == []
        at.goes_on()
        writer.join(60)
        assert answers == [[Status.STORED] * 20]
    until(at.quiet, "the stores")
    assert waiting(at) == 0
    assert at.stores()["reached_no_tier"] == {"objects": 0, "bytes": 0}
    assert at.client.status()["stores_waited"] == 1
    assert at.client.status()["stores_waited_in_vain"] == 0


def test_the_layout_of_a_store_that_waits_for_tiers_is_forgotten_by_nobody(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS)
    own = Namespace("of its own", Layout("uint8", (NBYTES - 1,)))
    keys, payloads = [key(n) for n in range(20)], [payload(n)[1:] for n in range(20)]
    answers: list[list[Status]] = []
    with at.server.connect() as other:
        writer = threading.Thread(target=lambda: answers.append(other.store(keys, payloads, namespace=own).statuses))
        writer.start()
        until(lambda: waiting(at) == 1, "the store to wait")
        at.server.parts.shares.layouts.total = 16
        for nbytes in range(1, 32):  # so many that the session forgets its older ones
            other.lookup(keys[:1], namespace=Namespace("another", Layout("uint8", (nbytes,))))
        assert at.server.parts.l1.counters["layouts_forgotten"] > 0
        at.goes_on()
        writer.join(60)
        assert answers == [[Status.STORED] * 20]
        into = [bytearray(NBYTES - 1) for _ in keys]
        assert other.retrieve(keys, into, namespace=own).hits == 20
        assert into == payloads


def test_a_store_that_waited_in_vain_is_answered_full_and_has_what_there_was(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=0.2)
    at.hangs()
    at.store(0, SLOTS - 5)
    before = time.monotonic()
    assert at.store(SLOTS, 20) == [Status.STORED] * 5 + [Status.FULL] * 15
    assert time.monotonic() - before >= 0.2, "no wait ends early"
    assert at.client.status()["stores_waited_in_vain"] == 1
    assert at.in_l1(SLOTS, 5) == 5
    at.goes_on()


def test_nobody_waits_where_no_room_is_to_come(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    keys = [key(number) for number in range(SLOTS)]
    with at.client.prepare_store(keys, namespace=NAMESPACE) as lease:
        assert at.store(SLOTS, 20) == [Status.FULL] * 20
        assert at.client.status()["stores_waited"] == 0
        lease.abort()


def test_the_room_that_comes_is_the_oldest_stores(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS)
    ended: list[int] = []
    with ExitStack() as stack:
        writers = []
        for number in range(4):
            client = stack.enter_context(at.server.connect())

            def write(number: int = number, client: Client = client) -> None:
                assert at.store(SLOTS + 100 * number, 60, client) == [Status.STORED] * 60
                ended.append(number)

            writers.append(threading.Thread(target=write))
            writers[-1].start()
            until(lambda number=number: waiting(at) == number + 1, "the store to wait")
        at.goes_on()
        for writer in writers:
            writer.join(60)
    assert sorted(ended) == [0, 1, 2, 3]
    until(at.quiet, "the stores")
    assert at.stores()["reached_no_tier"]["objects"] == 0
    assert waiting(at) == 0


WRITER = """
import sys
from lmcache_core.client.client import Client
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace

keys = [number.to_bytes(32, "big") for number in range(20)]
with Client.connect(sys.argv[1], runtime_dir=sys.argv[2]) as client:
    client.store(keys, [bytes(16384)] * 20, namespace=Namespace("model", Layout("uint8", (16384,))))
"""


def test_the_store_of_a_client_that_goes_is_withdrawn(start: Callable[..., World], tmp_path: Path) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS - 5)
    other = subprocess.Popen([sys.executable, "-c", WRITER, at.server.parts.settings.name, str(tmp_path / "run")])
    until(lambda: waiting(at) == 1, "the store to wait")
    assert at.client.status()["l1"]["objects_by_state"]["writing"] == 5
    other.kill()
    other.wait()
    until(lambda: waiting(at) == 0, "the withdrawal")
    assert at.client.status()["stores_waited_in_vain"] == 0, "nobody was answered"
    until(lambda: at.client.status()["l1"]["objects_by_state"]["writing"] == 0, "its slots")
    assert at.in_l1(SLOTS, 20) == 0
    at.goes_on()
    until(at.quiet, "the stores")
    assert at.store(SLOTS, 20) == [Status.STORED] * 20
    assert at.client.status()["counters"]["loop_faults"] == 0


def on_loop(server: Server, ask: Callable[[], Any]) -> Any:
    """What a call gives on the loop's own thread."""
    answers: SimpleQueue[object] = SimpleQueue()
    server.parts.loop.call(lambda: answers.put(ask()))
    return answers.get(timeout=60)


def prepare_now(at: World, client: Client, first: int, count: int, lease: int = 0) -> Pending:
    """Ask for slots as a foreign client may."""
    client.register_layout(NAMESPACE)
    keys = join_keys([key(number) for number in range(first, first + count)])
    return client.links.current().channel.start(m.PrepareStore(0, NAMESPACE.id, keys, lease))


def prepare(at: World, client: Client, first: int, count: int, lease: int = 0) -> object:
    """The same, and wait until the server holds the answer back."""
    held_back = prepare_now(at, client, first, count, lease)
    until(lambda: waiting(at) == 1, "the store to wait")
    return held_back


def test_an_end_of_a_session_ends_what_its_waiting_stores_were_granted_after_they_hear_of_it(
    start: Callable[..., World],
) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS - 5)
    with at.server.connect() as other:
        held_back = prepare(at, other, SLOTS, 20)
        channel = other.links.current().channel
        channel.call(m.EndSession(0, leases=None))
        # It was answered before the end, which settled it: what comes later would name slots that are others' by now.
        granted = channel.poll(held_back)
        assert isinstance(granted, m.Granted)
        assert granted.statuses.count(Grant.GRANTED) == 5
        assert waiting(at) == 0
        state = channel.call(m.LeaseStatusOf(0, granted.lease))
        assert isinstance(state, m.LeaseState)
        assert state.state == "settled"
    at.goes_on()


def test_a_waiting_page_is_withdrawn_when_its_client_is_back_before_its_connection_was_seen_to_end(
    start: Callable[..., World],
) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS - 10)
    with at.server.connect() as before, at.server.connect() as back:
        granted = before.links.current().channel.wait(prepare_now(at, before, SLOTS, 5))
        assert isinstance(granted, m.Granted)
        prepare(at, before, SLOTS + 5, 10, granted.lease)

        def same_client() -> m.Attach:  # as over ZMQ, or where a fork has the socket: no end of file comes first
            old, new = list(at.server.parts.sessions)[-2:]
            new.client_id = old.client_id
            return m.Attach(0, new.row, new.nonce, [granted.lease])

        channel = back.links.current().channel
        attach = on_loop(at.server, same_client)
        attached = channel.call(m.Attach(0, attach.row, attach.nonce, attach.held))
        assert isinstance(attached, m.Attached)
        assert attached.held == [granted.lease]
        # Nobody was told of the second page, so nobody would settle it: its keys were busy for as long as the lease.
        assert at.client.status()["l1"]["objects_by_state"]["writing"] == 5
        state = channel.call(m.LeaseStatusOf(0, granted.lease))
        assert isinstance(state, m.LeaseState)
        assert state.open_positions == 5
        assert waiting(at) == 0
    at.goes_on()


def test_what_was_offered_before_a_clear_is_given_no_room_after_it(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS - 5)
    answers: list[list[Status]] = []
    with at.server.connect() as other:
        writer = threading.Thread(target=lambda: answers.append(at.store(SLOTS, 20, other)))
        writer.start()
        until(lambda: waiting(at) == 1, "the store to wait")
        at.client.clear(NAMESPACE)
        writer.join(60)
    assert answers
    assert Status.STORED not in answers[0]
    assert at.in_l1(SLOTS, 20) == 0
    at.goes_on()


def test_a_server_that_ends_answers_the_stores_that_wait(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS)
    answers: list[list[Status]] = []
    with at.server.connect() as other:
        writer = threading.Thread(target=lambda: answers.append(at.store(SLOTS, 20, other)))
        writer.start()
        until(lambda: waiting(at) == 1, "the store to wait")
        at.server.stop()
        writer.join(60)
    assert answers
    assert Status.STORED not in answers[0]


def test_a_longer_wait_than_a_client_has_patience_for_is_refused() -> None:
    with pytest.raises(Exception, match="store_wait_s"):
        make_settings(name="t", dirty="wait", store_wait_s=6.0)


# --- what comes back --------------------------------------------------------------------------------------------


def read(at: World, first: int, count: int) -> None:
    """Look up and read; every byte is checked."""
    keys = [key(number) for number in range(first, first + count)]
    found = at.client.lookup(keys, namespace=NAMESPACE, hold=True, wait_s=30.0)
    into = [bytearray(NBYTES) for _ in keys]
    assert at.client.retrieve(keys, into, namespace=NAMESPACE, promise=found.promise).hits == count
    assert into == [payload(number) for number in range(first, first + count)]


def loaded(at: World) -> int:
    """Objects that have come from the tier."""
    count: int = at.client.status()["counters"].get("loaded", 0)
    return count


def test_a_hot_prefix_is_answered_by_the_index_once_it_was_loaded_twice(start: Callable[..., World]) -> None:
    at = start()
    at.store(0, 20)
    until(at.quiet, "the stores")
    at.client.clear(NAMESPACE)
    keys = [key(number) for number in range(100, 100 + SLOTS)]
    with at.client.prepare_store(keys, namespace=NAMESPACE) as lease:
        lease.abort(list(range(20)))
        for expected in (20, 40):
            at.store(1000 + expected, 20)
            until(at.quiet, "a pool without room, of what can go")
            read(at, 0, 20)
            assert loaded(at) == expected
            assert at.in_l1(0, 20) == (20 if expected == 40 else 0), "the first time for one reader"
        read(at, 0, 20)
        assert loaded(at) == 40, "the third time nobody asks the tier"
        lease.abort()


def test_what_is_loaded_while_there_is_room_stays_and_goes_before_what_no_tier_has(start: Callable[..., World]) -> None:
    at = start()
    at.store(0, 20)
    until(at.quiet, "the stores")
    at.client.clear(NAMESPACE)
    read(at, 0, 20)
    assert at.in_l1(0, 20) == 20
    at.hangs()
    assert at.store(100, SLOTS) == [Status.STORED] * SLOTS
    assert at.in_l1(0, 20) == 0
    assert at.in_l1(100, SLOTS) == SLOTS
    at.goes_on()


# --- an object for which whole slabs have to go -----------------------------------------------------------------

LARGE = Namespace("large", Layout("uint8", (64 * NBYTES,)))  # a quarter of the pool: sixteen of its slabs


def store_large(at: World, number: int, client: Client | None = None) -> Status:
    payload = hashlib.sha256(b"large %d" % number).digest() * (LARGE.layout.nbytes // 32)
    [status] = (client or at.client).store([key(number)], [payload], namespace=LARGE).statuses
    return status


def test_for_a_large_object_what_tiers_have_goes_first_and_then_the_oldest_that_they_lack(
    start: Callable[..., World],
) -> None:
    at = start(dirty="drop", store_in_flight_bytes_max=16 * NBYTES)
    at.store(0, 64)
    until(at.quiet, "a quarter of the pool to be stored")
    at.hangs()
    at.store(64, SLOTS - 64)
    assert store_large(at, 1000) is Status.STORED
    assert at.in_l1(0, 64) == 0, "what the tier has"
    assert at.in_l1(64, SLOTS - 64) == SLOTS - 64
    assert at.stores()["reached_no_tier"]["objects"] == 0
    assert store_large(at, 1001) is Status.STORED
    assert at.in_l1(64, SLOTS - 64) == SLOTS - 128, "no more than its own room"
    at.goes_on()
    until(at.quiet, "what is left to be stored")
    assert at.stores()["reached_no_tier"]["objects"] == at.stores()["counts"]["lost_evicted"] == 64


def test_a_large_object_waits_for_the_slabs_that_its_tiers_make_free(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=5.0)
    at.hangs()
    at.store(0, SLOTS)
    answers: list[Status] = []
    with at.server.connect() as other:
        writer = threading.Thread(target=lambda: answers.append(store_large(at, 1000, other)))
        writer.start()
        until(lambda: waiting(at) == 1, "the store to wait")
        assert at.in_l1(0, SLOTS) == SLOTS
        at.goes_on()
        writer.join(60)
    assert answers == [Status.STORED]
    until(at.quiet, "the stores")
    assert at.stores()["reached_no_tier"] == {"objects": 0, "bytes": 0}
    assert at.client.status()["stores_waited_in_vain"] == 0


def test_a_large_object_that_waited_in_vain_has_taken_nothing(start: Callable[..., World]) -> None:
    at = start(dirty="wait", store_wait_s=0.3, store_in_flight_bytes_max=16 * NBYTES)
    at.store(0, 32)
    until(at.quiet, "an eighth of the pool to be stored")
    at.hangs()
    at.store(32, SLOTS - 32)
    assert store_large(at, 1000) is Status.FULL
    assert at.in_l1(32, SLOTS - 32) == SLOTS - 32, "what no tier has"
    assert at.stores()["reached_no_tier"] == {"objects": 0, "bytes": 0}
    assert at.client.status()["l1"]["emptying_bytes"] == 0
    at.goes_on()


def test_keep_refuses_a_large_object_rather_than_lose_a_small_one(start: Callable[..., World]) -> None:
    at = start(dirty="keep")
    at.hangs()
    at.store(0, SLOTS)
    assert store_large(at, 1000) is Status.FULL
    assert at.in_l1(0, SLOTS) == SLOTS
    at.goes_on()
    until(at.quiet, "the stores")
    assert store_large(at, 1000) is Status.STORED
