"""CachedGenerator: batches, kinds of cache, and a server that ends in the middle."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Client
from lmcache_core.errors import UsageError
from lmcache_transformers import CachedGenerator

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from proving import CHUNK, DOCUMENT, GREEDY, QUESTIONS, plain  # noqa: E402  # they need torch
from tiny_models import tiny_config, tiny_model  # noqa: E402

NAMES = {"full": "LlamaConfig", "sliding": "MistralConfig", "both": "Gemma3TextConfig", "shared": "Gemma3nTextConfig"}
PROMPTS = [
    DOCUMENT + QUESTIONS[0],  # three chunks of which the first two are shared with the next one
    DOCUMENT[: 2 * CHUNK] + QUESTIONS[1],
    [*DOCUMENT[::-1], 4],
    [7, 8],  # shorter than a chunk
]


def made(name: str) -> transformers.PreTrainedModel:
    return tiny_model(tiny_config(getattr(transformers, NAMES[name])))


def generator_of(
    client: Client, model: transformers.PreTrainedModel, name: str = "tiny", **options: Any
) -> CachedGenerator:
    return CachedGenerator(model, None, client, model_name=name, chunk_tokens=CHUNK, **options)


def alone(model: transformers.PreTrainedModel, tokens: list[int]) -> list[int]:
    answer: list[int] = plain(model, tokens).sequences[0, len(tokens) :].tolist()
    return answer


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_batch_whose_prompts_find_different_prefixes_answers_as_each_prompt_alone(
    client: Client, name: str, cache: str | None
) -> None:
    model = made(name)
    generator = generator_of(client, model)
    generator.generate(PROMPTS[0], **GREEDY)
    for reused in ((48, 32, 0, 0), (48, 32, 48, 0)):
        got = generator.generate(PROMPTS, cache_implementation=cache, **GREEDY)
        assert got.tokens_reused == reused
        assert got.answers == [alone(model, tokens) for tokens in PROMPTS]


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_static_caches_give_what_static_caches_give_without_us(client: Client, name: str) -> None:
    model = made(name)
    generator = generator_of(client, model)
    for _ in range(2):
        got = generator.generate(PROMPTS[0], cache_implementation="static", **GREEDY)
        assert got.answers[0] == plain(model, PROMPTS[0], cache_implementation="static").sequences[0, -6:].tolist()
    assert got.tokens_reused == (48,)


def test_a_quantised_cache_is_made_of_what_was_computed_at_full_precision(client: Client) -> None:
    model = made("full")
    generator = generator_of(client, model)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    cold, warm = (generator.generate(PROMPTS[0], **options, **GREEDY) for _ in range(2))
    assert (cold.tokens_reused, warm.tokens_reused) == ((0,), (48,))
    assert all(map(torch.equal, cold.output.logits, warm.output.logits))
    # The model's own run attends to the exact prompt for its first answer, and to the quantised one only from then on.
    theirs = plain(model, PROMPTS[0], **options)
    assert float((cold.output.logits[0] - theirs.logits[0]).abs().max()) < 0.25 * float(theirs.logits[0].abs().max())
    exact = generator.generate(PROMPTS[0], **GREEDY)
    assert not torch.equal(exact.output.logits[1], warm.output.logits[1])


def test_sampling_with_a_seed_gives_what_it_gives_without_a_cache(client: Client) -> None:
    model = made("full")
    generator = generator_of(client, model)
    options = GREEDY | {"do_sample": True, "top_k": 20}
    for _ in range(2):
        torch.manual_seed(5)
        got = generator.generate(PROMPTS[0], **options)
        torch.manual_seed(5)
        assert got.output.sequences.tolist() == plain(model, PROMPTS[0], do_sample=True, top_k=20).sequences.tolist()


def test_prompts_may_be_text_tensors_or_what_a_tokenizer_returns(client: Client) -> None:
    class Letters:
        """A tokenizer of one id for each letter."""

        pad_token_id = 0

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(each) % 120 + 3 for each in text]}

        def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
            assert skip_special_tokens
            return ["".join(chr(each + 30) for each in row) for row in rows]

    model, text = made("full"), "a question that is a little longer than two whole chunks"
    generator = CachedGenerator(model, Letters(), client, model_name="letters", chunk_tokens=CHUNK)
    tokens = Letters()(text)["input_ids"]
    by_text = generator.generate([text, text[:20]], **GREEDY)
    padded = torch.tensor([tokens, [0] * (len(tokens) - 20) + tokens[:20]])
    mask = torch.ones_like(padded)
    mask[1, : len(tokens) - 20] = 0
    by_tensor = generator.generate({"input_ids": padded, "attention_mask": mask}, **GREEDY)
    assert by_text.answers == by_tensor.answers == [alone(model, tokens), alone(model, tokens[:20])]
    assert len(by_text.texts) == 2
    assert generator.generate(torch.tensor(tokens), **GREEDY).answers[0] == by_text.answers[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pixel_values": torch.zeros(1)}, "pixel_values is an input that is no token"),
        ({"inputs_embeds": torch.zeros(1)}, "inputs_embeds is an input that is no token"),
        ({"num_beams": 2}, "one answer for each prompt"),
        ({"assistant_model": object()}, "call model.generate"),
        ({"past_key_values": object()}, "is this generator's to make"),
        ({"cache_implementation": "offloaded"}, "use None, 'dynamic', 'static', 'quantized'"),
        ({"cache_implementation": "static", "max_new_tokens": None}, "give max_new_tokens"),
        ({"attention_mask": [[1, 0, 1]]}, "only padding can be masked"),
        ({"attention_mask": [[1, 1]]}, r"rows of \[2\] and the prompts are of \[3\]"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "not a row of numbers"),
        ({"assistant_early_exit": 1}, "call model.generate"),
        ({"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3)}, "call model.generate"),
        ({"generation_config": transformers.GenerationConfig(num_beams=3)}, "one answer for each prompt"),
        ({"output_hidden_states": True}, "would lack what was not computed"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(client: Client, options: dict[str, object], words: str) -> None:
    generator = generator_of(client, made("full"))
    with pytest.raises(UsageError, match=words):
        generator.generate([[4, 5, 6]], **{"max_new_tokens": 4} | options)
    with pytest.raises(UsageError, match="empty"):
        generator.generate([[]], max_new_tokens=4)
    with pytest.raises(UsageError, match="no tokenizer"):
        generator.generate("text", max_new_tokens=4)
    for prompts in (5, [{"role": "user"}], [[[4, 5]]], [4, [5]]):
        with pytest.raises(UsageError, match="the prompts"):
            generator.generate(prompts, max_new_tokens=4)


def test_ways_that_the_model_itself_is_set_to_are_refused_as_those_of_a_call(client: Client) -> None:
    model = made("full")
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(UsageError, match="prompt_lookup_num_tokens is not served"):
        generator_of(client, model).generate(PROMPTS[0], max_new_tokens=4)


def test_prompts_of_several_lengths_are_refused_where_the_model_counts_padding_as_positions(client: Client) -> None:
    model = tiny_model(tiny_config(transformers.RoFormerConfig, is_decoder=True))
    generator = generator_of(client, model)
    with pytest.raises(UsageError, match="give prompts of one length"):
        generator.generate(PROMPTS, **GREEDY)
    same = [PROMPTS[0], [4, *PROMPTS[0][1:]]]
    for reused in ((0, 0), (48, 48)):
        got = generator.generate(same, **GREEDY)
        assert got.tokens_reused == reused
        assert got.answers == [alone(model, tokens) for tokens in same]


def test_without_a_server_it_generates_all_the_same(tmp_path: Path) -> None:
    model = made("full")
    with Client.connect("nobody", runtime_dir=tmp_path) as client:
        got = generator_of(client, model).generate(PROMPTS, **GREEDY)
    assert got.tokens_reused == (0, 0, 0, 0)
    assert got.answers == [alone(model, tokens) for tokens in PROMPTS]


@pytest.mark.parametrize("moment", ["prefill", "generation"])
def test_a_server_that_is_killed_in_the_middle_changes_no_answer(process: Any, moment: str) -> None:
    server, client = process
    model = made("both")
    generator = generator_of(client, model)
    generator.generate(PROMPTS[0], **GREEDY)
    calls = 0

    def kill(module: Any, arguments: Any, given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (2 if moment == "prefill" else 8):
            server.send_signal(signal.SIGKILL)
            server.wait(60)

    wanted = [alone(model, tokens) for tokens in PROMPTS]
    hook = model.register_forward_pre_hook(kill, with_kwargs=True)
    try:
        assert generator.generate(PROMPTS, **GREEDY).answers == wanted
    finally:
        hook.remove()
    assert server.returncode == -signal.SIGKILL
    after = generator.generate(PROMPTS, **GREEDY)
    assert after.answers == wanted
