"""Models that are refused, and the errors; and positions that depend on the length of a prompt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmcache_core import Client
from lmcache_core.errors import UsageError
from lmcache_transformers import PrefixCache, refusal

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from proving import CHUNK, DOCUMENT, GREEDY, plain  # noqa: E402  # they need torch
from tiny_models import tiny_config, tiny_model  # noqa: E402

from lmcache_transformers import CachedGenerator  # noqa: E402
from lmcache_transformers.geometry import cache_argument  # noqa: E402

ORIGINAL = 64  # tokens up to which positions are the plain ones
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5], "original_max_position_embeddings": ORIGINAL}
ROPES = {
    "dynamic": (ORIGINAL, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}),
    "longrope": (256, {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10_000.0, **FACTORS}),
    "yarn": (
        256,
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "linear": (256, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}),
}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("T5Config", "an encoder and a decoder"),
        ("LlavaConfig", "images and sounds would not be in the keys"),
        ("Qwen2VLConfig", "load its text model by itself"),
        ("Gemma3Config", "composed of several models"),
        ("ViTConfig", "no causal language model"),
        ("BertConfig", "is_decoder=False"),
        ("MambaConfig", "LinearAttentionLayer"),
        ("DeepseekV32Config", "DynamicIndexedLayer"),
        ("RwkvConfig", "has not been proven"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(kind: str, words: str) -> None:
    assert words in refusal(getattr(transformers, kind)())


def test_an_unknown_kind_of_rotary_embedding_is_refused() -> None:
    config = tiny_config(transformers.LlamaConfig)
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10_000.0}
    assert "'spiral'" in refusal(config)


def test_a_model_that_was_not_proven_is_taken_where_that_is_wanted(client: Client) -> None:
    class LlamaOfMine(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    mine = LlamaOfMine(tiny_config(transformers.LlamaConfig)).eval()
    with pytest.raises(UsageError, match="not part of transformers"):
        PrefixCache(client, mine, model_name="mine")
    assert PrefixCache(client, mine, model_name="mine", unproven_ok=True).geometry.layers_in_cache == 2


def test_a_model_without_a_name_or_in_training_is_refused(client: Client) -> None:
    made = tiny_model(tiny_config(transformers.LlamaConfig))
    with pytest.raises(UsageError, match="give model_name"):
        PrefixCache(client, made)
    with pytest.raises(UsageError, match=r"call model\.eval"):
        PrefixCache(client, made.train(), model_name="x")


def test_a_model_that_fills_no_cache_is_refused_in_words(client: Client) -> None:
    made = tiny_model(tiny_config(transformers.OpenAIGPTConfig))
    with pytest.raises(UsageError, match="has not been proven"):
        PrefixCache(client, made, model_name="x")
    with pytest.raises(UsageError, match="does not fill the cache"):
        PrefixCache(client, made, model_name="x", unproven_ok=True)


@pytest.mark.parametrize("kind", sorted(ROPES))
@pytest.mark.parametrize("long_first", [True, False])
def test_a_prefix_of_a_long_prompt_is_not_given_to_a_short_one_whose_positions_differ(
    client: Client, kind: str, long_first: bool
) -> None:
    positions, rope = ROPES[kind]
    config = tiny_config(transformers.LlamaConfig, max_position_embeddings=positions, rope_parameters=dict(rope))
    model = tiny_model(config)
    generator = CachedGenerator(model, None, client, model_name=kind, chunk_tokens=CHUNK)
    long, short = DOCUMENT + DOCUMENT[::-1], [*DOCUMENT, 5, 6]
    for tokens in (long, short, long, short) if long_first else (short, long, short, long):
        # By itself on a model of its own: with `dynamic` a model remembers the longest prompt until a short one comes.
        got, wanted = generator.generate(tokens, **GREEDY), plain(tiny_model(config), tokens)
        assert got.output.sequences.tolist() == wanted.sequences.tolist()
        assert float((got.output.logits[0] - wanted.logits[0]).abs().max()) < 1e-4
    assert generator.generate(short, **GREEDY).tokens_reused == (len(DOCUMENT),)
    reused = generator.generate(long, **GREEDY).tokens_reused
    assert reused == ((0,) if kind in ("dynamic", "longrope") else (len(long) - CHUNK,))
    over = generator.generate(short, **GREEDY | {"max_new_tokens": 40, "min_new_tokens": 40})
    grown = plain(tiny_model(config), short, max_new_tokens=40, min_new_tokens=40)
    assert over.output.sequences.tolist() == grown.sequences.tolist()


def test_nothing_of_a_long_prompt_is_stored_where_positions_depend_on_its_length(client: Client) -> None:
    positions, rope = ROPES["dynamic"]
    config = tiny_config(transformers.LlamaConfig, max_position_embeddings=positions, rope_parameters=dict(rope))
    model = tiny_model(config)
    prefixes = PrefixCache(client, model, model_name="dynamic", chunk_tokens=CHUNK)
    long = DOCUMENT + DOCUMENT
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.tensor([long]), **cache_argument(model, cache))
    assert prefixes.store(long, cache) == (0, 0, 0)
    assert prefixes.load(DOCUMENT).tokens_reused == 0


def test_importing_the_package_imports_no_engine() -> None:
    program = "import sys, lmcache_transformers\nassert not {'torch', 'transformers'} & set(sys.modules), sys.modules\n"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
