from __future__ import annotations

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
