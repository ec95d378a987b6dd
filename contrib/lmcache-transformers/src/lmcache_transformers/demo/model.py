"""The demo's model, document and questions: the same in every process, from a few numbers and no download."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmcache_core
from lmcache_core.errors import UsageError

VOCABULARY = 4096  # the text is bytes; more ids make a wrong answer more likely to show
HEAD_DIM = 64
HEADS_PER_KV_HEAD = 2
QUESTIONS = (
    "\n\nQuestion: what happens to a slot whose writer was killed?\nAnswer:",
    "\n\nQuestion: which promise does a lease make to its holder?\nAnswer:",
)


@dataclass(frozen=True)
class ModelShape:
    """Everything that two processes need to build the same model: its size, and the seed of its weights."""

    layers: int
    kv_heads: int
    seed: int

    @property
    def hidden(self) -> int:
        return self.kv_heads * HEADS_PER_KV_HEAD * HEAD_DIM

    @property
    def name(self) -> str:
        """A name of the weights, for the namespace: they are derived from it."""
        return f"demo-llama-{self.layers}x{self.hidden}-seed{self.seed}"

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for one token: float32, because greedy outputs are compared token by token."""
        return self.layers * 2 * self.kv_heads * HEAD_DIM * 4


def build_model(shape: ModelShape) -> Any:
    """A small Llama with random weights, warmed up: the first call of a process also pays for its libraries."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.kv_heads * HEADS_PER_KV_HEAD,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 17,
        initializer_range=0.06,  # at the usual 0.02 greedy output falls into repeating one token
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(shape.seed)
    model: Any = LlamaForCausalLM(config)
    model.eval()
    with torch.inference_mode():
        model(input_ids=torch.arange(64)[None])
    return model


def write_document(folder: Path, tokens: int, source: str = "") -> Path:
    """Put the first `tokens` bytes of a text where all workers read it; a byte is a token.

    Without a `source` the text is the source of lmcache-core. Raises `UsageError` where it is too short.
    """
    if source:
        text = Path(source).read_bytes()
    else:
        root = Path(lmcache_core.__file__).parent
        text = b"".join(file.read_bytes() for file in sorted(root.rglob("*.py")))
    if len(text) < tokens:
        raise UsageError(f"the document has {len(text):,} tokens and {tokens:,} are asked for: give a longer one")
    path = folder / "document.txt"
    path.write_bytes(text[:tokens])
    return path


def document_tokens(path: str) -> list[int]:
    return list(Path(path).read_bytes())


def question_tokens(number: int) -> list[int]:
    return list(QUESTIONS[number].encode())


class FirstToken:
    """A streamer for `generate` that records the time of the first token, in seconds since it was made."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._heard = 0
        self.seconds = 0.0

    def put(self, tokens: Any) -> None:
        """The prompt comes first, and then token by token."""
        del tokens
        self._heard += 1
        if self._heard == 2:
            self.seconds = time.perf_counter() - self._started_s

    def end(self) -> None:
        """Nothing to do."""


def greedily(tokens: int, streamer: FirstToken | None) -> dict[str, Any]:
    """Options of `generate`: so many tokens, greedily."""
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "streamer": streamer}
