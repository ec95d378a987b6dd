"""What a worker does with a model of transformers: answer, answer with the cache, or hold slots until it is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmcache_core import Status
from lmcache_transformers.demo.job import Job
from lmcache_transformers.demo.model import (
    QUESTIONS,
    FirstToken,
    RandomLlama,
    SmolLM2,
    greedily,
    shared_tokens,
    warmed_up,
)
from lmcache_transformers.generator import CachedGenerator
from lmcache_transformers.geometry import cache_argument
from lmcache_transformers.prefix_cache import PrefixCache


def uncached(job: Job) -> dict[str, Any]:
    """Answer without any cache: the reference for every other run."""
    import torch

    subject = _subject(job)
    model = warmed_up(subject)
    prompts = [subject.prompt(job.document, number) for number in range(len(QUESTIONS))]
    ids = torch.tensor([prompts[job.question]])
    first = FirstToken()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **greedily(job.answer_tokens, first))
    answer = output[0, ids.shape[1] :].tolist()
    return {
        "answer": answer,
        "text": subject.text(answer),
        "first_token_s": first.seconds,
        "tokens_prompt": ids.shape[1],
        "tokens_shared": shared_tokens(prompts),
    }


def generate(job: Job) -> dict[str, Any]:
    """Answer with the cached prefix of the prompt, and store the rest; then, if anything was reused, once more with
    zeros in its place."""
    subject = _subject(job)
    model, prompt = warmed_up(subject), subject.prompt(job.document, job.question)
    with job.connect() as client:
        generator = CachedGenerator(
            model, None, client, model_name=subject.name, chunk_tokens=job.chunk_tokens, wait_s=job.wait_s
        )
        client.register_layout(generator.prefixes.namespace)
        first = FirstToken()
        answered = generator.generate(prompt, **greedily(job.answer_tokens, first))
        reused, moved = answered.tokens_reused[0], answered.moved
        zeroed = _zeroed(model, generator.prefixes, prompt, job.answer_tokens) if reused else None
    return {
        "answer": answered.answers[0],
        "text": subject.text(answered.answers[0]),
        "tokens_prompt": len(prompt),
        "answer_zeroed": zeroed,
        "first_token_s": first.seconds,
        "tokens_reused": reused,
        "loaded_bytes": moved.loaded_bytes,
        "load_s": moved.load_s,
        "stored_bytes": moved.stored_bytes,
        "store_s": moved.store_s,
    }


def _subject(job: Job) -> RandomLlama | SmolLM2:
    return SmolLM2(job.folder, job.tokens) if job.model == "smollm2" else RandomLlama(job.shape)


def _zeroed(model: Any, prefixes: PrefixCache, prompt: list[int], tokens: int) -> list[int]:
    """The answer if the loaded KV were zeros: a different answer shows that the KV is used."""
    import torch

    cache = prefixes.load(prompt).cache
    for layer in cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), **cache_argument(model, cache), **greedily(tokens, None)
    )
    answer: list[int] = output[0, ids.shape[1] :].tolist()
    return answer


@contextmanager
def hold(job: Job) -> Iterator[dict[str, Any]]:
    """Take slots for a separate document, write all of them, and hold them without commit or abort."""
    subject = _subject(job)
    prompt = subject.prompt(job.document, job.question)
    with job.connect() as client:
        prefixes = PrefixCache(client, subject.model, model_name=subject.name, chunk_tokens=job.chunk_tokens)
        keys = prefixes.keys(list(reversed(prompt)))
        lease = client.prepare_store(keys, namespace=prefixes.namespace)
        granted = [at for at, status in enumerate(lease.statuses) if status is Status.GRANTED]
        for at in granted:
            lease.tensor(at).fill_(1)
        yield {
            "keys": [key.hex() for key in keys],
            "prompt_keys": [key.hex() for key in prefixes.keys(prompt)],
            "granted": len(granted),
            "bytes_held": len(granted) * prefixes.layout.nbytes,
            "model": prefixes.namespace.model,
            "layout": prefixes.layout.text,
            "format": prefixes.namespace.format,
        }
