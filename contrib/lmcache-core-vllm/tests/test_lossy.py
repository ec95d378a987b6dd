"""Serdes that round values, over blocks of an engine's shape: what is KV goes through them, and what is not is refused
before anything is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core_vllm.checking import server_findings
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.steps import Blocks, Load, Step
from lmcache_core_vllm.tensors import dtype_of, layer_regions
from lmcache_core_vllm.worker import WorkerSide
from lmcache_testing.embedded import embedded_server

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_fp8")
pytest.importorskip("lmcache_fs")
BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 8, 2, 16, 2 * 64, 3
GROUP = 128  # values that share a scale
HASHING = Hashing("sha256", "0")
SETTINGS = ConnectorConfig(step_wait_s=20, load_timeout_s=20, lookup_timeout_s=20)


@pytest.fixture
def rank_of(server: Server) -> Iterator[Callable[..., Rank]]:
    """Make a rank, which is closed at the end."""
    with ExitStack() as stack:

        def make(dtype: Any, *shape: int) -> Rank:
            rank = Rank(server, dtype, shape or (HEADS, TOKENS, CONTENT))
            stack.callback(rank.side.close)
            return rank

        yield make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    tier = {"type": "fs", "path": str(tmp_path / "kv"), "serde": ["fp8"]}
    with embedded_server(tmp_path, load_plugins(), l2={"disk": tier}) as server:
        yield server


class Rank:
    """A worker whose layers lie as vLLM's do: blocks, heads, tokens, keys and values."""

    def __init__(self, server: Server, dtype: Any, shape: tuple[int, ...]) -> None:
        names = [f"layer.{at}" for at in range(LAYERS)]
        self.memory = {name: torch.randn((BLOCKS, *shape)).mul(at + 1).to(dtype) for at, name in enumerate(names)}
        layers = layer_regions(names, self.memory, BLOCKS)
        nbytes = sum(region.page_bytes for layer in layers for region in layer.regions)
        facts = RankFacts("m", "", (0, 1), True, (GroupFacts((), nbytes, dtype_of(layers)),))
        self.client = server.connect()
        self.side = WorkerSide(SETTINGS, self.client, facts, [layers])
        (self.namespace,) = self.side.namespaces
        self.hashes = [bytes([at]) * 32 for at in range(4)]

    def save(self, ids: list[int]) -> dict[str, float]:
        self.side.save(Step(HASHING, saves=[Blocks(0, self.hashes, ids)]))
        for each in self.side.saving:
            each.job.wait()
        self.side.save(Step(HASHING))
        return self.side.counters.take()

    def load(self, ids: list[int]) -> set[int]:
        self.side.start_loads(Step(HASHING, loads=[Load("a", False, [Blocks(0, self.hashes, ids)])]))
        for loading in self.side.loading.values():
            if loading.job is not None:
                loading.job.wait()
        return self.side.arrived((), idle=True).invalid


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_blocks_of_an_engine_go_through_a_lossy_tier_and_come_back_within_its_bound(
    rank_of: Callable[..., Rank], dtype: str
) -> None:
    rank = rank_of(getattr(torch, dtype))
    assert rank.namespace.layout.dtype == dtype
    assert rank.save([1, 3, 2, 6])["save_blocks"] == 4
    keys = HASHING.keys(rank.hashes, rank.namespace)
    stored = rank.client.wait_stored(keys, namespace=rank.namespace, timeout_s=20)
    assert all(each.stored for each in stored)
    before = {name: each[[1, 3, 2, 6]].float() for name, each in rank.memory.items()}
    for each in rank.memory.values():
        each.zero_()
    rank.client.clear(rank.namespace)
    assert rank.client.lookup(keys, namespace=rank.namespace, wait_s=20).hits == 4
    assert rank.load([4, 5, 6, 7]) == set()
    changed = 0
    for name, each in rank.memory.items():
        was, now = before[name].reshape(-1, GROUP), each[[4, 5, 6, 7]].float().reshape(-1, GROUP)
        most = was.abs().amax(dim=1, keepdim=True)
        assert bool(((now - was).abs() <= (2**-4 + 2**-8) * was.abs() + 2.2e-6 * most).all())
        changed += int((now != was).sum())
    assert changed  # or nothing has been rounded


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_blocks_whose_values_nobody_names_are_refused_once_and_in_words(
    rank_of: Callable[..., Rank], dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """States, and KV that the engine has quantised itself."""
    with caplog.at_level(logging.WARNING):
        rank = rank_of(getattr(torch, dtype), 1, 1, 4096)
        for _ in range(2):
            assert rank.save([1, 3, 2, 6]) == {"save_dropped_blocks": 4}
    (refused,) = [each for each in caplog.messages if each.startswith("nothing of m can be cached")]
    assert "tier 'disk' cannot store objects of uint8[12288]: fp8 takes bfloat16, float16, float32" in refused
    assert refused.endswith("change l2.disk.serde, or register a layout with the dtype of the values")
    assert len([each for each in caplog.messages if "are not stored" in each]) == 1
    assert not [each for each in caplog.records if each.exc_info]
    found = [each for each in server_findings(rank.client.status()) if not each.ok]
    assert [(each.subject, each.cure) for each in found] == [
        ("namespace m", "change l2.disk.serde, or register a layout with the dtype of the values")
    ]
