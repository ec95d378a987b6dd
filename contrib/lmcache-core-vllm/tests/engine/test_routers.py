"""What the server publishes for routers, read with vLLM's own structs beside what the engine publishes of itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from vllm_engines import Engine, Server, prompt, save_adapter, save_model

from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

BLOCK = 128


class Told(NamedTuple):
    """A block, as a router knows it."""

    block_hash: int
    parent: int | None
    block_size: int
    lora_id: int | None
    lora_name: str | None
    group: int | None


@dataclass
class Router:
    """Asks a replay endpoint for all batches, and keeps what was told of each medium."""

    endpoint: str
    stored: dict[str, set[Told]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    def hear(self) -> None:
        from vllm.distributed import kv_events

        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(self.endpoint)
        dealer.send_multipart([b"", bytes(8)])
        try:
            while True:
                assert dealer.poll(60_000), "the replay did not end"
                _, _, seq, payload = dealer.recv_multipart()
                if seq == kv_events.ZmqEventPublisher.END_SEQ:
                    return
                for event in msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch).events:
                    if isinstance(event, kv_events.BlockStored):
                        self._take(event)
        finally:
            context.destroy(linger=0)

    def _take(self, event: Any) -> None:
        self.token_ids += event.token_ids
        parents = [event.parent_block_hash, *event.block_hashes]
        for each, parent in zip(event.block_hashes, parents, strict=False):
            told = Told(each, parent, event.block_size, event.lora_id, event.lora_name, event.group_idx)
            self.stored.setdefault(event.medium, set()).add(told)


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], sockets: Path) -> Server:
    return serve(*telling(sockets), "--subscribers.kv_events.token_ids", "true")


def telling(sockets: Path) -> list[str]:
    """For a server to publish its blocks."""
    table = "--subscribers.kv_events."
    return [f"{table}endpoint", f"ipc://{sockets}/s", f"{table}replay_endpoint", f"ipc://{sockets}/sr"]


def own_events(sockets: Path, name: str) -> Json:
    """For the engine to publish its own blocks, too."""
    endpoints = {"endpoint": f"ipc://{sockets}/{name}", "replay_endpoint": f"ipc://{sockets}/{name}r"}
    return {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}}


def both(sockets: Path, name: str, count: int) -> tuple[set[Told], set[Told], list[int]]:
    """What the engine and what the server has told, once the server has told of so many blocks; and the tokens that it
    has told."""
    heard: list[Router] = []

    def enough() -> bool:
        heard[:] = [Router(f"ipc://{sockets}/{name}r"), Router(f"ipc://{sockets}/sr")]
        for each in heard:
            each.hear()
        return len(heard[1].stored.get("CPU", ())) >= count

    until(enough)
    return heard[0].stored["GPU"], heard[1].stored["CPU"], heard[1].token_ids


def test_what_is_stored_is_told_under_the_engines_own_hashes(
    start: Callable[..., Engine], llama: Path, server: Server, sockets: Path, tmp_path: Path
) -> None:
    options = {"enable_lora": True, "max_lora_rank": 8, "max_num_batched_tokens": 256}
    engine = start(llama, server.settings(), **options, **own_events(sockets, "e"))
    tokens = prompt(1, 700)
    engine.generate(tokens)
    engine.generate(tokens[:300] + prompt(2, 300))  # what it begins with is the engine's by now
    adapter = save_adapter(tmp_path / "adapter", 5)
    engine.run(f"from vllm.lora.request import LoRARequest\nadapter = LoRARequest('tuned', 1, {adapter!r})")
    engine.run(f"said = generate([{tokens!r}], 12, lora=adapter)")
    engine.saved()
    own, told, token_ids = both(sockets, "e", 12)
    assert told == own
    assert len(told) == 5 + 2 + 5
    assert {each.group for each in told} == {0}
    assert {(each.lora_id, each.lora_name) for each in told} == {(None, None), (1, "tuned")}
    assert token_ids[: 5 * 128] == tokens[: 5 * 128]  # by default, as routers index by them
    engine.end()


@pytest.mark.slow
def test_blocks_of_several_groups_are_told_with_their_group_and_their_parent(
    start: Callable[..., Engine], serve: Callable[..., Server], tmp_path: Path
) -> None:
    """Of a sliding window vLLM keeps for itself what a hit at the end of the prompt needs, and tells of the first of
    those blocks as if none came before it. Ours keeps every block, for hits at any boundary, and tells the true parent.
    """
    changes = {"sliding_window": 256, "query_pre_attn_scalar": 64, "num_hidden_layers": 6, "config": "Gemma3Text"}
    model = save_model(tmp_path / "gemma3", "Gemma3", **changes)
    server = serve(*telling(tmp_path))
    engine = start(model, server.settings(), **own_events(tmp_path, "g"))
    engine.generate(prompt(3, 900))
    engine.saved()
    own, told, _ = both(tmp_path, "g", 6 * 7)
    full = max(each.group or 0 for each in own)
    assert full == 5
    assert {each for each in told if each.group == full} == {each for each in own if each.group == full}
    prefix = {each._replace(group=0) for each in told if each.group == full}
    assert len(prefix) == 7
    for group in range(full):
        assert {each._replace(group=0) for each in told if each.group == group} == prefix
    assert {(each.group, each.block_hash) for each in own} < {(each.group, each.block_hash) for each in told}
    with server.client() as client:
        assert client.status()["l1"]["objects_by_state"]["ready"] == len(told)
    engine.end()


@pytest.mark.slow
def test_after_a_restart_the_engine_reports_again_what_the_new_server_adopted(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    """A server knows nothing of the hashes that the one before it was told: its stream begins with what engines say of
    blocks that they find there, once they are connected to it."""
    server, tokens = serve(*telling(tmp_path)), prompt(4, 700)
    engine = start(llama, server.settings(), **own_events(tmp_path, "r"))
    engine.generate(tokens)
    engine.saved()
    own, told, _ = both(tmp_path, "r", 5)
    assert told == own
    server.signal(signal.SIGKILL)
    server.end()
    server.start()
    with server.client() as client:
        assert client.status()["l1"]["objects_by_state"]["ready"] == 5  # adopted
    new = Router(f"ipc://{tmp_path}/sr")
    new.hear()
    assert new.stored == {}

    def told_again() -> bool:
        engine.forget()
        assert engine.generate(tokens)[0]["cached"] == 5 * BLOCK  # at first by the pool alone, which has a new owner
        again = Router(f"ipc://{tmp_path}/sr")
        again.hear()
        return again.stored.get("CPU") == own

    until(told_again)
    engine.end()
