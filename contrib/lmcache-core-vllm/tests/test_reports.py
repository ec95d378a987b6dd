"""The reports of an engine's blocks that routers get, through a real server, without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from lmcache_core.client.client import Client
from lmcache_core.server.server import Server
from lmcache_core_vllm import messages
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.messages import Messages
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts, namespaces_of
from lmcache_core_vllm.reports import Reports
from lmcache_testing.embedded import Json

HASHING = Hashing("sha256", "0")
FULL, WINDOW = Group(0, Kind.FULL, 32, 2), Group(1, Kind.WINDOW, 16, 1, 33)
SPACES = namespaces_of(RankFacts("m", "", (0, 1), True, (GroupFacts((), 4096), GroupFacts((("1", ""),), 4096))), "")
HASHES = [bytes([number]) * 32 for number in range(1, 13)]


@dataclass
class Request:
    block_hashes: list[bytes] = field(default_factory=lambda: HASHES)
    all_token_ids: list[int] = field(default_factory=lambda: list(range(12 * 16)))
    lora_request: object = None


@pytest.fixture
def server(start: Callable[..., Server], tmp_path: Path) -> Server:
    table = {"endpoint": f"ipc://{tmp_path}/kv", "replay_endpoint": f"ipc://{tmp_path}/kr", "token_ids": True}
    return start(l1={"backing": "memfd"}, subscribers={"kv_events": table | {"hashes": "bytes"}})


def told(server: Server, count: int) -> list[Json]:
    """The first so many events."""
    heard: list[Json] = []
    deadline = time.monotonic() + 60
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.parts.settings.subscribers["kv_events"].replay_endpoint)
        while len(heard) < count:
            assert time.monotonic() < deadline, f"only {heard}"
            dealer.send_multipart([b"", bytes(8)])
            heard = []
            while (frames := dealer.recv_multipart())[2] != b"\xff" * 8:
                heard += msgspec.msgpack.decode(frames[3])[1]
    return heard


def reports(client: Client, token_ids: bool = False) -> Reports:
    return Reports(client, Messages(client), lambda: HASHING, token_ids)


def store(client: Client, group: Group, blocks: list[int]) -> None:
    space = SPACES[group.number]
    keys = HASHING.keys(group.block_hashes(HASHES, blocks), space)
    assert client.store(keys, [bytes(4096)] * len(keys), namespace=space).stored == len(keys)


def test_each_run_of_blocks_is_told_with_the_block_before_it(server: Server) -> None:
    with server.connect() as client:
        client.ping()
        telling = reports(client)
        assert telling.tell(Request(), WINDOW, [0, 1, 4, 5, 9], SPACES[1]) == 0
        store(client, WINDOW, [0, 1, 4, 5, 9])
        runs = told(server, 3)
        assert [each["block_hashes"] for each in runs] == [HASHES[0:2], HASHES[4:6], HASHES[9:10]]
        assert [each["parent_block_hash"] for each in runs] == [None, HASHES[3], HASHES[8]]
        assert {(each["block_size"], each["group_idx"], each["medium"], each["lora_name"]) for each in runs} == {
            (16, 1, "CPU", None)
        }


def test_a_group_of_larger_blocks_has_the_hash_of_each_blocks_end_and_the_adapter(server: Server) -> None:
    with server.connect() as client:
        client.ping()
        adapter = SimpleNamespace(adapter_id=7, name="tuned")
        reports(client, token_ids=True).tell(Request(lora_request=adapter), FULL, [2, 3], SPACES[0])
        store(client, FULL, [2, 3])
        (event,) = told(server, 1)
        assert event["block_hashes"] == [HASHES[5], HASHES[7]]
        assert event["parent_block_hash"] == HASHES[3]
        assert (event["lora_id"], event["lora_name"], event["block_size"]) == (7, "tuned", 32)
        assert event["token_ids"] == list(range(64, 128))


def test_tokens_are_told_only_if_the_engine_says_so(server: Server) -> None:
    with server.connect() as client:
        client.ping()
        reports(client).tell(Request(), FULL, [0], SPACES[0])
        store(client, FULL, [0])
        assert told(server, 1)[0]["token_ids"] == []


@dataclass
class Slow:
    """A server that hears of one report, and no more for now."""

    wants_blocks: bool = True
    calls: list[object] = field(default_factory=list)
    answer: Callable[[], object] = lambda: None

    def report_block_allocation(self, keys: object, blocks: object, *, namespace: object) -> int:
        self.calls.append(keys)
        self.answer()
        return len(keys)


def test_a_server_that_is_far_behind_is_not_told_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    client: Any = Slow(answer=lambda: go_on.wait(60))
    monkeypatch.setattr(messages, "REPORTS_WAITING_MAX", 3)
    telling = reports(client)
    untold = [telling.tell(Request(), FULL, [0, 1], SPACES[0]) for _ in range(10)]
    assert untold[:3] == [0, 0, 0]
    assert untold[-5:] == [2] * 5
    go_on.set()


def test_a_server_that_does_not_ask_is_told_nothing() -> None:
    client: Any = Slow(wants_blocks=False)
    assert reports(client).tell(Request(), FULL, [0, 1], SPACES[0]) == 0
    assert client.calls == []


def test_a_client_knows_whether_its_server_asks_for_blocks(server: Server, start: Callable[..., Server]) -> None:
    with server.connect() as client:
        client.ping()
        assert client.wants_blocks
    with start(l1={"size_bytes": 4 << 20, "backing": "memfd"}).connect() as client:
        assert not client.wants_blocks
        client.ping()
        assert not client.wants_blocks


def test_labels_say_model_dtypes_weights_shard_and_group() -> None:
    facts = (("cache_dtype", "fp8"), ("dtype", "torch.bfloat16"))
    groups = (GroupFacts(facts, 4096), GroupFacts((*facts, ("layers", "2")), 4096))
    spaces = namespaces_of(RankFacts("/models/llama-3-8b", "rev1", (1, 2), True, groups), "salt")
    whole = [each.public_label for each in spaces]
    assert whole == [f"/models/llama-3-8b/bfloat16/fp8@rev1 1/2 group {number}" for number in (0, 1)]
    (plain,) = namespaces_of(RankFacts("m\x1b", "", (0, 1), True, (GroupFacts((("cache_dtype", "auto"),), 4096),)), "")
    assert plain.public_label == "m_"
