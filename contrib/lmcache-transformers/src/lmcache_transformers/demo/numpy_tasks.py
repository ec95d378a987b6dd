"""What a worker does without torch, with a decoder in numpy: the tasks of `llama_tasks`, answered in the same form.

The client is called by its plain methods: keys, `lookup`, `retrieve` and `store`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lmcache_core import Client, Status
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace, chunk_keys
from lmcache_transformers.demo.job import Job
from lmcache_transformers.demo.model import HEAD_DIM, QUESTIONS, document_tokens, prompt_of_bytes, shared_tokens
from lmcache_transformers.demo.numpy_model import Floats, NumpyDecoder


def uncached(job: Job) -> dict[str, Any]:
    """Answer without any cache: the reference for every other run."""
    prompts = [prompt_of_bytes(job.document, number) for number in range(len(QUESTIONS))]
    shared = {"tokens_shared": shared_tokens(prompts)}
    return shared | _answered(NumpyDecoder(job.shape), job, None, 0, time.perf_counter())


def generate(job: Job) -> dict[str, Any]:
    """Answer with the cached prefix of the prompt, and store the rest; then, if anything was reused, once more with
    zeros in its place."""
    model, namespace = NumpyDecoder(job.shape), _namespace(job)
    keys = chunk_keys(_prompt(job), namespace, job.chunk_tokens)
    with job.connect() as client:
        client.register_layout(namespace)
        began_s = time.perf_counter()
        kv = model.room(len(_prompt(job)) + job.answer_tokens)
        reused = _load(client, keys, namespace, kv, job) * job.chunk_tokens
        found: dict[str, Any] = {"tokens_reused": reused, "loaded_bytes": reused * job.shape.token_bytes}
        found["load_s"] = time.perf_counter() - began_s
        found |= _answered(model, job, kv, reused, began_s)
        began_s = time.perf_counter()
        found["stored_bytes"] = _store(client, keys, namespace, kv, job, reused // job.chunk_tokens)
        found["store_s"] = time.perf_counter() - began_s
    found["answer_zeroed"] = None
    if reused:  # the answer if the loaded KV were zeros: a different answer shows that the KV is used
        found["answer_zeroed"] = _answered(model, job, np.zeros_like(kv), reused, began_s)["answer"]
    return found


@contextmanager
def hold(job: Job) -> Iterator[dict[str, Any]]:
    """Take slots for a separate document, write all of them, and hold them without commit or abort."""
    namespace = _namespace(job)
    keys = chunk_keys(list(reversed(document_tokens(job.document))), namespace, job.chunk_tokens)
    with job.connect() as client:
        lease = client.prepare_store(keys, namespace=namespace)
        granted = [at for at, status in enumerate(lease.statuses) if status is Status.GRANTED]
        for at in granted:
            np.frombuffer(lease.view(at), dtype=np.float32).fill(1)
        yield {
            "keys": [key.hex() for key in keys],
            "prompt_keys": [key.hex() for key in chunk_keys(_prompt(job), namespace, job.chunk_tokens)],
            "granted": len(granted),
            "bytes_held": len(granted) * namespace.layout.nbytes,
            "model": namespace.model,
            "layout": namespace.layout.text,
            "format": namespace.format,
        }


def _prompt(job: Job) -> list[int]:
    return prompt_of_bytes(job.document, job.question)


def _namespace(job: Job) -> Namespace:
    """One object: the KV of `chunk_tokens` tokens in all layers, axes `LKHTD`."""
    layout = Layout("float32", (job.layers, 2, job.kv_heads, job.chunk_tokens, HEAD_DIM))
    return Namespace(f"numpy-{job.shape.name}", layout, format=f"numpy LKHTD {job.chunk_tokens} float32")


def _load(client: Client, keys: list[bytes], namespace: Namespace, kv: Floats, job: Job) -> int:
    """How many chunks from the first on are in `kv` now; of the whole prompt one token is left to compute."""
    keys = keys[: (len(_prompt(job)) - 1) // job.chunk_tokens]
    hits = client.lookup(keys, namespace=namespace, wait_s=job.wait_s).hits
    chunks = [np.empty(namespace.layout.shape, dtype=np.float32) for _ in range(hits)]
    hits = client.retrieve(keys[:hits], chunks, namespace=namespace).hits
    for number, chunk in enumerate(chunks[:hits]):
        kv[..., number * job.chunk_tokens : (number + 1) * job.chunk_tokens, :] = chunk
    return hits


def _store(client: Client, keys: list[bytes], namespace: Namespace, kv: Floats, job: Job, first: int) -> int:
    """Store the whole chunks of the prompt from chunk `first` on. Returns how many bytes were written."""
    numbers = range(first, len(keys))
    chunks = [
        np.ascontiguousarray(kv[..., number * job.chunk_tokens : (number + 1) * job.chunk_tokens, :])
        for number in numbers
    ]
    return client.store(keys[first:], chunks, namespace=namespace).stored * namespace.layout.nbytes


def _answered(model: NumpyDecoder, job: Job, kv: Floats | None, reused: int, began_s: float) -> dict[str, Any]:
    """Compute the prompt from token `reused` on and answer greedily. Steps end where chunks end, with the cache and
    without it, so both give the same bits.
    """
    prompt = _prompt(job)
    kv = model.room(len(prompt) + job.answer_tokens) if kv is None else kv
    token = 0
    for at in range(reused, len(prompt), job.chunk_tokens):
        token = model.forward(prompt[at : at + job.chunk_tokens], kv, at)
    first_token_s = time.perf_counter() - began_s
    answer = [token]
    while len(answer) < job.answer_tokens:
        answer.append(model.forward(answer[-1:], kv, len(prompt) + len(answer) - 1))
    text = " ".join(map(str, answer))
    return {"answer": answer, "text": text, "first_token_s": first_token_s, "tokens_prompt": len(prompt)}
