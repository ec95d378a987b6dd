"""The definition of "served exactly"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tiny_models import VOCABULARY

from lmcache_core import Client
from lmcache_transformers import CachedGenerator
from lmcache_transformers.geometry import cache_argument
from lmcache_transformers.support import counts_positions_by_cache

if TYPE_CHECKING:
    import transformers

CHUNK = 16
DOCUMENT = [3 + (7 * i * i + 3 * i) % (VOCABULARY - 3) for i in range(3 * CHUNK)]
QUESTIONS = ([5, 6, 7, 8, 9], [9, 8, 7])
GREEDY: dict[str, object] = {
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def plain(model: transformers.PreTrainedModel, tokens: list[int], **options: Any) -> Any:
    """Without any cache of ours."""
    ids = torch.tensor([tokens])
    return model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **GREEDY | options)


def prove(client: Client, model: transformers.PreTrainedModel, name: str) -> str:
    """Why the model is not served exactly; empty: it is. Answers of a second run, over a cached prefix, have the bits
    of the first, and those of another question the tokens and, but for rounding, the logits of `model.generate` alone;
    so have both in a batch; and they do depend on the cached KV."""
    generator = CachedGenerator(model, None, client, model_name=name, chunk_tokens=CHUNK, unproven_ok=True)
    first, second = (DOCUMENT + question for question in QUESTIONS)
    cold, warm = generator.generate(first, **GREEDY), generator.generate(first, **GREEDY)
    if (cold.tokens_reused, warm.tokens_reused) != ((0,), (len(DOCUMENT),)):
        return f"reused {cold.tokens_reused} and then {warm.tokens_reused} tokens"
    if not all(map(torch.equal, cold.output.logits, warm.output.logits)):
        return "the logits over a cached prefix are not those of the first run"
    for tokens in (first, second):
        got, wanted = generator.generate(tokens, **GREEDY), plain(model, tokens)
        if got.output.sequences.tolist() != wanted.sequences.tolist():
            return "the answer over a cached prefix is not the model's own"
        ours, theirs = torch.stack(got.output.logits), torch.stack(wanted.logits)
        if float((ours - theirs).abs().max()) > 1e-4 * max(1.0, float(theirs.abs().max())):
            return "the logits over a cached prefix are not the model's own"
    if not counts_positions_by_cache(model):
        batch = generator.generate([second, first], **GREEDY).answers
        if batch != [plain(model, each).sequences[0, len(each) :].tolist() for each in (second, first)]:
            return "the answers of a batch of two lengths are not the model's own"
    prefix = generator.prefixes.load(second)
    for layer in prefix.cache.layers:
        if layer.keys is not None:
            layer.room.keys.zero_()
            layer.room.values.zero_()
    with torch.no_grad():
        zeroed = model(input_ids=torch.tensor([QUESTIONS[1]]), **cache_argument(model, prefix.cache)).logits[0, -1]
    return "" if float((zeroed - theirs[0, 0]).abs().max()) > 1e-3 else "zeroed KV changes nothing"
