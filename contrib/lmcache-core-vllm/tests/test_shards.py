"""KV in shards of heads: which numbers will do, where a shard lies, and that ranks of any number find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from lmcache_core.errors import SettingsError, UsageError
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.shards import check_shards, cut, held, parts_of
from lmcache_core_vllm.steps import Blocks, Load, Step
from lmcache_core_vllm.tensors import layer_regions
from lmcache_core_vllm.worker import WorkerSide
from lmcache_testing.processes import ServerProcess

torch = pytest.importorskip("torch")
BLOCKS, HEADS, TOKENS, CONTENT = 8, 4, 16, 32
HASHING = Hashing("sha256", "0")
SETTINGS = ConnectorConfig(step_wait_s=20, load_timeout_s=20, lookup_timeout_s=20, store_cpu_share=100)
FULL = [Group(0, Kind.FULL, TOKENS, 1)]


@dataclass
class Spec:
    num_kv_heads: int
    page_size_padded: int | None = None


class LatentMLASpec(Spec):
    """Named as vLLM names those of latent attention."""


@pytest.mark.parametrize(("shards", "heads", "ranks"), [(4, 4, 1), (4, 4, 2), (4, 4, 4), (2, 8, 1), (8, 8, 2)])
def test_shards_divide_the_heads_and_are_a_multiple_of_the_ranks(shards: int, heads: int, ranks: int) -> None:
    check_shards(shards, heads, ranks, FULL, [Spec(heads // ranks)])
    numbers = [held(shards, ranks, rank) for rank in range(ranks)]
    assert numbers[0].start == 0
    assert numbers[-1].stop == shards
    assert all(one.stop == other.start for one, other in pairwise(numbers))


@pytest.mark.parametrize(
    ("shards", "heads", "ranks", "groups", "spec", "why"),
    [
        (3, 4, 1, FULL, Spec(4), "kv_shards is 3.*4 KV heads.*multiple of tensor_parallel_size 1: give 1 or 2 or 4"),
        (2, 4, 4, FULL, Spec(1), "multiple of tensor_parallel_size 4: give 4"),
        (8, 4, 2, FULL, Spec(2), "give 2 or 4"),
        (4, 2, 4, FULL, Spec(1), "several ranks hold the same head"),
        (4, 4, 1, [Group(0, Kind.STATE, 16, 1)], Spec(4), "states are not made of KV heads"),
        (4, 4, 1, FULL, Spec(2), "not 4 KV heads over 1 ranks"),
        (4, 4, 1, FULL, Spec(4, 4096), "leave it out"),
        (4, 4, 1, FULL, LatentMLASpec(4), "LatentMLASpec"),
        (4, 4, 1, FULL, object(), "leave it out"),
    ],
)
def test_others_are_refused_in_a_sentence(
    shards: int, heads: int, ranks: int, groups: list[Group], spec: Any, why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        check_shards(shards, heads, ranks, groups, [spec])


def regions(tensor: Any) -> Any:
    return layer_regions(["a"], {"a": tensor}, BLOCKS)


@pytest.mark.parametrize(
    ("tensor", "backend"),
    [
        (torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT), "FLASH_ATTN/"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT), ""),
        (torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT).transpose(1, 2), "CPU_ATTN/vec"),
        (torch.zeros(2 * BLOCKS, HEADS, TOKENS, CONTENT), "CPU_ATTN/vec"),
        (torch.zeros(BLOCKS, 3, TOKENS, CONTENT), "CPU_ATTN/vec"),
        (torch.zeros(BLOCKS, HEADS * TOKENS * CONTENT), "CPU_ATTN/vec"),
    ],
    ids=["another backend", "no backend", "tokens before heads", "kernel blocks", "too few heads", "opaque"],
)
def test_blocks_that_are_not_heads_in_a_row_are_refused(tensor: Any, backend: str) -> None:
    with pytest.raises(UsageError, match=r"kv_shards: .*leave it out"):
        cut(regions(tensor), 2, [backend])


class Rank:
    """One of several tensor-parallel ranks, with its heads of a memory that all of them have in common."""

    def __init__(self, server: ServerProcess, memory: Any, ranks: int, rank: int) -> None:
        each = HEADS // ranks
        self.memory = memory[:, rank * each : (rank + 1) * each].clone()
        layers = regions(self.memory)
        block_bytes = sum(region.page_bytes for layer in layers for region in layer.regions)
        groups = (GroupFacts((("backend", "CPU_ATTN/vec"),), block_bytes, "float32"),)
        parts = parts_of(RankFacts("m", "", (rank, ranks), True, groups), [layers], 4, ranks)
        self.client = server.client()
        self.side = WorkerSide(SETTINGS, self.client, *parts[0], more_shards=parts[1:], ranks=ranks)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(64 << 20) as process:
        yield process


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_what_some_ranks_stored_others_read(server: ServerProcess, writers: int, readers: int) -> None:
    with server.client() as client:
        client.clear()
    memory = torch.rand(BLOCKS, HEADS, TOKENS, CONTENT)
    hashes = [bytes([at]) * 32 for at in range(3)]
    stored, found = [], []
    for number in range(writers):
        writer = Rank(server, memory, writers, number)
        writer.side.save(Step(HASHING, saves=[Blocks(0, hashes, [1, 5, 2])]))
        for each in writer.side.saving:
            each.job.wait()
        writer.side.hear_saves()
        stored.append(writer.side.counters.take()["save_blocks"])
        writer.client.close()
    assert sum(stored) == 3 * 4  # an object for each shard of each block
    for number in range(readers):
        reader = Rank(server, torch.zeros_like(memory), readers, number)
        reader.side.start_loads(Step(HASHING, loads=[Load("a", False, [Blocks(0, hashes, [7, 3, 4])])]))
        for loading in reader.side.loading.values():
            assert loading.job is not None
            loading.job.wait()
        assert reader.side.arrived((), idle=True).failed == set()
        found.append(reader.memory)
        reader.client.close()
    assert torch.equal(torch.cat(found, dim=1)[[7, 3, 4]], memory[[1, 5, 2]])
    assert not torch.cat(found, dim=1)[[0, 1, 2, 5, 6]].any()


def test_a_block_of_which_one_shard_is_gone_is_computed(server: ServerProcess) -> None:
    with server.client() as client:
        client.clear()
    rank = Rank(server, torch.rand(BLOCKS, HEADS, TOKENS, CONTENT), 2, 1)
    hashes = [bytes([at]) * 32 for at in range(2)]
    rank.side.save(Step(HASHING, saves=[Blocks(0, hashes, [1, 2])]))
    for each in rank.side.saving:
        each.job.wait()
    space = rank.side.namespaces[1]
    keys = HASHING.keys(hashes[1:], space)
    incarnations = rank.client.lookup(keys, namespace=space, identify=True).incarnations
    assert rank.client.drop(keys, namespace=space, incarnations=incarnations) == 1
    rank.side.start_loads(Step(HASHING, loads=[Load("a", False, [Blocks(0, hashes, [3, 4])])]))
    for loading in rank.side.loading.values():
        assert loading.job is not None
        loading.job.wait()
    arrived = rank.side.arrived((), idle=True)
    assert (arrived.failed, arrived.invalid) == ({"a"}, {4})
    rank.client.close()
