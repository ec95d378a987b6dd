"""PrefixCache against a real server in this process, over shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Client, Server
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.settings.compose import make_settings
from lmcache_transformers import PrefixCache, gather_chunks, prefix_cache, write_chunks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHUNK = 16
Greedy = Callable[..., list[int]]
Answered = Callable[..., tuple[list[int], int, Any]]
DOCUMENT = [(7 * i * i + 3 * i) % 509 for i in range(5 * CHUNK)]
QUESTIONS = ([1, 2, 3, 4, 5], [9, 8, 7])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    registry = load_plugins()
    settings = make_settings(
        registry,
        name=f"t{tmp_path.name.replace('_', '-').lower()[-40:]}",
        runtime_dir=tmp_path / "run",
        state_dir=tmp_path / "state",
        l1={"size_bytes": 16 << 20, "backing": "memfd"},
    )
    with Server(settings, registry) as server:
        yield server


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with server.connect() as client:
        until = time.monotonic() + 60
        while (usage := client.status()["l1"])["populated_bytes"] < usage["pool_bytes"]:
            assert time.monotonic() < until, usage
            time.sleep(0.005)
        yield client


@pytest.fixture
def prefixes(client: Any, model: Any) -> PrefixCache:
    return PrefixCache(client, model, model_name="tiny", chunk_tokens=CHUNK)


@pytest.fixture
def answered(model: Any, greedy: Greedy) -> Answered:
    def run(prefixes: PrefixCache, prompt: list[int]) -> tuple[list[int], int, Any]:
        prefix = prefixes.load(prompt)
        out = greedy(model, prefix.cache, prompt[prefix.tokens_reused :])
        return out, prefix.tokens_reused, prefix.cache

    return run


def test_a_second_question_reuses_the_document_and_gets_the_uncached_answer(
    model: Any, greedy: Greedy, answered: Answered, prefixes: PrefixCache
) -> None:
    first, second = (DOCUMENT + question for question in QUESTIONS)
    out, reused, cache = answered(prefixes, first)
    assert reused == 0
    assert out == greedy(model, transformers.DynamicCache(), first)
    stored = prefixes.store(first, cache)
    assert (stored.chunks_written, stored.chunks_present) == (5, 0)
    assert stored.nbytes == 5 * prefixes.layout.nbytes
    out, reused, _ = answered(prefixes, second)
    assert reused == len(DOCUMENT)
    assert out == greedy(model, transformers.DynamicCache(), second)


def test_what_is_stored_reaches_another_client_and_another_model_object(
    server: Any, model: Any, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    with server.connect() as other:
        prefix: Any = PrefixCache(other, model, model_name="tiny", chunk_tokens=CHUNK).load([*DOCUMENT, 1])
    assert prefix.tokens_reused == len(DOCUMENT)
    for ours, theirs in zip(prefix.cache.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, : len(DOCUMENT)])
        assert torch.equal(ours.values, theirs.values[:, :, : len(DOCUMENT)])


def test_a_token_is_always_left_to_compute(answered: Answered, prefixes: PrefixCache) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    assert prefixes.load(DOCUMENT).tokens_reused == len(DOCUMENT) - CHUNK
    assert prefixes.load([*DOCUMENT, 1]).tokens_reused == len(DOCUMENT)
    assert prefixes.load(DOCUMENT[:1]).tokens_reused == 0
    assert prefixes.load([]).tokens_reused == 0


def test_storing_again_copies_nothing(answered: Answered, prefixes: PrefixCache) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    assert prefixes.store(DOCUMENT, cache) == (0, 5, 0)


def test_generated_tokens_are_stored_where_they_are_given_too(answered: Answered, prefixes: PrefixCache) -> None:
    out, _, cache = answered(prefixes, DOCUMENT[: 2 * CHUNK - 4])
    conversation = DOCUMENT[: 2 * CHUNK - 4] + out
    # The last token was answered, not computed on: its KV is not there, and is not claimed to be.
    assert cache.get_seq_length() == len(conversation) - 1
    assert prefixes.store(conversation, cache).chunks_written == 2
    assert prefixes.load([*conversation, 1, 2]).tokens_reused == 2 * CHUNK


def test_other_tenants_weights_and_models_share_nothing(
    client: Any, model: Any, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    others: list[dict[str, Any]] = [{"tenant_salt": "s"}, {"weights_version": "2"}, {"model_name": "tiny2"}]
    for other in others:
        options: dict[str, Any] = {"model_name": "tiny", "chunk_tokens": CHUNK} | other
        theirs = PrefixCache(client, model, **options)
        assert theirs.load(DOCUMENT).tokens_reused == 0
    assert prefixes.load(DOCUMENT).tokens_reused > 0


def test_a_prefix_that_was_loaded_outlives_what_is_cleared(
    client: Any, model: Any, greedy: Greedy, answered: Answered, prefixes: PrefixCache
) -> None:
    prompt = DOCUMENT + QUESTIONS[0]
    _, _, cache = answered(prefixes, prompt)
    prefixes.store(prompt, cache)
    prefix = prefixes.load(prompt)
    client.clear()
    assert prefixes.load(prompt).tokens_reused == 0
    out = greedy(model, prefix.cache, prompt[prefix.tokens_reused :])
    assert out == greedy(model, transformers.DynamicCache(), prompt)


def test_nothing_is_held_once_load_and_store_are_done(client: Any, answered: Answered, prefixes: PrefixCache) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    prefixes.load([*DOCUMENT, 1])
    usage = client.status()["l1"]
    assert not any(usage["leases_by_kind"].values())
    client.clear()
    assert client.status()["l1"]["used_bytes"] == 0


def test_generate_goes_on_from_a_loaded_prefix(model: Any, answered: Answered, prefixes: PrefixCache) -> None:
    prompt = DOCUMENT + QUESTIONS[0]
    _, _, cache = answered(prefixes, prompt)
    prefixes.store(prompt, cache)
    ids = torch.tensor([prompt])
    options: Any = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    prefix = prefixes.load(prompt)
    warm = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=prefix.cache, **options)
    assert prefix.tokens_reused == len(DOCUMENT)
    assert warm.tolist() == plain.tolist()


def test_without_a_server_everything_misses_and_nothing_is_stored(
    client: Any, model: Any, greedy: Greedy, answered: Answered, prefixes: PrefixCache, tmp_path: Path
) -> None:
    with Client.connect("nobody", runtime_dir=tmp_path) as client:
        prefixes = PrefixCache(client, model, model_name="tiny", chunk_tokens=CHUNK)
        out, reused, cache = answered(prefixes, DOCUMENT)
        assert reused == 0
        assert prefixes.store(DOCUMENT, cache).chunks_written == 0
    assert out == greedy(model, transformers.DynamicCache(), DOCUMENT)


@pytest.mark.parametrize("shown", [True, False])
def test_a_server_that_ends_while_a_prefix_is_copied_makes_it_a_miss_unless_the_index_shows_that_it_is_whole(
    server: Any, monkeypatch: pytest.MonkeyPatch, answered: Answered, prefixes: PrefixCache, shown: bool
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    link = prefixes.client._links.current()
    if not shown:
        link.index = None
    elif link.index is None:
        pytest.skip("the C extension is not there")

    def copy_and_lose_the_server(chunks: list[Any], *device: Any) -> Any:
        copied = write_chunks(chunks, *device)
        if chunks:
            server.stop()
        return copied

    monkeypatch.setattr(prefix_cache, "write_chunks", copy_and_lose_the_server)
    prefix = prefixes.load([*DOCUMENT, 1])
    reused = len(DOCUMENT) if shown else 0
    assert prefix.tokens_reused == reused
    assert prefix.cache.get_seq_length() == reused
    if shown:
        for ours, theirs in zip(prefix.cache.layers, cache.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys[..., :reused, :])


def test_a_server_that_ends_while_chunks_are_written_leaves_them_unstored(
    server: Any, monkeypatch: pytest.MonkeyPatch, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)

    def write_and_lose_the_server(*arguments: Any) -> None:
        gather_chunks(*arguments)
        server.stop()

    monkeypatch.setattr(prefix_cache, "gather_chunks", write_and_lose_the_server)
    assert prefixes.store(DOCUMENT, cache) == (0, 0, 0)
    assert answered(prefixes, DOCUMENT)[1] == 0
