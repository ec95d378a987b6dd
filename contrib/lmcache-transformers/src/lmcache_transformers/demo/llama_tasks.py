"""What a worker does with a Llama of transformers: answer, answer with the cache, or hold slots until it is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmcache_core.client.results import Status
from lmcache_transformers.demo.job import Job
from lmcache_transformers.demo.model import FirstToken, build_model, document_tokens, greedily
from lmcache_transformers.generator import CachedGenerator
from lmcache_transformers.prefix_cache import PrefixCache


def uncached(job: Job) -> dict[str, Any]:
    """Answer without any cache: the reference for every other run."""
    import torch

    model = build_model(job.shape)
    ids = torch.tensor([job.prompt])
    first = FirstToken()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **greedily(job.answer_tokens, first))
    return {"answer": output[0, ids.shape[1] :].tolist(), "first_token_s": first.seconds}


def generate(job: Job) -> dict[str, Any]:
    """Answer with the cached prefix of the prompt, and store the rest; then, if anything was reused, once more with
    zeros in its place."""
    model = build_model(job.shape)
    with job.connect() as client:
        generator = CachedGenerator(
            model, None, client, model_name=job.shape.name, chunk_tokens=job.chunk_tokens, wait_s=job.wait_s
        )
        client.register_layout(generator.prefixes.namespace)
        first = FirstToken()
        answered = generator.generate(job.prompt, **greedily(job.answer_tokens, first))
        reused, moved = answered.tokens_reused[0], answered.moved
        zeroed = _zeroed(model, generator.prefixes, job) if reused else None
    return {
        "answer": answered.answers[0],
        "answer_zeroed": zeroed,
        "first_token_s": first.seconds,
        "tokens_reused": reused,
        "loaded_bytes": moved.loaded_bytes,
        "load_s": moved.load_s,
        "stored_bytes": moved.stored_bytes,
        "store_s": moved.store_s,
    }


def _zeroed(model: Any, prefixes: PrefixCache, job: Job) -> list[int]:
    """The answer if the loaded KV were zeros: a different answer shows that the KV is used."""
    import torch

    cache = prefixes.load(job.prompt).cache
    for layer in cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    ids = torch.tensor([job.prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **greedily(job.answer_tokens, None)
    )
    answer: list[int] = output[0, ids.shape[1] :].tolist()
    return answer


@contextmanager
def hold(job: Job) -> Iterator[dict[str, Any]]:
    """Take slots for a separate document, write all of them, and hold them without commit or abort."""
    model = build_model(job.shape)
    with job.connect() as client:
        prefixes = PrefixCache(client, model, model_name=job.shape.name, chunk_tokens=job.chunk_tokens)
        keys = prefixes.keys(list(reversed(document_tokens(job.document))))
        lease = client.prepare_store(keys, namespace=prefixes.namespace)
        granted = [at for at, status in enumerate(lease.statuses) if status is Status.GRANTED]
        for at in granted:
            lease.tensor(at).fill_(1)
        yield {
            "keys": [key.hex() for key in keys],
            "prompt_keys": [key.hex() for key in prefixes.keys(job.prompt)],
            "granted": len(granted),
            "bytes_held": len(granted) * prefixes.layout.nbytes,
            "model": prefixes.namespace.model,
            "dtype": prefixes.layout.dtype,
            "shape": prefixes.layout.shape,
            "format": prefixes.namespace.format,
        }
