"""KV events for routers, read as a router reads them: by MessagePack from a socket, with nothing of ours."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lmcache_core.client.client import Client
from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.clock import Clock
from lmcache_core.errors import SettingsError
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import BlocksReported, CacheEvent, EventsMissed, ObjectsAdmitted, of_objects, one
from lmcache_core.observe.files import plain
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_kv_events import publisher, subscriber
from lmcache_kv_events.publisher import SNAPSHOT
from lmcache_kv_events.settings import KvEventsSettings, check, offset_endpoint
from lmcache_kv_events.subscriber import KvEvents
from lmcache_testing import EventSubscriberContract, PluginPackageContract
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

LAYOUT = Layout("uint8", (4096,))
SPACE = Namespace("kv", LAYOUT)
WAIT_MS = 60_000
END = b"\xff" * 8


def digest(what: str, number: int) -> bytes:
    return hashlib.sha256(f"{what} {number}".encode()).digest()


def keys(first: int, count: int) -> list[bytes]:
    return [digest("key", number) for number in range(first, first + count)]


def hashes(first: int, count: int) -> list[bytes]:
    return [digest("hash", number) for number in range(first, first + count)]


def low(raw: bytes) -> int:
    return int.from_bytes(raw, "big") & (1 << 64) - 1


class Router:
    """One that hears the PUB socket, and asks the ROUTER."""

    def __init__(self, folder: Path, topic: str = "") -> None:
        self.context = zmq.Context()
        self.events: list[Json] = []  # heard, and not looked at
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(f"ipc://{folder}/kv")
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(f"ipc://{folder}/replay")

    def batch(self) -> tuple[int, list[Any], Any]:
        """Number, events, rank."""
        assert self.sub.poll(WAIT_MS), "nothing was published"
        _, seq, payload = self.sub.recv_multipart()
        at_s, events, rank = msgspec.msgpack.decode(payload)
        assert at_s > 0
        return int.from_bytes(seq, "big"), events, rank

    def until(self, kind: str) -> Json:
        while True:
            while self.events:
                event = self.events.pop(0)
                if event["type"] == kind:
                    return dict(event)
            self.events += self.batch()[1]

    def ask(self, what: bytes) -> list[tuple[int, list[Any]]]:
        self.dealer.send_multipart([b"", what])
        found = []
        while True:
            assert self.dealer.poll(WAIT_MS)
            empty, topic, seq, payload = self.dealer.recv_multipart()
            assert empty == b""
            if seq == END and not payload:
                assert topic == b""
                return found
            found.append((int.from_bytes(seq, "big", signed=True), msgspec.msgpack.decode(payload)[1]))

    def close(self) -> None:
        self.context.destroy(linger=0)


Serve = Callable[..., tuple[Client, Router]]


def settings_of(folder: Path, **more: object) -> Json:
    return {"endpoint": f"ipc://{folder}/kv", "replay_endpoint": f"ipc://{folder}/replay", **more}


@pytest.fixture
def serve(start: Callable[..., Server], tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def serve(l2: Json | None = None, size: int = 16 << 20, **more: object) -> tuple[Client, Router]:
            l1, events = {"size_bytes": size, "backing": "memfd"}, settings_of(tmp_path, **more)
            server = start(l1=l1, l2=l2 or {}, subscribers={"kv_events": events})
            router = stack.enter_context(closing(Router(tmp_path)))
            client = stack.enter_context(server.connect())
            subscribed(client, router)
            return client, router

        yield serve


def subscribed(client: Client, router: Router) -> None:
    """Until the subscription has come through: the first batches are for that."""
    number = 0
    while not router.sub.poll(20):
        client.store(keys(10**6 + number, 1), [bytes(4096)], namespace=SPACE,
                     blocks=EngineBlocks(hashes(10**6 + number, 1), 16))  # fmt: skip
        number += 1
        assert number < 1000
    client.clear(SPACE)
    until(lambda: client.status()["events"]["queue"] == 0)
    time.sleep(0.1)  # for the publisher's thread
    while router.sub.poll(100):
        router.sub.recv_multipart()


class TestPackage(PluginPackageContract):
    distribution = "lmcache-kv-events"


class TestKvEvents(EventSubscriberContract):
    component = "kv_events"

    @pytest.fixture
    def subscriber_settings(self, tmp_path: Path) -> Json:
        return settings_of(tmp_path)


def test_what_is_stored_and_removed_is_told_by_the_engines_hashes(serve: Serve) -> None:
    client, router = serve()
    blocks = EngineBlocks(hashes(0, 8), 16, parent=digest("hash", -1), lora_id=3, lora_name="tuned", group=1)
    client.store(keys(0, 4), [bytes(4096)] * 4, namespace=SPACE, blocks=blocks)
    assert router.until("BlockStored") == {
        "type": "BlockStored", "block_hashes": [low(each) for each in hashes(0, 8)],
        "parent_block_hash": low(digest("hash", -1)), "token_ids": [], "block_size": 16, "lora_id": 3,
        "medium": "CPU", "lora_name": "tuned", "group_idx": 1, "locality": "LOCAL",
    }  # fmt: skip
    client.clear(SPACE)
    told = router.until("BlockRemoved")
    assert told["medium"] == "CPU"
    assert set(told["block_hashes"]) == {low(each) for each in hashes(0, 8)}


def test_what_is_there_already_is_told_when_an_engine_reports_it(serve: Serve) -> None:
    client, router = serve()
    client.store(keys(0, 2), [bytes(4096)] * 2, namespace=SPACE)
    assert client.report_block_allocation(keys(0, 3), EngineBlocks(hashes(0, 3), 16), namespace=SPACE) == 3
    told = router.until("BlockStored")
    assert told["block_hashes"] == [low(each) for each in hashes(0, 2)], "the third is not there"
    assert (told["parent_block_hash"], told["lora_id"], told["lora_name"]) == (None, None, None)
    client.store(keys(2, 1), [bytes(4096)], namespace=SPACE)
    told = router.until("BlockStored")
    assert told["block_hashes"] == [low(hashes(2, 1)[0])]
    assert told["parent_block_hash"] == low(hashes(1, 1)[0])


def test_evictions_are_published(serve: Serve) -> None:
    client, router = serve(size=1 << 20)
    for first in range(0, 600, 100):
        blocks = EngineBlocks(hashes(first, 100), 16)
        client.store(keys(first, 100), [bytes(4096)] * 100, namespace=SPACE, blocks=blocks)
    there: set[int] = set()
    found = client.lookup(keys(0, 600), namespace=SPACE, prefix=False, tiers=[]).statuses
    want = {low(hashes(number, 1)[0]) for number, status in enumerate(found) if status.name == "GRANTED"}
    end = time.monotonic() + 60
    while there != want:
        assert time.monotonic() < end
        for event in router.batch()[1]:
            change = there.update if event["type"] == "BlockStored" else there.difference_update
            change(event["block_hashes"])


def test_tiers_are_another_medium(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("lmcache_fs")
    client, router = serve({"disk": {"type": "fs", "path": str(tmp_path / "disk")}})
    client.store(keys(0, 2), [bytes(4096)] * 2, namespace=SPACE, blocks=EngineBlocks(hashes(0, 2), 16))
    media = {router.until("BlockStored")["medium"], router.until("BlockStored")["medium"]}
    assert media == {"CPU", "STORAGE"}
    client.clear(SPACE)
    assert router.until("BlockRemoved")["medium"] == "CPU"
    assert {each["medium"] for _, events in router.ask(SNAPSHOT) for each in events} == {"STORAGE"}
    assert client.lookup(keys(0, 2), namespace=SPACE, wait_s=30).statuses[0].name == "GRANTED"
    assert router.until("BlockStored")["medium"] == "CPU", "its hashes were kept for as long as it was anywhere"
    client.clear(SPACE, tiers=True)
    gone = {router.until("BlockRemoved")["medium"], router.until("BlockRemoved")["medium"]}
    assert gone == {"CPU", "STORAGE"}


@pytest.mark.parametrize(("locality", "expected"), [("auto", "LOCAL"), ("remote", "REMOTE")])
def test_a_router_learns_which_blocks_other_nodes_have_too(
    serve: Serve, tmp_path: Path, locality: str, expected: str
) -> None:
    pytest.importorskip("lmcache_fs")
    client, router = serve({"disk": {"type": "fs", "path": str(tmp_path / "disk"), "locality": locality}})
    client.store(keys(0, 1), [bytes(4096)], namespace=SPACE, blocks=EngineBlocks(hashes(0, 1), 16))
    stored = {(each["medium"], each["locality"]) for each in (router.until("BlockStored"), router.until("BlockStored"))}
    assert stored == {("CPU", "LOCAL"), ("STORAGE", expected)}
    client.clear(SPACE, tiers=True)
    removed = [router.until("BlockRemoved") for _ in range(2)]
    assert {(each["medium"], each["locality"]) for each in removed} == stored


def test_a_clear_of_everything_is_one_event(serve: Serve) -> None:
    client, router = serve()
    client.store(keys(0, 2), [bytes(4096)] * 2, namespace=SPACE, blocks=EngineBlocks(hashes(0, 2), 16))
    router.until("BlockStored")
    client.clear(tiers=True)
    assert router.until("AllBlocksCleared") == {"type": "AllBlocksCleared"}
    (_, events), *more = router.ask(SNAPSHOT)
    assert (events, more) == ([], [])


def test_what_was_missed_is_replayed_and_a_newcomer_gets_a_snapshot(serve: Serve) -> None:
    client, router = serve()
    seqs = []
    for number in range(3):
        blocks = EngineBlocks(hashes(10 * number, 2), 16)
        client.store(keys(10 * number, 2), [bytes(4096)] * 2, namespace=SPACE, blocks=blocks)
        seqs.append(router.batch()[0])
    assert seqs == list(range(seqs[0], seqs[0] + 3)), "no number is left out"
    again = router.ask(seqs[1].to_bytes(8, "big"))
    assert [seq for seq, _ in again] == seqs[1:]
    assert again[0][1][0]["block_hashes"] == [low(each) for each in hashes(10, 2)]
    assert router.ask((1 << 40).to_bytes(8, "big")) == []
    there = router.ask(SNAPSHOT)
    assert {seq for seq, _ in there} == {seqs[-1]}
    told = {each for _, events in there for event in events for each in event["block_hashes"]}
    assert told >= {low(each) for number in range(3) for each in hashes(10 * number, 2)}


def test_older_consumers_read_arrays_with_hashes_as_bytes(serve: Serve) -> None:
    client, router = serve(format="array", hashes="bytes", dp_rank=0)
    tokens = list(range(32))
    blocks = EngineBlocks(hashes(0, 2), 16, token_ids=tokens)
    client.store(keys(0, 1), [bytes(4096)], namespace=SPACE, blocks=blocks)
    _, events, rank = router.batch()
    assert (events, rank) == ([["BlockStored", hashes(0, 2), None, tokens, 16, None, "CPU", None]], 0)
    client.clear(SPACE)
    assert router.batch()[1] == [["BlockRemoved", hashes(0, 2), "CPU"]]


def test_tokens_can_be_left_out_and_are_never_logged(serve: Serve) -> None:
    client, router = serve(token_ids=False)
    blocks = EngineBlocks(hashes(0, 1), 4, token_ids=[7, 8, 9, 10])
    client.store(keys(0, 1), [bytes(4096)], namespace=SPACE, blocks=blocks)
    assert router.until("BlockStored")["token_ids"] == []
    event = BlocksReported(at_s=1.0, namespace=1, keys=keys(0, 1), hashes=hashes(0, 1), parent=None, media=b"\1",
                           block_size=4, lora_id=None, lora_name=None, group=None, token_ids=[7, 8, 9, 10])  # fmt: skip
    assert "token_ids" not in plain(event), "no file and no stream has them"


def test_a_bus_that_was_full_has_routers_begin_anew(tmp_path: Path) -> None:
    heard: list[CacheEvent] = []

    full = threading.Event()

    class Hears(EventSubscriber):
        def hear(self, events):  # type: ignore[no-untyped-def]
            heard.extend(events)
            full.wait()

    class One:
        key, namespace, nbytes = bytes(32), 1, 1

    bus = EventBus({"one": Hears()}, 2, Clock())
    for _ in range(200):
        bus.emit(of_objects, ObjectsAdmitted, [One()], keeps=1)
    full.set()
    end = time.monotonic() + 60
    while bus.status()["queue"] or not heard:
        assert time.monotonic() < end
        time.sleep(0.01)
    bus.check()
    bus.close()
    assert sum(event.events for event in heard if isinstance(event, EventsMissed)) == bus.dropped > 0
    kv = KvEvents(KvEventsSettings.model_validate(settings_of(tmp_path)), SubscriberContext("n", tmp_path))
    router = Router(tmp_path)
    kv.hear([EventsMissed(at_s=1.0, events=3)])
    assert router.ask((0).to_bytes(8, "big")) == [(0, [{"type": "AllBlocksCleared"}])]
    kv.close()
    router.close()


def while_answering(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Something happens while the publisher's thread makes the answer to a snapshot."""
    encode = publisher.encode_batch

    def encoding(*arguments: Any) -> bytes:
        if threading.current_thread().name == "lmcache-kv-events":
            happens()
        return encode(*arguments)

    monkeypatch.setattr(publisher, "encode_batch", encoding)


def test_what_is_new_is_published_between_two_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KvEvents(KvEventsSettings.model_validate(settings_of(tmp_path)), SubscriberContext("n", tmp_path))
    router = Router(tmp_path)
    asked, told = threading.Event(), threading.Event()

    def something_new() -> None:
        asked.set()
        assert told.wait(60)

    kv.hear([EventsMissed(at_s=1.0, events=3)])
    assert len(router.ask(bytes(8))) == 1
    while_answering(monkeypatch, something_new)
    for what in (SNAPSHOT, bytes(8), bytes(8)):
        router.dealer.send_multipart([b"", what])
    assert asked.wait(60)
    kv.hear([EventsMissed(at_s=1.0, events=3)])
    told.set()
    answers = []
    for _ in range(3):
        answers.append(0)
        while router.dealer.poll(WAIT_MS) and router.dealer.recv_multipart()[2] != END:
            answers[-1] += 1
    kv.close()
    router.close()
    assert answers == [1, 2, 2]


def test_a_publisher_that_has_failed_is_put_aside_and_status_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = KvEvents(KvEventsSettings.model_validate(settings_of(tmp_path)), SubscriberContext("n", tmp_path))
    bus = EventBus({"kv_events": kv}, 10, Clock())
    router = Router(tmp_path)

    def fail() -> None:
        raise OSError(24, "Too many open files")

    while_answering(monkeypatch, fail)
    router.dealer.send_multipart([b"", SNAPSHOT])
    until(lambda: bus.emit(one, EventsMissed, events=1) or bus.status()["subscribers"]["kv_events"]["disabled"])
    assert "Too many open files" in bus.status()["subscribers"]["kv_events"]["disabled"]
    bus.close()
    router.close()


def test_a_port_that_is_taken_is_refused_with_the_settings_to_change(tmp_path: Path) -> None:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        port = there.getsockname()[1]
        taken = KvEventsSettings(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None)
        with pytest.raises(SettingsError, match="choose another"):
            KvEvents(taken, SubscriberContext("n", tmp_path))


def test_each_data_parallel_rank_has_addresses_of_its_own() -> None:
    assert offset_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert offset_endpoint("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"


def test_an_endpoint_takes_ipv6() -> None:
    assert KvEventsSettings(endpoint="tcp://[::1]:5557").endpoint == "tcp://[::1]:5557"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://[::1]:0", "ipc://relative"])
def test_an_endpoint_must_be_one_that_routers_can_know(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"port from 1|ipc:///PATH"):
        KvEventsSettings(endpoint=endpoint)


def test_a_forked_child_closes_at_once_and_the_parent_goes_on(tmp_path: Path) -> None:
    kv = KvEvents(KvEventsSettings.model_validate(settings_of(tmp_path)), SubscriberContext("n", tmp_path))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        began = time.monotonic()
        kv.close()
        os._exit(time.monotonic() - began > 0.5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    router = Router(tmp_path)
    kv.hear([EventsMissed(at_s=1.0, events=3)])
    assert len(router.ask(bytes(8))) == 1
    kv.close()
    router.close()


def report(number: int, media: bytes) -> BlocksReported:
    """Of an object with 400 blocks."""
    return BlocksReported(
        at_s=1.0, namespace=1, keys=keys(number, 1), hashes=hashes(number, 400), parent=None,
        media=media, block_size=4, lora_id=None, lora_name=None, group=None, token_ids=[],
    )  # fmt: skip


@pytest.mark.parametrize(("cap", "media"), [("PENDING_BYTES_MAX", b"\0"), ("KNOWN_BYTES_MAX", b"\1")])
def test_what_engines_report_is_bounded_in_bytes_whether_it_is_stored_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: str, media: bytes
) -> None:
    """Engines decide how large a report is: three of these fit."""
    monkeypatch.setattr(subscriber, cap, 100_000)
    settings = KvEventsSettings(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=None)
    kv = KvEvents(settings, SubscriberContext("bounded", tmp_path))
    try:
        for number in range(5):
            kv.hear([report(number, media)])
        assert [key for _, key in kv._known] == keys(2, 3)
        assert kv._known_bytes == sum(known.blocks.nbytes for known in kv._known.values())
    finally:
        kv.close()


def test_batches_for_replays_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "KEPT_BYTES_MAX", 20_000)
    kv = KvEvents(KvEventsSettings.model_validate(settings_of(tmp_path)), SubscriberContext("n", tmp_path))
    router = Router(tmp_path)
    for number in range(30):  # 400 hashes of at most 9 bytes each
        kv.hear([report(number, b"\1")])
    until(lambda: [seq for seq, _ in router.ask(bytes(8))][-1:] == [29])
    replayed = router.ask(bytes(8))
    assert [seq for seq, _ in replayed] == list(range(30 - len(replayed), 30))
    assert 3 <= len(replayed) <= 5
    kv.close()
    router.close()


def test_check_names_the_endpoint_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        (taken,) = check(KvEventsSettings(endpoint="ipc:///run/kv", replay_endpoint=endpoint))
        assert not taken.ok
        assert taken.cure.startswith("set subscribers.kv_events.replay_endpoint to a free port")
    (free,) = check(KvEventsSettings(endpoint=endpoint, replay_endpoint=None))
    assert free.ok
