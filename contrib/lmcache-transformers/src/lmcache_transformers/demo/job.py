"""The job of a demo worker: made by the demo, read by the worker."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.client.client import Client
from lmcache_transformers.demo.model import ModelShape, document_tokens, question_tokens


@dataclass(frozen=True)
class Job:
    """What a worker does, with which document, model and server."""

    task: str
    model: str  # llama, or none
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
