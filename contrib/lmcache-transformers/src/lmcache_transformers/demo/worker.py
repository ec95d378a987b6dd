"""One worker process of the demo: reads its job as JSON from the command line, says what it did in one JSON line.

`python -m lmcache_transformers.demo.worker JOB`, where JOB is an object of the fields of `Job`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_transformers.chunks import write_chunks
from lmcache_transformers.demo.model import ModelShape, answer, build_model, document_tokens, question_tokens
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

    def prefix_cache(self, client: Client, model: Any) -> PrefixCache:
        return PrefixCache(
            client, model, model_name=self.shape.name, chunk_tokens=self.chunk_tokens, wait_s=self.wait_s
        )

    def connect(self) -> Client:
        return Client.connect(self.server, runtime_dir=self.runtime_dir, client_name=f"demo {self.task}")


def uncached(job: Job) -> dict[str, Any]:
    """Answer without any cache: what every other run is compared with."""
    model = build_model(job.shape)
    started_s = time.perf_counter()
    answered = answer(model, write_chunks([]), job.prompt, job.answer_tokens, started_s)
    return {"answer": answered.tokens, "first_token_s": answered.first_token_s}


def store(job: Job) -> dict[str, Any]:
    """Look the prompt up (nothing is there), compute it, answer, store its KV."""
    model = build_model(job.shape)
    prompt = job.prompt
    with job.connect() as client:
        prefixes = job.prefix_cache(client, model)
        client.register_layout(prefixes.namespace)
        started_s = time.perf_counter()
        prefix = prefixes.load(prompt)
        answered = answer(model, prefix.cache, prompt[prefix.tokens_reused :], job.answer_tokens, started_s)
        moving_s = time.perf_counter()
        stored = prefixes.store(prompt, prefix.cache)
        moved_s = time.perf_counter()
    return {
        "answer": answered.tokens,
        "first_token_s": answered.first_token_s,
        "tokens_reused": prefix.tokens_reused,
        "chunks_written": stored.chunks_written,
        "bytes_moved": stored.nbytes,
        "move_s": moved_s - moving_s,
    }


def reuse(job: Job) -> dict[str, Any]:
    """Load the prefix, compute the rest, answer; then once more with a prefix of zeros."""
    import torch

    model = build_model(job.shape)
    prompt = job.prompt
    with job.connect() as client:
        prefixes = job.prefix_cache(client, model)
        client.register_layout(prefixes.namespace)
        started_s = time.perf_counter()
        prefix = prefixes.load(prompt)
        moved_s = time.perf_counter()
        rest = prompt[prefix.tokens_reused :]
        answered = answer(model, prefix.cache, rest, job.answer_tokens, started_s)
    nothing = torch.zeros(prefixes.layout.shape, dtype=model.dtype)
    blank = write_chunks([nothing] * (prefix.tokens_reused // job.chunk_tokens))
    zeroed = answer(model, blank, rest, job.answer_tokens, time.perf_counter())
    return {
        "answer": answered.tokens,
        "answer_zeroed": zeroed.tokens,
        "first_token_s": answered.first_token_s,
        "tokens_reused": prefix.tokens_reused,
        "bytes_moved": prefix.nbytes,
        "move_s": moved_s - started_s,
    }


def hang(job: Job) -> dict[str, Any]:
    """Take slots for a document of its own, write all of them, and wait for the end between prepare and commit."""
    model = build_model(job.shape)
    with job.connect() as client:
        prefixes = job.prefix_cache(client, model)
        keys = prefixes.keys(list(reversed(document_tokens(job.document))))
        lease = client.prepare_store(keys, namespace=prefixes.namespace)
        granted = [at for at, status in enumerate(lease.statuses) if status is Status.GRANTED]
        for at in granted:
            lease.tensor(at).fill_(1.0)
        found = {
            "keys": [key.hex() for key in keys],
            "granted": len(granted),
            "bytes_held": len(granted) * prefixes.layout.nbytes,
            "model": prefixes.namespace.model,
            "dtype": prefixes.layout.dtype,
            "shape": prefixes.layout.shape,
            "memory_format": prefixes.layout.memory_format,
        }
        _say(found)
        # Only a kill ends this, or the end of the demo, which closes the pipe.
        sys.stdin.buffer.read()
    return found


TASKS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "uncached": uncached,
    "store": store,
    "reuse": reuse,
    "hang": hang,
}


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    _say(TASKS[asked.task](asked))
