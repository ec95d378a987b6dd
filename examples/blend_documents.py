"""Documents that move about in prompts: stored once, found in another order, their keys moved to the new positions.

    pip install lmcache-core lmcache-blend
    python examples/blend_documents.py

No model is needed: "KV" is made of the tokens, and keys are rotated by position as a model would.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmcache_blend import Chunks, ChunkSpace, Planner, Rope
from lmcache_core import Client, Layout, Namespace, Server, make_settings
from lmcache_core.tokens import chunk_keys

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

LAYERS, HEADS, SIZE = 2, 2, 16
BOS = 1
ROPE = Rope.from_config({"model_type": "llama", "rope_theta": 10_000.0, "head_dim": SIZE})


def layout_of(tokens: int) -> Layout:
    return Layout("float32", (LAYERS, 2, HEADS, tokens, SIZE), "LKHTD")


def compute(tokens: np.ndarray, first: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of each layer, [heads, tokens, size], the keys rotated by their positions."""
    values = np.stack([np.random.default_rng(int(token)).standard_normal((LAYERS, 2, HEADS, SIZE)) for token in tokens])
    layers = np.ascontiguousarray(values.transpose(1, 2, 3, 0, 4), np.float32)
    for keys, _ in layers:
        ROPE.rotate(keys, 0, first, token_axis=1)
    return [(keys, values) for keys, values in layers]


def settings(folder: Path) -> Settings:
    folders = {"runtime_dir": str(folder / "run"), "state_dir": str(folder / "state")}
    return make_settings(name="blend-example", l1={"size_bytes": "64MiB", "backing": "memfd"}, **folders)


def main() -> None:
    words = np.random.default_rng(0)
    system, question = words.integers(2, 30_000, 100), words.integers(2, 30_000, 20)
    documents = [words.integers(2, 30_000, length) for length in (700, 900)]
    with tempfile.TemporaryDirectory() as folder, Server(settings(Path(folder))) as server, server.connect() as client:
        server.parts.populator.wait(60)  # until the pool's memory is populated, nothing can be stored
        chunks = Chunks(client, ChunkSpace("example", layout_of, ROPE, prefix_tokens=(BOS,)))
        for document in documents:
            found = chunks.find(document, [(0, len(document))])
            kv = [compute(document[each.span.first : each.span.end], chunks.space.base) for each in found.missing]
            chunks.store(found.missing, kv)
            print(f"a document of {len(document)} tokens: {len(found.missing)} chunks stored")

        prompt = np.concatenate([[BOS], system, documents[1], documents[0], question])
        second = 1 + len(system) + len(documents[1])
        marks = [(1 + len(system), second), (second, second + len(documents[0]))]
        found = chunks.find(prompt, marks)
        targets = [
            [(np.empty((HEADS, match.tokens, SIZE), np.float32), np.empty((HEADS, match.tokens, SIZE), np.float32))
             for _ in range(LAYERS)]
            for match in found.matches
        ]  # fmt: skip
        assert all(chunks.read(found.matches, targets))
        error = 0.0
        for match, layers in zip(found.matches, targets, strict=True):
            right = compute(prompt[match.new_start : match.new_start + match.tokens], match.new_start)
            error = max(error, *(float(abs(got[0] - own[0]).max()) for got, own in zip(layers, right, strict=True)))
        print(f"in a new order {found.matched_tokens} of {len(prompt)} tokens found; error of moved keys {error:.1e}")
        plan_prompts(client, system, documents, question)


def plan_prompts(client: Client, system: np.ndarray, documents: list[np.ndarray], question: np.ndarray) -> None:
    prefixes = Namespace("example", layout_of(64))
    stored = np.concatenate([system, documents[1], documents[0]])
    keys = chunk_keys(stored, prefixes, 64)
    client.store(keys, [np.zeros(prefixes.layout.shape, np.float32)] * len(keys), namespace=prefixes)
    plan = Planner(client, prefixes, 64).plan(system, documents, question)
    print(f"planned order {plan.order}: {plan.reused_tokens} of {plan.tokens} tokens are stored as a prefix")


if __name__ == "__main__":
    main()
