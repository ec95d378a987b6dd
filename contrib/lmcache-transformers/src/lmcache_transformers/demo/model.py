"""The demo's models by transformers, its document and questions: the same in every process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import lmcache_core
from lmcache_core.errors import UsageError

VOCABULARY = 4096  # the text is bytes; more ids make a wrong answer more likely to show
HEAD_DIM = 64
HEADS_PER_KV_HEAD = 2
QUESTIONS = ("What is a lease?", "What is a slot?")
INSTRUCTION = "You answer questions about the text that you are given, in one sentence."


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


class RandomLlama:
    """A small Llama with random weights. A byte is a token, and its answers are numbers without a meaning."""

    def __init__(self, shape: ModelShape) -> None:
        self.name = shape.name
        self.model = _random_llama(shape)

    def prompt(self, document: str, question: int) -> list[int]:
        return prompt_of_bytes(document, question)

    def text(self, answer: Sequence[int]) -> str:
        return " ".join(map(str, answer))


class SmolLM2:
    """A small trained model, from its folder: see `lmcache_transformers.smollm2`."""

    def __init__(self, folder: str, tokens: int) -> None:
        """`tokens`: of the document that are read, at most."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name = Path(folder).name
        self._tokens = tokens
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        # float32, because greedy outputs are compared token by token
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, document: str, question: int) -> list[int]:
        text = self._tokenizer(Path(document).read_text(errors="replace"))["input_ids"][: self._tokens]
        content = f"{self._tokenizer.decode(text)}\n\n{QUESTIONS[question]}"
        messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": content}]
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids

    def text(self, answer: Sequence[int]) -> str:
        return str(self._tokenizer.decode(answer, skip_special_tokens=True)).strip()


def warmed_up(subject: RandomLlama | SmolLM2) -> Any:
    """The model, after a first call, which also pays for a process's libraries."""
    import torch

    with torch.inference_mode():
        subject.model(input_ids=torch.arange(64)[None])
    return subject.model


def _random_llama(shape: ModelShape) -> Any:
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
    return LlamaForCausalLM(config).eval()


def write_document(folder: Path, tokens: int, source: str = "") -> Path:
    """Put the first `tokens` bytes of a text where all workers read it, for models to which a byte is a token.

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


def write_page(folder: Path, source: str = "") -> Path:
    """Put a page that a trained model can read where all workers read it. Without a `source`: the page that comes with
    lmcache-core, as the index shows it."""
    path = folder / "document.txt"
    path.write_text(Path(source).read_text() if source else metadata("lmcache-core")["Description"])
    return path


def document_tokens(path: str) -> list[int]:
    return list(Path(path).read_bytes())


def prompt_of_bytes(document: str, question: int) -> list[int]:
    """The document and a question behind it, a byte a token."""
    return document_tokens(document) + list(f"\n\nQuestion: {QUESTIONS[question]}\nAnswer:".encode())


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens the prompts begin with in common."""
    pairs = enumerate(zip(*prompts, strict=False))
    return next((at for at, tokens in pairs if len({*tokens}) > 1), min(map(len, prompts)))


class FirstToken:
    """A streamer for `generate` that records the time of the first token, in seconds since it was made."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._pieces = 0
        self.seconds = 0.0

    def put(self, tokens: Any) -> None:
        """The prompt comes first, and then token by token."""
        del tokens
        self._pieces += 1
        if self._pieces == 2:
            self.seconds = time.perf_counter() - self._started_s

    def end(self) -> None:
        """Nothing to do."""


def greedily(tokens: int, streamer: FirstToken | None) -> dict[str, Any]:
    """Options of `generate`: up to so many tokens, greedily."""
    return {"max_new_tokens": tokens, "do_sample": False, "streamer": streamer}
