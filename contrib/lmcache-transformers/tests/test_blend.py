"""Blending: exact where everything is recomputed, for many families of models, and refused where it cannot be right."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core import Client
from lmcache_core.errors import SettingsError, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("lmcache_blend._native", reason="built without C")

from proving import GREEDY, plain  # noqa: E402  # they need torch
from tiny_models import VOCABULARY, tiny_config, tiny_model  # noqa: E402

from lmcache_transformers import Blending, CachedGenerator  # noqa: E402
from lmcache_transformers.blend import blender, forward  # noqa: E402
from lmcache_transformers.blend.attention import paid_to  # noqa: E402
from lmcache_transformers.blend.certificate import Step, deviation_max, steps_of  # noqa: E402
from lmcache_transformers.blend.conditions import Conditions, covering  # noqa: E402
from lmcache_transformers.blend.deviation import chosen, deviations, second_layer  # noqa: E402
from lmcache_transformers.blend.forward import add_kept, blend_into, compute, compute_chunk  # noqa: E402
from lmcache_transformers.blend.support import rope_of  # noqa: E402
from lmcache_transformers.geometry import cache_argument, geometry_of  # noqa: E402
from lmcache_transformers.room import cache_with_room, rooms_of  # noqa: E402

FAMILIES: dict[str, dict[str, object]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "GPTNeoX": {},
    "Phi": {},
    "Olmo": {},
    "Gemma": {},
    "Glm": {},  # neighbours in pairs, and a part of each head
}
CHUNK = 32
HEAD = (1, 9, 4)
DOCUMENTS = [[3 + (seed * at * at + 3 * at + seed) % (VOCABULARY - 3) for at in range(CHUNK)] for seed in (7, 11, 13)]
QUESTION = [5, 6, 7, 8, 9]
CHUNK_SIZES = {"minimum": 16, "mean": CHUNK, "maximum": 64}


def made(name: str, **changes: object) -> Any:
    return tiny_model(tiny_config(getattr(transformers, f"{name}Config"), **FAMILIES.get(name, {}) | changes))


def certificate(tmp_path: Path, of: Any, share: float = 0.25, **changes: Any) -> Path:
    """As `lmcache-core quality --blend` writes it."""
    row = {
        "lossy": Conditions(share, 16, 64, len(HEAD)).lossy(),
        "divergence": {"mean": 0.01, "deviation": 0.0},
        "agreement": {"mean": 1.0, "deviation": 0.0},
        "steps": [{"deviation": 100.0, "divergence": 0.01}],
    }
    whole = {"format": 1, "model": "tiny", "weights": "", "dtype": str(of.dtype).removeprefix("torch.")}
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(whole | {"chains": [row]} | changes))
    return file


def blending(client: Client, model: Any, file: Path, share: float = 0.25, **changes: Any) -> CachedGenerator:
    how = Blending(**{"share": share, "prefix_tokens": HEAD, "divergence_max": 0.1, **CHUNK_SIZES, **changes})
    options: dict[str, Any] = {"model_name": "tiny", "chunk_tokens": 16, "reuse": "blend", "blending": how}
    return CachedGenerator(model, None, client, certificate=file, **options)


def logits_of(model: Any, tokens: Sequence[int]) -> Any:
    return torch.stack(plain(model, list(tokens)).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tokens_computed_over_a_cache_in_any_order_are_those_of_the_full_prefill(name: str, dtype: str) -> None:
    model = made(name).to(getattr(torch, dtype))
    geometry = geometry_of(model)
    rope_of(model, geometry)  # which moves keys of every layer, and raises where they are not what is computed there
    tokens = torch.tensor([*HEAD, *DOCUMENTS[0], *QUESTION])
    whole = cache_with_room(geometry, len(tokens))
    with torch.no_grad():
        wanted = model(input_ids=tokens[None], **cache_argument(model, whole)).logits[0].float()
    rooms = [room for room in rooms_of(whole) if room is not None]
    step = {"float32": 2e-5, "bfloat16": 0.03}[dtype] * float(wanted.abs().max())
    everything = torch.arange(len(tokens))
    for kept in (everything[:0], everything[[20, 3, 30, 4, 0, 5]], everything[:30].flip(0)):
        cache = cache_with_room(geometry, len(tokens))
        new = everything[~torch.isin(everything, kept)]
        layers = [(each.keys[0][:, kept], each.values[0][:, kept]) for each in rooms]
        got = blend_into(model, cache, tokens.tolist(), kept, layers, logits=len(new)).float()
        assert float((got - wanted[new]).abs().max()) <= step


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_second_layer_is_the_full_prefills(name: str) -> None:
    model = made(name)
    geometry = geometry_of(model)
    tokens = torch.tensor([*HEAD, *DOCUMENTS[0]])
    whole, prefix = cache_with_room(geometry, len(tokens)), cache_with_room(geometry, len(HEAD))
    with torch.no_grad():
        model(input_ids=tokens[None], **cache_argument(model, whole))
        model(input_ids=tokens[None, : len(HEAD)], **cache_argument(model, prefix))
    keys, values = second_layer(model, geometry, prefix, tokens[len(HEAD) :].tolist())
    layer = whole.layers[1]
    for got, wanted in ((keys, layer.keys), (values, layer.values)):
        assert torch.allclose(got, wanted[0, :, len(HEAD) :], rtol=1e-4, atol=1e-5)
    assert prefix.get_seq_length() == len(HEAD)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_documents_in_another_order_are_blended_and_all_recomputed_is_exact(
    client: Client, tmp_path: Path, name: str
) -> None:
    model = made(name)
    for share in (0.25, 1.0):
        generator = blending(client, model, certificate(tmp_path, model, share), share)
        stored = generator.store_documents(DOCUMENTS)
        assert stored == (3 if share < 1 else 0)
        prompt = generator.prompt(HEAD, [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]], QUESTION)
        got = generator.generate(prompt, **GREEDY)
        (what,) = got.blended
        wanted = logits_of(model, prompt.tokens)
        error = float((torch.stack(got.output.logits)[0] - wanted[0]).abs().max() / wanted[0].abs().max())
        if share < 1:  # the document in front stands where it was computed
            recomputed = len(DOCUMENTS) * CHUNK // 4
            assert what[:4] == (CHUNK, CHUNK * 2 - recomputed, recomputed, "")
            assert got.tokens_reused == (CHUNK * 3 - recomputed,)
            assert what.deviation > 0
            assert error > 0
        else:
            assert what[:4] == (0, 0, 0, "only 0 tokens would be kept")
            assert error < 1e-5
            exact = CachedGenerator(model, None, client, model_name="tiny", chunk_tokens=16)
            same = exact.generate(list(prompt.tokens), **GREEDY)
            assert all(map(torch.equal, got.output.logits, same.output.logits))


def test_a_passage_that_a_document_repeats_is_computed_once(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, computed = made("Llama"), []
    generator = blending(client, model, certificate(tmp_path, model), minimum=CHUNK, maximum=CHUNK)
    monkeypatch.setattr(blender, "compute_chunk", lambda *given: computed.append(given[-1]) or compute_chunk(*given))
    assert generator.store_documents([DOCUMENTS[0] * 3 + DOCUMENTS[1]]) == 2
    assert computed == [DOCUMENTS[0], DOCUMENTS[1]]


def test_a_lone_document_where_it_was_computed_is_exact(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    generator = blending(client, model, certificate(tmp_path, model, 0.0), 0.0)
    generator.store_documents(DOCUMENTS)
    prompt = generator.prompt(HEAD, [DOCUMENTS[1]], QUESTION)
    got = generator.generate(prompt, **GREEDY)
    assert got.blended[0][:4] == (CHUNK, 0, 0, "")
    assert torch.allclose(torch.stack(got.output.logits), logits_of(model, prompt.tokens), rtol=1e-4, atol=1e-4)


def test_a_blended_prompt_is_never_stored_as_a_prefix(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    generator = blending(client, model, certificate(tmp_path, model))
    generator.store_documents(DOCUMENTS)
    prompt = generator.prompt(HEAD, [DOCUMENTS[2], DOCUMENTS[1]], QUESTION)
    for _ in range(2):
        assert generator.generate(prompt, **GREEDY).blended[0].why == ""
    assert generator.prefixes.load(list(prompt.tokens)).tokens_reused == 0
    exact = CachedGenerator(model, None, client, model_name="tiny", chunk_tokens=16)
    got = exact.generate(list(prompt.tokens), **GREEDY)
    assert (got.tokens_reused, got.blended) == ((0,), ())
    assert torch.allclose(torch.stack(got.output.logits), logits_of(model, prompt.tokens), rtol=1e-4, atol=1e-4)
    prefixed = generator.generate(prompt, **GREEDY)  # now the prefix is there, and goes before everything else
    assert prefixed.blended[0].reused_exact == len(prompt.tokens) // 16 * 16
    assert all(map(torch.equal, prefixed.output.logits, got.output.logits))


def test_prompts_that_deviate_more_than_was_measured_are_computed_in_full(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    row = json.loads(certificate(tmp_path, model).read_text())["chains"][0]
    steps = [{"deviation": 1e-6, "divergence": 0.01}, {"deviation": 100.0, "divergence": 0.2}]
    generator = blending(client, model, certificate(tmp_path, model, chains=[row | {"steps": steps}]))
    generator.store_documents(DOCUMENTS)
    prompt = generator.prompt(HEAD, [DOCUMENTS[2], DOCUMENTS[1]], QUESTION)
    got = generator.generate(prompt, **GREEDY)
    assert "in the second layer, and the certificate holds up to 0.000" in got.blended[0].why
    assert got.blended[0].reused_blended == got.blended[0].recomputed == 0
    assert got.output.sequences.tolist() == plain(model, list(prompt.tokens)).sequences.tolist()


def test_weights_that_change_are_other_chunks(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    generator = blending(client, model, certificate(tmp_path, model))
    assert generator.store_documents(DOCUMENTS) == 3
    assert generator.store_documents(DOCUMENTS) == 0
    prompt = generator.prompt((*HEAD, 8), DOCUMENTS, QUESTION)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    assert generator.generate(prompt, **GREEDY).blended[0].why == "no chunk behind the prefix is stored"
    assert generator.store_documents(DOCUMENTS) == 3
    again = blending(client, model, certificate(tmp_path, model))
    client.clear(again.prefixes.namespace)
    got, fresh = generator.generate(prompt, **GREEDY), again.generate(prompt, **GREEDY)
    assert got.blended[0].why == ""
    assert got.blended == fresh.blended
    assert all(map(torch.equal, got.output.logits, fresh.output.logits))


def test_batches_and_static_caches_blend_as_each_prompt_alone(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    generator = blending(client, model, certificate(tmp_path, model))
    generator.store_documents(DOCUMENTS)
    prompts = [
        generator.prompt(HEAD, [DOCUMENTS[2], DOCUMENTS[1]], QUESTION),
        generator.prompt(HEAD, [DOCUMENTS[0]], QUESTION[:2]),
        generator.prompt(HEAD, [], QUESTION),
    ]
    alone = [generator.generate(each, **GREEDY).answers[0] for each in prompts]
    for kind in (None, "static"):
        got = generator.generate(prompts, cache_implementation=kind, **GREEDY)
        assert got.answers == alone
        assert [each.why for each in got.blended] == ["", "", "no chunk behind the prefix is stored"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Mistral", {"sliding_window": 24}, "sliding windows"),
        ("Gemma2", {}, "sliding windows"),
        ("DeepseekV3", {}, "latent attention"),
        ("GPT2", {}, "does not rotate its keys"),
        ("Bloom", {}, "takes no position_ids"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "length"),
        ("Llama", {"num_hidden_layers": 1}, "it has one layer"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "does not rotate the keys of some layers"),
    ],
)
def test_models_that_cannot_blend_are_refused_in_words(
    client: Client, tmp_path: Path, name: str, changes: dict[str, object], words: str
) -> None:
    model = made(name, **changes)
    with pytest.raises(UsageError, match=words):
        blending(client, model, certificate(tmp_path, model))


def test_attention_that_ignores_the_mask_is_refused() -> None:
    model = made("Llama")
    model.register_forward_pre_hook(
        lambda module, given, named: (given, named | {"attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(UsageError, match="does not follow a mask by position"):
        rope_of(model, geometry_of(model))


def test_without_a_certificate_that_does_nothing_blends(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    options: dict[str, Any] = {"model_name": "tiny", "reuse": "blend", "blending": Blending(0.25, HEAD, **CHUNK_SIZES)}
    with pytest.raises(SettingsError, match="needs a certificate") as raised:
        CachedGenerator(model, None, client, **options)
    assert "lmcache-core quality MODEL --blend 0.25 --chunk-tokens 16 32 64 --certificate" in raised.value.cure
    row = json.loads(certificate(tmp_path, model).read_text())["chains"][0]
    for changes, words in (
        ({"chains": []}, "certifies nothing"),
        ({"chains": [row, row | {"divergence": {"mean": 9.0, "deviation": 0}}]}, "two rows of the same conditions"),
        ({"dtype": "float16"}, "is for KV in float16"),
        ({"model": "other"}, "is for the model other"),
        ({"weights": "0" * 64}, "is for the model tiny@"),
        ({"chains": [row | {"divergence": {"mean": 0.2, "deviation": 0}}]}, "a divergence of 0.2000"),
        (
            {"chains": [row | {"divergence": {"mean": float("nan"), "deviation": 0}}]},
            "no certificate|a divergence of nan",
        ),
        ({"chains": [row | {"agreement": {"mean": 0.1, "deviation": 0}}]}, "the same token in 0.1000"),
        ({"chains": [row | {"steps": []}]}, "says of no deviation"),
        ({"chains": [row | {"steps": [{"deviation": "much"}]}]}, "is no certificate"),
        ({"format": 2}, "has format 2"),
    ):
        file = certificate(tmp_path, model, **changes)
        with pytest.raises((SettingsError, UsageError), match=words):
            CachedGenerator(model, None, client, certificate=file, **options)
    with pytest.raises(SettingsError, match="and not"):
        blending(client, model, certificate(tmp_path, model, 0.5))
    CachedGenerator(model, None, client, certificate=certificate(tmp_path, model), **options)


def test_what_makes_no_sense_is_refused(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    generator = CachedGenerator(model, None, client, model_name="tiny")
    with pytest.raises(UsageError, match="make the generator with it"):
        generator.store_documents(DOCUMENTS)
    with pytest.raises(UsageError, match='use "prefix" or "blend"'):
        CachedGenerator(model, None, client, model_name="tiny", reuse="all")
    with pytest.raises(UsageError, match="blending is for"):
        CachedGenerator(model, None, client, model_name="tiny", blending=Blending())
    with pytest.raises(UsageError, match="some prompts have marks"):
        generator.generate([generator.prompt(HEAD, DOCUMENTS, QUESTION), QUESTION], **GREEDY)
    with pytest.raises(UsageError, match="in no certificate"):
        CachedGenerator(model, None, client, model_name="tiny", codec="int8", reuse="blend")
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="from 0 to 1"):
            Blending(share=share)
    with pytest.raises(UsageError, match="divergence_max"):
        Blending(divergence_max=float("nan"))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_tokens_kept_in_any_order_give_the_full_prefill(data: st.DataObject) -> None:
    model, geometry, tokens, whole, wanted = _computed_once()
    count = len(tokens)
    held = data.draw(st.integers(0, count - 1))
    kept = data.draw(st.permutations(range(held, count - 1)).flatmap(lambda all_: _some_first(all_)))
    rooms = [room for room in rooms_of(whole) if room is not None]
    cache, rows = cache_with_room(geometry, count), torch.tensor(kept, dtype=torch.long)
    add_kept(cache, [(each.keys[0][:, :held], each.values[0][:, :held]) for each in rooms])
    layers = [(each.keys[0][:, rows], each.values[0][:, rows]) for each in rooms]
    got = blend_into(model, cache, tokens, rows, layers)
    assert cache.get_seq_length() == count
    assert torch.allclose(got[-1], wanted, rtol=1e-3, atol=1e-4)


def _some_first(given: list[int]) -> st.SearchStrategy[list[int]]:
    return st.integers(0, len(given)).map(lambda count: given[:count])


@cache
def _computed_once() -> Any:
    model = made("Qwen3")
    geometry, tokens = geometry_of(model), [*HEAD, *DOCUMENTS[0][:20], *QUESTION]
    whole = cache_with_room(geometry, len(tokens))
    return model, geometry, tokens, whole, compute(model, whole, tokens)[-1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=60),
    st.floats(0, 1),
    st.integers(0, 8),
    st.sets(st.integers(0, 59)),
)
def test_as_many_are_chosen_as_the_share_says_and_none_deviates_more(
    given_deviation: list[float], share: float, first_tokens: int, begins: set[int]
) -> None:
    deviation = torch.tensor(given_deviation)
    starts = sorted(each for each in begins if each < len(deviation))
    again = chosen(deviation, starts, share, first_tokens)
    assert int(again.sum()) == round(share * len(deviation))
    floor = min(first_tokens, round(share * len(deviation)) // max(1, len(starts)))
    first = torch.zeros_like(again)
    for start in starts:
        first[start : start + floor] = True
    rest = deviation[again & ~first]
    if len(rest) and not bool(again.all()):
        assert float(rest.min()) >= float(deviation[~again].max())


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf"), 1e4])
def test_wrong_numbers_in_stored_chunks_are_seen_before_they_are_used(
    client: Client, tmp_path: Path, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_transformers.blend import blender

    model = made("Llama")
    row = json.loads(certificate(tmp_path, model).read_text())["chains"][0]
    steps = [{"deviation": 0.5, "divergence": 0.01}]
    generator = blending(client, model, certificate(tmp_path, model, chains=[row | {"steps": steps}]))

    def computed(*given: Any) -> Any:
        return [
            (torch.full_like(keys, wrong), torch.full_like(values, wrong)) for keys, values in compute_chunk(*given)
        ]

    monkeypatch.setattr(blender, "compute_chunk", computed)
    generator.store_documents(DOCUMENTS)
    prompt = generator.prompt((*HEAD, 8), DOCUMENTS, QUESTION)
    got = generator.generate(prompt, **GREEDY)
    assert "in the second layer, and the certificate holds up to 0.500" in got.blended[0].why
    assert got.output.sequences.tolist() == plain(model, list(prompt.tokens)).sequences.tolist()


def test_tokens_are_chosen_by_deviation_with_a_floor_at_each_beginning() -> None:
    deviation = torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0, 9.0, 0.0, 0.0, 0.0, 1.0])
    assert chosen(deviation, [0, 5], 0.0, 2).sum() == 0
    assert chosen(deviation, [0, 5], 0.2, 1).nonzero().flatten().tolist() == [0, 5]
    assert chosen(deviation, [0, 5], 0.4, 1).nonzero().flatten().tolist() == [0, 3, 5, 9]
    assert chosen(deviation, [0, 5], 1.0, 4).all()
    assert chosen(deviation, [0, 5], 0.1, 4).nonzero().flatten().tolist() == [5]  # the share does not reach for both
    same = torch.ones(2, 4, 3)
    assert deviations(same, same, same, same).tolist() == [0.0] * 4
    assert deviations(same, same, -same, -same).tolist() == [2.0] * 4


def test_a_certificate_holds_up_to_the_first_step_that_diverges_too_much() -> None:
    steps = steps_of([(0.1 * at, 0.01 * at) for at in range(9, -1, -1)], size=5)
    assert steps == [Step(0.4, pytest.approx(0.02)), Step(0.9, pytest.approx(0.07))]
    assert [deviation_max(steps, each) for each in (0.01, 0.05, 0.1)] == [0.0, 0.4, pytest.approx(0.9)]
    assert deviation_max([Step(0.1, float("nan")), Step(0.2, 0.0)], 1.0) == 0.0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_a_question_looks_at_is_what_the_model_says(name: str, attention: str) -> None:
    model = made(name)
    model.set_attn_implementation("eager")
    geometry, tokens = geometry_of(model), [*HEAD, *DOCUMENTS[0], *QUESTION]
    base, end = len(HEAD), len(HEAD) + CHUNK
    with torch.no_grad():
        attentions = model(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    wanted = sum(each[0, :, end:, base:end].sum(dim=(0, 1)) for each in attentions[len(attentions) // 3 :])
    model.set_attn_implementation(attention)
    whole, prefix = cache_with_room(geometry, end), cache_with_room(geometry, base)
    compute(model, whole, tokens[:end])
    compute(model, prefix, HEAD)
    rooms = [room for room in rooms_of(whole) if room is not None]
    backwards = torch.arange(end - 1, base - 1, -1)  # the order in which tokens are held makes no difference
    layers = [(each.keys[0][:, backwards], each.values[0][:, backwards]) for each in rooms]
    found = paid_to(model, geometry, prefix, backwards, layers, QUESTION, end)
    assert torch.allclose(found.flip(0), wanted, rtol=1e-3, atol=1e-5)
    assert prefix.get_seq_length() == base


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Glm", "GPTNeoX"])
def test_long_prompts_are_computed_in_pieces_whose_masks_are_bounded(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(name)
    model.set_attn_implementation(attention)
    geometry, tokens = geometry_of(model), [*HEAD, *DOCUMENTS[0], *DOCUMENTS[1], *QUESTION]
    masks: list[int] = []
    by_position = forward.mask_by_position
    monkeypatch.setattr(
        forward, "mask_by_position", lambda *given: masks.append((mask := by_position(*given)).numel()) or mask
    )
    everything, whole = torch.arange(len(tokens)), cache_with_room(geometry, len(tokens))
    compute(model, whole, tokens)
    rooms = [room for room in rooms_of(whole) if room is not None]
    kept = everything[[40, 7, 33, 2, 11, 5, 60]]
    layers = [(each.keys[0][:, kept], each.values[0][:, kept]) for each in rooms]
    empty = cache_with_room(geometry, 0)
    found = []
    for pairs in (1 << 25, 10 * len(tokens)):
        monkeypatch.setattr(forward, "PAIRS_MAX", pairs)
        cache = cache_with_room(geometry, len(tokens))
        logits = blend_into(model, cache, tokens, kept, layers, logits=23)
        first = len(tokens) - len(QUESTION)
        paid = paid_to(model, geometry, empty, kept, layers, [*QUESTION] * 5, first)
        found.append([logits, paid, *(each.keys[:, :, : len(tokens)] for each in rooms_of(cache) if each is not None)])
    assert masks[:2] == [(len(tokens) - 7) * len(tokens), 25 * 32]
    assert len(masks) == 2 + 7 + 2
    assert max(masks[2:]) <= 10 * len(tokens)
    for one, many in zip(*found, strict=True):
        assert one.shape == many.shape
        assert torch.allclose(one, many, rtol=1e-4, atol=1e-5)


def test_attention_that_cannot_be_watched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Llama")

    def by_itself(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        heads = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(heads, 1).transpose(-2, -1) * named["scaling"]
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(key.shape[2] - query.shape[2] + 1)
        weights = (scores.masked_fill(later, -torch.inf) if mask is None else scores + mask).exp()
        found = weights / weights.sum(dim=-1, keepdim=True) @ value.repeat_interleave(heads, 1)
        return found.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("by_itself", by_itself)
    model.set_attn_implementation("by_itself")
    with pytest.raises(UsageError, match="0 calls of attention were seen in 2 layers"):
        rope_of(model, geometry_of(model))


def test_certificates_cover_chunks_between_those_that_were_measured() -> None:
    measured = [Conditions(0.15, size, size, 32) for size in (64, 256, 1024)] + [Conditions(0.5, 1, 2048, 32)]

    def sizes(shortest: int, longest: int, prefix_tokens: int = 32, share: float = 0.15) -> list[int]:
        found = covering(Conditions(share, shortest, longest, prefix_tokens), measured)
        return [each.longest for each in found]

    assert sizes(64, 1024) == [64, 256, 1024]
    assert sizes(256, 256, 50) == [256]
    assert sizes(300, 300) == [256, 1024]
    assert sizes(63, 256) == sizes(64, 1025) == sizes(64, 64, 31) == sizes(64, 64, 32, 0.2) == []
    assert sizes(64, 1024, share=0.5) == [2048]
    for wrong in (
        [],
        [("int8", {})],
        [*measured[0].lossy(), ("int8", {})],
        [("blend", {**measured[0].lossy()[0][1], "format": 1})],
        [("blend", {**measured[0].lossy()[0][1], "first_tokens": 5})],
        [("blend", {**measured[0].lossy()[0][1], "longest": "64"})],
        [("blend", {**measured[0].lossy()[0][1], "longest": 64.5})],
        [("blend", {**measured[0].lossy()[0][1], "more": 1})],
        [("blend", {"format": 2, "first_tokens": 4})],
    ):
        assert Conditions.read(wrong) is None
    assert [Conditions.read(each.lossy()) for each in measured] == measured


def test_chunks_of_lengths_that_nobody_measured_are_computed(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    row = json.loads(certificate(tmp_path, model).read_text())["chains"][0]
    rows = [row | {"lossy": Conditions(0.25, size, size, len(HEAD)).lossy()} for size in (CHUNK, 64)]
    with pytest.raises(SettingsError, match="certifies"):
        blending(client, model, certificate(tmp_path, model, chains=rows))
    generator = blending(client, model, certificate(tmp_path, model, chains=rows), minimum=CHUNK)
    short = DOCUMENTS[1][: CHUNK - 1]  # what is left of a document is a chunk, however short
    assert generator.store_documents([DOCUMENTS[0], DOCUMENTS[2], short]) == 2
    everything = blending(client, model, certificate(tmp_path, model))
    assert everything.store_documents([short]) == 1
    prompt = generator.prompt(HEAD, [short, DOCUMENTS[2], DOCUMENTS[0]], QUESTION)
    assert generator.generate(prompt, **GREEDY).blended[0][:4] == (0, CHUNK * 3 // 2, CHUNK // 2, "")


@pytest.mark.parametrize("moment", ["killed", "evicted", "without a server"])
def test_chunks_that_go_between_find_and_read_are_misses(
    request: pytest.FixtureRequest, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = request.getfixturevalue("process")
    model = made("Llama")
    generator = blending(client, model, certificate(tmp_path, model))
    assert generator.store_documents(DOCUMENTS) == 3
    prompt = generator.prompt(HEAD, [DOCUMENTS[2], DOCUMENTS[0]], QUESTION)
    before = generator.generate(prompt, **GREEDY)
    assert before.blended[0].reused_blended > 0
    from lmcache_blend import Chunks

    find = Chunks.find

    def found(self: Chunks, *given: Any, **named: Any) -> Any:
        result = find(self, *given, **named)
        assert len(result.matches) == 2
        if moment == "evicted":
            client.clear()
        else:
            server.send_signal(signal.SIGKILL)
            server.wait(60)
        return result

    if moment == "without a server":
        server.send_signal(signal.SIGKILL)
        server.wait(60)
    else:
        monkeypatch.setattr(Chunks, "find", found)
    got = generator.generate(prompt, **GREEDY)
    if moment != "evicted" and not got.blended[0].why:  # the pool is still mapped, with every byte that was in it
        assert got.blended == before.blended
        assert all(map(torch.equal, got.output.logits, before.output.logits))
        return
    assert got.blended[0][:4] == (0, 0, 0, "no chunk behind the prefix is stored")
    assert got.output.sequences.tolist() == plain(model, list(prompt.tokens)).sequences.tolist()


def test_prompts_without_marks_find_chunks_that_were_cut_by_content(client: Client, tmp_path: Path) -> None:
    model = made("Llama")
    generator = blending(client, model, certificate(tmp_path, model))
    chance = torch.Generator().manual_seed(5)
    text = torch.randint(3, VOCABULARY, (140,), generator=chance).tolist()
    assert generator.store_documents([text]) > 2
    got = generator.generate([4, 5, 6, 7, *text, *QUESTION], **GREEDY)
    assert got.blended[0].why == ""
    assert got.blended[0].reused_blended + got.blended[0].recomputed > 60


@pytest.mark.slow
def test_a_trained_model_with_all_recomputed_is_the_full_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    from lmcache_transformers import smollm2
    from lmcache_transformers.quality.blending import Trial, frame_of
    from lmcache_transformers.quality.prompts import make_prompts, shipped

    try:
        folder = smollm2.folder()
    except UsageError as error:
        pytest.skip(str(error))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    geometry = geometry_of(model)
    frame = frame_of(transformers.AutoTokenizer.from_pretrained(folder))
    trial = Trial(model, geometry, frame, rope_of(model, geometry), 4)
    (prompt,) = make_prompts(shipped(), "apart", 1, 3, 64)
    kept, half, nothing_kept = trial.run(trial.cut(prompt, 64), (0.0, 0.5, 1.0))
    assert nothing_kept.divergence < 1e-5
    assert nothing_kept.agreement == nothing_kept.same_answer == 1
    assert nothing_kept.divergence < half.divergence < kept.divergence < 1
