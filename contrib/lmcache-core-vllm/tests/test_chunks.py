"""Documents stored as chunks, without vLLM: which are refused, how blocks are read, and what a stuck server costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core import Layout
from lmcache_core.client.client import Client
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core_vllm.chunks import STORES_WAITING_MAX, ChunkOffers, ChunkStores, Shape, places_of
from lmcache_core_vllm.counters import Counters
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, RankFacts
from lmcache_core_vllm.steps import ChunkSave
from lmcache_testing.processes import ServerProcess

torch = pytest.importorskip("torch")
blend = pytest.importorskip("lmcache_blend")
pytest.importorskip("lmcache_blend._native", reason="built without C")

from lmcache_blend.described import DescribedChunks  # noqa: E402

LAYERS, HEADS, SIZE, BLOCK, FRONT = 3, 2, 8, 4, (7, 9)
GROUP = Group(0, Kind.FULL, BLOCK, 1)
FACTS = RankFacts("Tiny", "version", (0, 1), True, (GroupFacts((), LAYERS * HEADS * BLOCK * 2 * SIZE * 4, "float32"),))
CONFIG = {"layers": LAYERS, "rope": {"theta": 100.0}, "_name_or_path": "here"}
SHAPE = Shape(LAYERS, HEADS, SIZE)
ROPE = blend.Rope(100.0, 6, False, (1.0, 0.3, 0.01))


def layout_of(tokens: int) -> Layout:
    return Layout("float32", (LAYERS, 2, HEADS, tokens, SIZE), "LKHTD")


def space(**changes: Any) -> Any:
    own = {"lengths": blend.Lengths(8, 16, 32), "step_tokens": 8, "prefix_tokens": FRONT, "weights_version": "version"}
    return blend.ChunkSpace("Tiny", layout_of, ROPE, **{**own, **changes})


def described(path: Path, client: Client, config: dict[str, Any] = CONFIG, **changes: Any) -> Any:
    chunks = blend.Chunks(client, space(**changes))
    DescribedChunks.of(chunks, config=config, extra=b"weights").write(path)
    return chunks


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(64 << 20) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


def request(tokens: list[int], **changes: Any) -> Any:
    own = {"all_token_ids": [*tokens, 1, 2], "num_prompt_tokens": len(tokens), "lora_request": None, "mm_features": []}
    return SimpleNamespace(**own, **changes)


def offer(
    path: Path, asked: Any, config: Any = CONFIG, shape: Any = SHAPE, groups: Any = (GROUP,), shard: Any = FACTS
) -> ChunkSave:
    return ChunkOffers(str(path) if path.name else "", config, shape).offer(asked, groups, [shard], [*range(1, 20)])


def test_a_document_is_offered_with_the_blocks_of_its_prompt(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    described(path, client)
    found = offer(path, request([*FRONT, *range(10, 21)]))
    assert (found.tokens, found.block_ids) == ([*FRONT, *range(10, 21)], [1, 2, 3, 4])
    assert path.stat().st_mode & 0o077 == 0
    longest = request([*FRONT, *range(32)])
    assert len(offer(path, longest, {**CONFIG, "_name_or_path": "elsewhere", "more": 1}).tokens) == 34


def test_what_is_no_document_of_this_engine_is_refused_in_words(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    described(path, client)
    good = [*FRONT, *range(10, 21)]
    for asked, says in (
        (request([9, 7, *range(10, 21)]), "does not begin with the 2 prefix tokens"),
        (request([*FRONT, *range(33)]), "has 33 tokens, and chunks have 1 to 32: cut it"),
        (request([*FRONT]), "has 0 tokens"),
        (request(good).__class__(**{**vars(request(good)), "lora_request": object()}), "has an adapter"),
        (request(good, cache_salt="tenant"), "has a salt of its own"),
        (request(good, prompt_embeds=torch.zeros(2, 2)), "has embeddings"),
    ):
        with pytest.raises(UsageError, match=says):
            offer(path, asked)
    with pytest.raises(UsageError, match=r'set "chunks" in kv_connector_extra_config'):
        ChunkOffers("", CONFIG, SHAPE).offer(request(good), [GROUP], [FACTS], [1])
    window, half = replace(GROUP, kind=Kind.WINDOW), replace(FACTS.groups[0], dtype="bfloat16")
    for changes, says in (
        ({"shard": replace(FACTS, weights_version="other")}, "the model is Tiny version, and here Tiny other"),
        ({"shard": replace(FACTS, model="Large")}, "and here Large"),
        ({"shard": replace(FACTS, groups=(half,))}, "and here bfloat16"),
        ({"shape": Shape(LAYERS, HEADS, 16)}, "a chunk is"),
        ({"shape": None}, "equal layers"),
        ({"groups": (window,)}, "of full attention"),
        ({"groups": (GROUP, GROUP)}, "one KV group"),
        ({"config": {**CONFIG, "rope": {"theta": 99.0}}}, "the configurations differ in rope"),
    ):
        with pytest.raises(SettingsError, match=says):
            offer(path, request(good), **changes)
    described(path, client, kv_ranks=2)
    with pytest.raises(SettingsError, match="it is of 2 ranks"):
        offer(path, request(good))
    path.write_text("{}")
    with pytest.raises(SettingsError, match="describes no chunks"):
        offer(path, request(good))


class Backend:
    """Keeps K with its tokens last, and V behind it backwards."""

    def write(self, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
            page = cache[slot // BLOCK].view(HEADS, 2, -1)
            page[:, 0].view(HEADS, SIZE, BLOCK)[:, :, slot % BLOCK] = key
            page[:, 1].view(HEADS, BLOCK, SIZE)[:, slot % BLOCK] = value.flip(1)


def test_where_values_lie_is_learned_from_the_backend_itself() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        page = torch.zeros(HEADS, BLOCK, 2 * SIZE, dtype=dtype)
        places = places_of(page, Backend().write)
        keys, values = torch.randn(2, BLOCK, HEADS, SIZE).to(dtype)
        cache = torch.zeros(2, *page.shape, dtype=dtype)
        Backend().write(keys, values, cache, torch.arange(BLOCK, 2 * BLOCK))
        assert torch.equal(cache[1].flatten()[places], torch.stack([keys, values]).transpose(1, 2))


def test_a_backend_that_changes_values_or_takes_no_other_cache_is_refused() -> None:
    page = torch.zeros(HEADS, BLOCK, 2 * SIZE)

    def scaled(keys: Any, values: Any, cache: Any, slots: Any) -> None:
        Backend().write(keys * 0.5, values, cache, slots)

    def failing(*given: Any) -> None:
        raise RuntimeError("not of mine")

    for write, says in ((scaled, "changes keys or values"), (failing, "not of mine")):
        with pytest.raises(UsageError, match=says):
            places_of(page, write)
    with pytest.raises(UsageError, match="none of keys and values by heads"):
        places_of(torch.zeros(2, HEADS, BLOCK, SIZE), Backend().write)


def test_a_document_is_read_from_its_blocks_and_found_by_its_content(client: Client, tmp_path: Path) -> None:
    chunks = described(tmp_path / "chunks.json", client, tenant_salt="of this test")
    tokens = [*FRONT, *range(10, 29)]
    save = ChunkSave(DescribedChunks.read(tmp_path / "chunks.json"), tokens, [5, 2, 9, 3, 7, 8])
    layers, wanted = [], []
    for _ in range(LAYERS):
        cache = torch.randn(12, HEADS, BLOCK, 2 * SIZE)
        keys, values = torch.randn(2, len(tokens), HEADS, SIZE)
        slots = torch.tensor([save.block_ids[at // BLOCK] * BLOCK + at % BLOCK for at in range(len(tokens))])
        Backend().write(keys, values, cache, slots)
        layers.append((cache, Backend().write))
        wanted.append([each[len(FRONT) :].transpose(0, 1) for each in (keys, values)])
    counters = Counters()
    stores = ChunkStores(client, layers, counters)
    for figure in ("save_chunks", "save_existing_chunks"):
        stores.save([save])
        for cache, _ in layers[: figure == "save_chunks"]:
            cache.fill_(torch.nan)  # the engine goes on at once
        assert stores.wait(20)
        stores.hear()
        assert counters.take() == {figure: 1}
    (match,) = chunks.find([3, *range(10, 29)], [(1, 20)], extra=b"weights").matches
    assert (match.old_start, match.new_start, match.tokens) == (2, 1, 19)
    into = [[tuple(torch.empty(HEADS, 19, SIZE) for _ in "kv") for _ in range(LAYERS)]]
    assert chunks.read([match], into, new_starts=[match.old_start]) == [True]
    for got, right in zip(into[0], wanted, strict=True):
        assert all(map(torch.equal, got, right))
    assert not chunks.find([3, *range(10, 29)], [(1, 20)]).matches  # of other weights
    stores.close()


def test_more_than_the_server_takes_is_dropped_and_no_step_waits(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(tmp_path / "chunks.json", client)
    about, counters, go = DescribedChunks.read(tmp_path / "chunks.json"), Counters(), threading.Event()
    layers = [(torch.zeros(4, HEADS, BLOCK, 2 * SIZE), Backend().write)] * LAYERS
    stores = ChunkStores(client, layers, counters)
    store = blend.Chunks.store
    monkeypatch.setattr(blend.Chunks, "store", lambda self, *given: (go.wait(20), store(self, *given))[1])
    stores.save([ChunkSave(about, [*FRONT, 100 + at], [1]) for at in range(STORES_WAITING_MAX + 3)])
    assert counters.take() == {"save_dropped_chunks": 3}
    go.set()
    assert stores.wait(20)
    stores.hear()
    assert counters.take() == {"save_chunks": STORES_WAITING_MAX}
    stores.save([ChunkSave(about, [*FRONT, 5], [1])] * 2)
    stores.close()


def test_a_server_that_is_gone_drops_documents(tmp_path: Path) -> None:
    counters = Counters()
    with Client.connect("nobody", runtime_dir=tmp_path) as client:
        described(tmp_path / "chunks.json", client)
        about = DescribedChunks.read(tmp_path / "chunks.json")
        layers = [(torch.zeros(4, HEADS, BLOCK, 2 * SIZE), Backend().write)] * LAYERS
        stores = ChunkStores(client, layers, counters)
        stores.save([ChunkSave(about, [*FRONT, 5], [1])])
        assert stores.wait(20)
        stores.hear()
        assert counters.take() == {"save_dropped_chunks": 1}
        stores.close()
