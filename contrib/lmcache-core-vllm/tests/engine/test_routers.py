"""What the server publishes for routers, read with vLLM's own structs beside what the engine publishes of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from vllm_engines import Engine, Server, prompt, save_adapter, until

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
    table = "--subscribers.kv_events."
    endpoints = [f"{table}endpoint", f"ipc://{sockets}/s", f"{table}replay_endpoint", f"ipc://{sockets}/sr"]
    return serve(*endpoints, f"{table}token_ids", "true")


def own_events(sockets: Path, name: str) -> dict[str, Any]:
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
    assert token_ids == []  # the server would pass them on; the engine does not say them
    engine.end()
