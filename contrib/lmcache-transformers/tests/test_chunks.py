from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout
from lmcache_transformers import gather_chunks, layout_for, read_chunks, write_chunks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHUNK = 16
Greedy = Callable[..., list[int]]
PROMPT = [(7 * i * i + 3 * i) % 509 for i in range(5 * CHUNK + 5)]


@pytest.fixture(scope="module")
def uncached(model: Any, greedy: Greedy) -> tuple[list[int], Any]:
    cache = transformers.DynamicCache(config=model.config)
    return greedy(model, cache, PROMPT), cache


@pytest.fixture(scope="module")
def layout(model: Any) -> Layout:
    return layout_for(model.config, CHUNK, model.dtype)


def test_a_layout_names_the_axes_and_counts_the_bytes_of_a_chunk(model: Any, layout: Layout) -> None:
    assert layout == Layout("float32", (3, 2, 2, CHUNK, 16), "LKHTD")
    config = model.config
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert layout.nbytes == CHUNK * a_token


def test_a_layout_without_head_dim_or_kv_heads_falls_back_to_what_the_model_does() -> None:
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8)
    assert layout_for(config, 32, torch.bfloat16) == Layout("bfloat16", (2, 2, 4, 32, 32), "LKHTD")


def test_a_model_with_sliding_windows_is_refused() -> None:
    config = transformers.MistralConfig(sliding_window=8, num_hidden_layers=2, hidden_size=32, intermediate_size=8)
    with pytest.raises(UsageError, match="DynamicSlidingWindowLayer"):
        layout_for(config, CHUNK)


def test_chunks_hold_the_keys_and_values_of_their_own_tokens(uncached: Any, layout: Layout) -> None:
    cache = uncached[1]
    chunks = read_chunks(cache, 1, 3, layout)
    assert [tuple(chunk.shape) for chunk in chunks] == [layout.shape] * 3
    for index, chunk in enumerate(chunks, start=1):
        span = slice(index * CHUNK, (index + 1) * CHUNK)
        for layer in range(3):
            assert torch.equal(chunk[layer, 0], cache.layers[layer].keys[0, :, span])
            assert torch.equal(chunk[layer, 1], cache.layers[layer].values[0, :, span])


def test_gathering_writes_the_positions_asked_for_and_nothing_else(uncached: Any, layout: Layout) -> None:
    whole = torch.full((4, *layout.shape), -1.0)
    gather_chunks(uncached[1], [3, 0], [whole[1], whole[3]])
    expected = read_chunks(uncached[1], 0, 4, layout)
    assert torch.equal(whole[1], expected[3])
    assert torch.equal(whole[3], expected[0])
    assert bool((whole[0] == -1).all())
    assert bool((whole[2] == -1).all())


def test_a_cache_that_is_written_from_chunks_reads_as_the_same_chunks(uncached: Any, layout: Layout) -> None:
    chunks = read_chunks(uncached[1], 0, 5, layout)
    again = write_chunks(chunks)
    assert again.get_seq_length() == 5 * CHUNK
    assert all(torch.equal(a, b) for a, b in zip(read_chunks(again, 0, 5, layout), chunks, strict=True))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_greedy_output_after_a_reused_prefix_equals_the_uncached_run(
    model: Any, greedy: Greedy, uncached: Any, layout: Layout, count: int
) -> None:
    cache: Any = write_chunks(read_chunks(uncached[1], 0, count, layout))
    assert greedy(model, cache, PROMPT[count * CHUNK :]) == uncached[0]


def test_greedy_output_after_zeroed_chunks_differs(model: Any, greedy: Greedy, uncached: Any, layout: Layout) -> None:
    zeroed = [torch.zeros_like(chunk) for chunk in read_chunks(uncached[1], 0, 5, layout)]
    assert greedy(model, write_chunks(zeroed), PROMPT[5 * CHUNK :]) != uncached[0]


def test_greedy_output_differs_after_chunks_that_moved_from_their_positions(
    model: Any, greedy: Greedy, uncached: Any, layout: Layout
) -> None:
    # Keys carry the rotary embedding of the place they were computed at; nothing shifts them.
    moved = read_chunks(uncached[1], 1, 4, layout)
    assert greedy(model, write_chunks(moved), PROMPT[5 * CHUNK :]) != uncached[0]


def test_a_written_cache_does_not_share_memory_with_its_chunks(uncached: Any, layout: Layout) -> None:
    chunks = read_chunks(uncached[1], 0, 2, layout)
    cache: Any = write_chunks(chunks)
    for chunk in chunks:
        chunk.zero_()
    assert bool(cache.layers[0].keys.abs().sum() > 0)


def test_a_written_cache_stands_in_every_layer_as_if_the_model_had_filled_it(
    model: Any, greedy: Greedy, uncached: Any, layout: Layout
) -> None:
    cache: Any = write_chunks(read_chunks(uncached[1], 0, 2, layout))
    made = transformers.DynamicCache(config=model.config)
    greedy(model, made, PROMPT[: 2 * CHUNK], 1)
    for ours, theirs in zip(cache.layers, made.layers, strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert ours.keys.shape == theirs.keys.shape
        assert (ours.dtype, ours.device, ours.is_initialized) == (theirs.dtype, theirs.device, True)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda cache: cache.layers.pop(), "2 layers and the layout 3"),
        (lambda cache: cache.layers[1].reset(), "layer 1 .* or empty"),
        (lambda cache: cache.crop(-40), "layer 0 .* 80 tokens"),
        (lambda cache: cache.batch_repeat_interleave(2), "of one sequence"),
        (lambda cache: cache.layers[0].__dict__.update(keys=cache.layers[0].keys.half()), "float16"),
    ],
)
def test_a_cache_that_does_not_hold_what_is_asked_is_refused(
    uncached: Any, layout: Layout, spoil: Any, words: str
) -> None:
    cache: Any = write_chunks(read_chunks(uncached[1], 0, 5, layout))
    spoil(cache)
    with pytest.raises(UsageError, match=words):
        read_chunks(cache, 0, 5, layout)


def test_more_positions_than_tensors_are_refused(uncached: Any, layout: Layout) -> None:
    with pytest.raises(UsageError, match="2 chunks to gather into 1"):
        gather_chunks(uncached[1], [0, 1], [torch.zeros(layout.shape)])
