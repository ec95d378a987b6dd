"""The server's KV events, read by vLLM's own structs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

kv_events = pytest.importorskip("vllm.distributed.kv_events")

SPACE = Namespace("kv", Layout("uint8", (4096,)))


def test_vllm_reads_what_the_server_publishes(start: Callable[..., Server], tmp_path: Path) -> None:
    table = {"endpoint": f"ipc://{tmp_path}/kv", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    hashes = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
    context = zmq.Context()
    server = start(l1={"backing": "memfd"}, subscribers={"kv_events": table})
    with server.connect() as client:
        blocks = EngineBlocks(hashes, 16, lora_name="tuned", group=0)
        assert client.store(hashes, [bytes(4096)] * 4, namespace=SPACE, blocks=blocks).stored == 4
        client.clear(SPACE)
        router = context.socket(zmq.DEALER)
        router.connect(table["replay_endpoint"])
        heard: list[object] = []
        while len(heard) < 2:
            router.send_multipart([b"", len(heard).to_bytes(8, "big")])
            while True:
                assert router.poll(60_000)
                _, _, seq, payload = router.recv_multipart()
                if seq == kv_events.ZmqEventPublisher.END_SEQ:
                    break
                events = kv_events.BlockStored | kv_events.BlockRemoved | kv_events.AllBlocksCleared
                batch = msgspec.msgpack.decode(payload, type=kv_events.EventBatch)
                heard += msgspec.convert(batch.events, list[events])
        context.destroy(linger=0)
    stored, removed = heard[:2]
    assert isinstance(stored, kv_events.BlockStored)
    assert isinstance(removed, kv_events.BlockRemoved)
    ints = [int.from_bytes(each, "big") & (1 << 64) - 1 for each in hashes]
    assert stored.block_hashes == ints
    assert (stored.medium, stored.lora_name, stored.group_idx) == (kv_events.MEDIUM_CPU, "tuned", 0)
    assert sorted(removed.block_hashes) == sorted(ints)
