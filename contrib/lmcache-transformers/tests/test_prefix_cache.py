"""PrefixCache against a real server in this process, over shared memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Client, Server
from lmcache_core.client.client import Client as AnyClient
from lmcache_core.errors import PluginError, SettingsError, UsageError
from lmcache_transformers import PrefixCache
from lmcache_transformers.chunks import layout_of
from lmcache_transformers.geometry import Geometry, LayerShape, cache_argument

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHUNK = 16
Greedy = Callable[..., list[int]]
Answered = Callable[..., tuple[list[int], int, transformers.Cache]]
DOCUMENT = [(7 * i * i + 3 * i) % 509 for i in range(5 * CHUNK)]
QUESTIONS = ([1, 2, 3, 4, 5], [9, 8, 7])


@pytest.fixture
def prefixes(client: Client, model: transformers.PreTrainedModel) -> PrefixCache:
    return PrefixCache(client, model, model_name="tiny", chunk_tokens=CHUNK)


@pytest.fixture
def answered(model: transformers.PreTrainedModel, greedy: Greedy) -> Answered:
    def run(prefixes: PrefixCache, prompt: list[int]) -> tuple[list[int], int, transformers.Cache]:
        prefix = prefixes.load(prompt)
        out = greedy(model, prefix.cache, prompt[prefix.tokens_reused :])
        return out, prefix.tokens_reused, prefix.cache

    return run


def test_a_second_question_reuses_the_document_and_gets_the_uncached_answer(
    model: transformers.PreTrainedModel, greedy: Greedy, answered: Answered, prefixes: PrefixCache
) -> None:
    first, second = (DOCUMENT + question for question in QUESTIONS)
    out, reused, cache = answered(prefixes, first)
    assert reused == 0
    assert out == greedy(model, transformers.DynamicCache(), first)
    stored = prefixes.store(first, cache)
    assert (stored.chunks_written, stored.chunks_present) == (5, 0)
    a_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, KV heads, size, bytes
    assert stored.nbytes == 5 * prefixes.layout.nbytes == 5 * CHUNK * a_token
    out, reused, _ = answered(prefixes, second)
    assert reused == len(DOCUMENT)
    assert out == greedy(model, transformers.DynamicCache(), second)


def test_what_is_stored_reaches_another_client_and_another_model_object(
    server: Server, model: transformers.PreTrainedModel, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    with server.connect() as other:
        prefix = PrefixCache(other, model, model_name="tiny", chunk_tokens=CHUNK).load([*DOCUMENT, 1])
    assert prefix.tokens_reused == len(DOCUMENT)
    for ours, theirs in zip(prefix.cache.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, : len(DOCUMENT)])
        assert torch.equal(ours.values, theirs.values[:, :, : len(DOCUMENT)])


def test_chunks_may_lie_encoded_in_the_pool(
    client: Client, model: transformers.PreTrainedModel, answered: Answered, prefixes: PrefixCache
) -> None:
    pytest.importorskip("lmcache_quant._native", reason="built without C")
    dense = PrefixCache(client, model, model_name="tiny", chunk_tokens=CHUNK, codec="int8")
    _, _, cache = answered(dense, DOCUMENT)
    stored = dense.store(DOCUMENT, cache)
    assert stored.chunks_written == 5
    assert stored.nbytes == 5 * dense.namespace.layout.nbytes < 0.4 * 5 * dense.layout.nbytes
    assert dense.store(DOCUMENT, cache).chunks_present == 5
    prefix = dense.load([*DOCUMENT, 1])
    assert prefix.tokens_reused == len(DOCUMENT)
    assert prefix.nbytes == stored.nbytes
    for ours, theirs in zip(prefix.cache.layers, cache.layers, strict=True):
        for back, was in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            was = was[:, :, : len(DOCUMENT)]
            assert 0 < (back - was).abs().max() < 0.01 * was.abs().max()
    assert prefixes.load([*DOCUMENT, 1]).tokens_reused == 0


def test_a_codec_that_is_not_installed_or_not_certified_is_refused(
    client: Client, model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match="int7"):
        PrefixCache(client, model, model_name="tiny", chunk_tokens=CHUNK, codec="int7")
    pytest.importorskip("lmcache_quant._native", reason="built without C")
    with pytest.raises(SettingsError, match="lmcache-core quality"):
        PrefixCache(client, model, model_name="tiny", codec="int8", certificate=tmp_path / "none")


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
    client: Client, model: transformers.PreTrainedModel, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    others: list[dict[str, object]] = [{"tenant_salt": "s"}, {"weights_version": "2"}, {"model_name": "tiny2"}]
    for other in others:
        options: dict[str, object] = {"model_name": "tiny", "chunk_tokens": CHUNK} | other
        theirs = PrefixCache(client, model, **options)
        assert theirs.load(DOCUMENT).tokens_reused == 0
    assert prefixes.load(DOCUMENT).tokens_reused > 0


def test_a_prefix_that_was_loaded_outlives_what_is_cleared(
    client: Client, model: transformers.PreTrainedModel, greedy: Greedy, answered: Answered, prefixes: PrefixCache
) -> None:
    prompt = DOCUMENT + QUESTIONS[0]
    _, _, cache = answered(prefixes, prompt)
    prefixes.store(prompt, cache)
    prefix = prefixes.load(prompt)
    client.clear()
    assert prefixes.load(prompt).tokens_reused == 0
    out = greedy(model, prefix.cache, prompt[prefix.tokens_reused :])
    assert out == greedy(model, transformers.DynamicCache(), prompt)


def test_nothing_is_held_once_load_and_store_are_done(
    client: Client, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    prefixes.load([*DOCUMENT, 1])
    usage = client.status()["l1"]
    assert not any(usage["leases_by_kind"].values())
    client.clear()
    assert client.status()["l1"]["used_bytes"] == 0


def test_generate_goes_on_from_a_loaded_prefix(
    model: transformers.PreTrainedModel, answered: Answered, prefixes: PrefixCache
) -> None:
    prompt = DOCUMENT + QUESTIONS[0]
    _, _, cache = answered(prefixes, prompt)
    prefixes.store(prompt, cache)
    ids = torch.tensor([prompt])
    options: Any = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    prefix = prefixes.load(prompt)
    warm = model.generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(model, prefix.cache), **options)
    assert prefix.tokens_reused == len(DOCUMENT)
    assert warm.tolist() == plain.tolist()


def test_without_a_server_everything_misses_and_nothing_is_stored(
    client: Client,
    model: transformers.PreTrainedModel,
    greedy: Greedy,
    answered: Answered,
    prefixes: PrefixCache,
    tmp_path: Path,
) -> None:
    with Client.connect("nobody", runtime_dir=tmp_path) as client:
        prefixes = PrefixCache(client, model, model_name="tiny", chunk_tokens=CHUNK)
        out, reused, cache = answered(prefixes, DOCUMENT)
        assert reused == 0
        assert prefixes.store(DOCUMENT, cache).chunks_written == 0
    assert out == greedy(model, transformers.DynamicCache(), DOCUMENT)


def test_a_server_that_ends_before_a_prefix_is_copied_makes_it_a_miss(
    server: Server, monkeypatch: pytest.MonkeyPatch, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    retrieve = AnyClient.retrieve_strided

    def lose_the_server_first(self: AnyClient, *arguments: object, **options: object) -> object:
        server.stop()
        return retrieve(self, *arguments, **options)

    monkeypatch.setattr(AnyClient, "retrieve_strided", lose_the_server_first)
    prefix = prefixes.load([*DOCUMENT, 1])
    assert prefix.tokens_reused == prefix.cache.get_seq_length() == 0
    assert answered(prefixes, DOCUMENT)[1] == 0


def test_a_chunk_that_left_between_lookup_and_copy_ends_the_prefix_there(
    client: Client, monkeypatch: pytest.MonkeyPatch, answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    keys = prefixes.keys(DOCUMENT)
    gone = client.lookup(keys, namespace=prefixes.namespace, identify=True)
    retrieve = AnyClient.retrieve_strided

    def drop_one_first(self: AnyClient, *arguments: object, **options: object) -> object:
        client.drop(keys[2:3], namespace=prefixes.namespace, incarnations=gone.incarnations[2:3])
        return retrieve(self, *arguments, **options)

    monkeypatch.setattr(AnyClient, "retrieve_strided", drop_one_first)
    prefix = prefixes.load([*DOCUMENT, 1])
    assert prefix.tokens_reused == prefix.cache.get_seq_length() == 2 * CHUNK
    assert torch.equal(prefix.cache.layers[0].keys, cache.layers[0].keys[:, :, : 2 * CHUNK])


def test_keys_and_values_come_back_bit_for_bit_and_stand_in_memory_that_grows(
    model: transformers.PreTrainedModel, greedy: Greedy, answered: Answered, prefixes: PrefixCache
) -> None:
    out, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    prefix = prefixes.load([*DOCUMENT, 1])
    for ours, theirs in zip(prefix.cache.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, : len(DOCUMENT)])
        assert torch.equal(ours.values, theirs.values[:, :, : len(DOCUMENT)])
    there = prefix.cache.layers[0].keys.data_ptr()
    greedy(model, prefix.cache, [1, 2], 4)
    assert prefix.cache.layers[0].keys.data_ptr() == there  # within its room
    long = greedy(model, prefix.cache, [3], 3 * CHUNK)  # and beyond it
    assert prefix.cache.get_seq_length() == len(DOCUMENT) + 2 + 3 + 3 * CHUNK
    plain = transformers.DynamicCache()
    greedy(model, plain, [*DOCUMENT, 1, 2], 4)
    assert long == greedy(model, plain, [3], 3 * CHUNK)
    assert len(out) == 12


@pytest.mark.parametrize("change", ["crop", "batch_repeat_interleave", "reorder_cache", "reset"])
def test_a_loaded_cache_does_all_that_a_plain_one_does(
    model: transformers.PreTrainedModel, greedy: Greedy, answered: Answered, prefixes: PrefixCache, change: str
) -> None:
    _, _, made = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, made)
    prefix = prefixes.load([*DOCUMENT, 1])
    plain = transformers.DynamicCache(
        [(layer.keys[:, :, : len(DOCUMENT)], layer.values[:, :, : len(DOCUMENT)]) for layer in made.layers]
    )
    argument = {"crop": -5, "batch_repeat_interleave": 2, "reorder_cache": torch.tensor([0])}.get(change)
    for cache in (prefix.cache, plain):
        getattr(cache, change)(*(() if argument is None else (argument,)))
    rows = 2 if change == "batch_repeat_interleave" else 1
    ids = torch.tensor([[1, 2, 3]] * rows)
    with torch.no_grad():
        ours = model(input_ids=ids, **cache_argument(model, prefix.cache)).logits
        theirs = model(input_ids=ids, **cache_argument(model, plain)).logits
    assert torch.equal(ours, theirs)


def test_a_cache_that_does_not_hold_what_is_asked_is_refused(answered: Answered, prefixes: PrefixCache) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    plain = transformers.DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    plain.layers.pop()
    with pytest.raises(UsageError, match="2 layers and the model 3"):
        prefixes.store(DOCUMENT, plain)
    plain = transformers.DynamicCache([(layer.keys.half(), layer.values) for layer in cache.layers])
    with pytest.raises(UsageError, match="float16"):
        prefixes.store(DOCUMENT, plain)
    plain = transformers.DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    plain.batch_repeat_interleave(2)
    with pytest.raises(UsageError, match="of one sequence"):
        prefixes.store(DOCUMENT, plain)


def test_a_plain_cache_of_the_model_is_stored_as_one_of_ours(
    model: transformers.PreTrainedModel, greedy: Greedy, answered: Answered, prefixes: PrefixCache
) -> None:
    cache = transformers.DynamicCache(config=model.config)
    greedy(model, cache, DOCUMENT, 1)
    assert prefixes.store(DOCUMENT, cache).chunks_written == 5
    assert answered(prefixes, DOCUMENT + QUESTIONS[0])[0] == greedy(
        model, transformers.DynamicCache(), DOCUMENT + QUESTIONS[0]
    )


def test_another_configuration_of_the_same_name_shares_nothing(
    client: Client, make_model: Callable[..., transformers.PreTrainedModel], answered: Answered, prefixes: PrefixCache
) -> None:
    _, _, cache = answered(prefixes, DOCUMENT)
    prefixes.store(DOCUMENT, cache)
    scaled = make_model(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    assert PrefixCache(client, scaled, model_name="tiny", chunk_tokens=CHUNK).load([*DOCUMENT, 1]).tokens_reused == 0
    assert prefixes.load([*DOCUMENT, 1]).tokens_reused == len(DOCUMENT)


@pytest.mark.parametrize(
    ("of_layers", "expected"),
    [
        ([(2, 16, 16, "bfloat16")] * 3, "bfloat16|3,2,2,8,16|LKHTD"),
        ([(2, 16, 16, "bfloat16"), (1, 16, 16, "bfloat16")], "bfloat16|768|"),
        ([(2, 16, 8, "float32")] * 2, "float32|768|"),
        ([(2, 16, 16, "bfloat16"), (2, 16, 16, "float32")], "uint8|3072|"),
    ],
)
def test_a_layout_has_axes_where_all_layers_are_alike(of_layers: list[tuple[Any, ...]], expected: str) -> None:
    shapes = [
        LayerShape(at, heads, key_dim, value_dim, 0, getattr(torch, dtype), torch.device("cpu"))
        for at, (heads, key_dim, value_dim, dtype) in enumerate(of_layers)
    ]
    assert layout_of(Geometry(tuple(shapes), len(shapes), ""), 8).text == expected
