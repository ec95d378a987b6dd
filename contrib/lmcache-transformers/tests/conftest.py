from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def tiny_llama(**changes: Any) -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "initializer_range": 0.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
        | changes
    )
    torch.manual_seed(11)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[int]]:
    """The tokens that a model goes on with, after what `cache` holds and then `tokens`."""
    torch = pytest.importorskip("torch")

    def run(model: Any, cache: Any, tokens: list[int], count: int = 12) -> list[int]:
        out: list[int] = []
        with torch.inference_mode():
            while len(out) < count:
                logits = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
                out.append(int(logits[0, -1].argmax()))
                tokens = out[-1:]
        return out

    return run
