"""Models with random weights: their output is meaningless, but costs as much as a trained model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = 1024
HEAD_DIM = 64
POSITIONS = 8192
ITEM_BYTES = 4  # float32: every processor computes in it


class Shape(NamedTuple):
    """The shape of a Llama model."""

    layers: int
    hidden: int
    kv_heads: int
    intermediate: int

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layers * 2 * self.kv_heads * HEAD_DIM * ITEM_BYTES


SHAPES = {
    "tiny": Shape(4, 256, 2, 512),  # 3 million parameters, 4 KiB of KV a token
    "m100": Shape(10, 768, 4, 2048),  # 65 million, 20 KiB
    "m300": Shape(16, 1024, 8, 3072),  # 230 million, 64 KiB
}


def config_of(name: str) -> Any:
    """The `LlamaConfig` of one of `SHAPES`."""
    import transformers

    shape = SHAPES[name]
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD_DIM,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        initializer_range=0.06,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


def make(name: str) -> Any:
    """The model itself, in this process."""
    import torch
    import transformers

    torch.manual_seed(1)
    model: Any = transformers.LlamaForCausalLM(config_of(name))
    return model.eval()


def save(name: str, folder: Path) -> Path:
    """The model as an engine loads it."""
    make(name).save_pretrained(folder)
    return folder
