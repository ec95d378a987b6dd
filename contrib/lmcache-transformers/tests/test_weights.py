"""What one name stands for may change: weights, adapters, precision. What was stored before is not given out after."""

from __future__ import annotations

import shutil
from collections.abc import Callable
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

PROMPT = DOCUMENT + QUESTIONS[0]


def made(seed: int = 3) -> transformers.PreTrainedModel:
    return tiny_model(tiny_config(transformers.LlamaConfig), seed)


def generator_of(client: Client, model: transformers.PreTrainedModel) -> CachedGenerator:
    return CachedGenerator(model, None, client, model_name="one name", chunk_tokens=CHUNK)


def load_anew(model: transformers.PreTrainedModel) -> None:
    model.load_state_dict(made(4).state_dict())


def write_through_data(model: transformers.PreTrainedModel) -> None:
    for ours, theirs in zip(model.parameters(), made(4).parameters(), strict=True):
        ours.data.copy_(theirs)


def merge_into_one_matrix(model: transformers.PreTrainedModel) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        weight += torch.outer(torch.ones(weight.shape[0]), torch.ones(weight.shape[1]))


@pytest.mark.parametrize("change", [load_anew, write_through_data, merge_into_one_matrix])
def test_weights_that_changed_in_place_find_nothing_of_what_was_before(
    client: Client, change: Callable[[transformers.PreTrainedModel], None]
) -> None:
    model = made()
    generator = generator_of(client, model)
    before = generator.generate(PROMPT, **GREEDY)
    change(model)
    for reused in (0, len(DOCUMENT)):
        got = generator.generate(PROMPT, **GREEDY)
        assert got.tokens_reused == (reused,)
        assert got.answers[0] == plain(model, PROMPT).sequences[0, len(PROMPT) :].tolist()
    assert not torch.equal(before.output.logits[0], got.output.logits[0])


def test_other_weights_under_the_same_name_and_configuration_find_nothing(client: Client) -> None:
    generator_of(client, made(3)).generate(PROMPT, **GREEDY)
    assert generator_of(client, made(4)).generate(PROMPT, **GREEDY).tokens_reused == (0,)
    assert generator_of(client, made(3)).generate(PROMPT, **GREEDY).tokens_reused == (len(DOCUMENT),)


def test_what_was_computed_under_autocast_is_not_given_to_who_computes_without(client: Client) -> None:
    model = made()
    generator = generator_of(client, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generator.generate(PROMPT, **GREEDY)
    got, wanted = generator.generate(PROMPT, **GREEDY), plain(model, PROMPT)
    assert got.tokens_reused == (0,)
    assert float((got.output.logits[0] - wanted.logits[0]).abs().max()) < 1e-4


def test_a_model_that_is_trained_meanwhile_is_refused_until_it_is_not(client: Client) -> None:
    model = made()
    generator = generator_of(client, model)
    model.train()
    with pytest.raises(UsageError, match=r"call model.eval\(\)"):
        generator.generate(PROMPT, **GREEDY)
    model.eval()
    generator.generate(PROMPT, **GREEDY)


def test_a_model_whose_precision_changed_is_refused_in_words(client: Client) -> None:
    model = made()
    generator = generator_of(client, model)
    model.to(torch.bfloat16)
    with pytest.raises(UsageError, match="make it anew"):
        generator.generate(PROMPT, **GREEDY)
    assert generator_of(client, model).generate(PROMPT, **GREEDY).tokens_reused == (0,)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_have_keys_of_their_own_switched_on_and_off(client: Client) -> None:
    peft = pytest.importorskip("peft")
    model = made()
    generator = generator_of(client, model)
    keys = [generator.prefixes.keys(DOCUMENT)[0]]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for name in ("french", "german"):
        model.add_adapter(config, adapter_name=name)
        model.eval()
        keys.append(generator.prefixes.keys(DOCUMENT)[0])
    model.set_adapter("french")
    keys.append(generator.prefixes.keys(DOCUMENT)[0])
    model.disable_adapters()
    keys.append(generator.prefixes.keys(DOCUMENT)[0])
    assert len(set(keys)) == len(keys)
    model.enable_adapters()
    assert generator.prefixes.keys(DOCUMENT)[0] == keys[3]


def loaded_from(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_folder_is_its_content_wherever_it_lies(client: Client, tmp_path: Path) -> None:
    made(3).save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    generator = CachedGenerator(loaded_from(tmp_path / "a"), None, client, chunk_tokens=CHUNK)
    generator.generate(PROMPT, **GREEDY)
    copied = CachedGenerator(loaded_from(tmp_path / "b"), None, client, chunk_tokens=CHUNK)
    assert copied.generate(PROMPT, **GREEDY).tokens_reused == (len(DOCUMENT),)
    made(4).save_pretrained(tmp_path / "a")
    model = loaded_from(tmp_path / "a")
    got = CachedGenerator(model, None, client, chunk_tokens=CHUNK).generate(PROMPT, **GREEDY)
    assert got.tokens_reused == (0,)
    assert got.answers[0] == plain(model, PROMPT).sequences[0, len(PROMPT) :].tolist()
