"""One worker process of the demo: reads its job as JSON from the command line, says what it did in one JSON line.

`python -m lmcache_transformers.demo.worker JOB`, where JOB is an object of the fields of `Job`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_transformers.demo.model import (
    FirstToken,
    ModelShape,
    build_model,
    document_tokens,
    greedily,
    question_tokens,
)
from lmcache_transformers.generator import CachedGenerator
from lmcache_transformers.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Job:
    """What a worker does, about which document, with which model, at which server."""

    task: str
    question: int
    document: str
    chunk_tokens: int
    answer_tokens: int
    layers: int
    kv_heads: int
    seed: int
    server: str
    runtime_dir: str
    wait_s: float

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.kv_heads, self.seed)

    @property
    def prompt(self) -> list[int]:
        return document_tokens(self.document) + question_tokens(self.question)

    def connect(self) -> Client:
        return Client.connect(self.server, runtime_dir=self.runtime_dir, client_name=f"demo {self.task}")


def uncached(job: Job) -> dict[str, Any]:
    """Answer without any cache: what every other run is compared with."""
    import torch

    model = build_model(job.shape)
    ids = torch.tensor([job.prompt])
    first = FirstToken()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **greedily(job.answer_tokens, first))
    return {"answer": output[0, ids.shape[1] :].tolist(), "first_token_s": first.seconds}


def generate(job: Job) -> dict[str, Any]:
    """Answer with what is there of the prompt, and store the rest; then, if anything was reused, once more with zeros
    in its place."""
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
    """What would be answered if the KV that was loaded were zeros: that it is not the same shows that it is used."""
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


def hang(job: Job) -> dict[str, Any]:
    """Take slots for a document of its own, write all of them, and wait for the end between prepare and commit."""
    model = build_model(job.shape)
    with job.connect() as client:
        prefixes = PrefixCache(client, model, model_name=job.shape.name, chunk_tokens=job.chunk_tokens)
        keys = prefixes.keys(list(reversed(document_tokens(job.document))))
        lease = client.prepare_store(keys, namespace=prefixes.namespace)
        granted = [at for at, status in enumerate(lease.statuses) if status is Status.GRANTED]
        for at in granted:
            lease.tensor(at).fill_(1)
        found = {
            "keys": [key.hex() for key in keys],
            "prompt_keys": [key.hex() for key in prefixes.keys(job.prompt)],
            "granted": len(granted),
            "bytes_held": len(granted) * prefixes.layout.nbytes,
            "model": prefixes.namespace.model,
            "dtype": prefixes.layout.dtype,
            "shape": prefixes.layout.shape,
            "format": prefixes.namespace.format,
        }
        _say(found)
        # Only a kill ends this, or the end of the demo, which closes the pipe.
        sys.stdin.buffer.read()
    return found


TASKS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "uncached": uncached,
    "generate": generate,
    "hang": hang,
}


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    _say(TASKS[asked.task](asked))
