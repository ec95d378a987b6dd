"""The job of a demo worker: made by the demo, read by the worker."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core import Client
from lmcache_transformers.demo.model import ModelShape


@dataclass(frozen=True)
class Job:
    """What a worker does, with which document, model and server."""

    task: str
    model: str  # smollm2, random, or none
    folder: str  # of a trained model
    question: int
    document: str
    tokens: int  # of the document that are read
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

    def connect(self) -> Client:
        return Client.connect(self.server, runtime_dir=self.runtime_dir, client_name=f"demo {self.task}")
