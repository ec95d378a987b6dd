"""What blending does to a model's answers: prompts of several documents, computed in full and blended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from lmcache_core.errors import UsageError
from lmcache_transformers.blend.blender import FIRST_TOKENS, described
from lmcache_transformers.blend.certificate import Step, steps_of
from lmcache_transformers.blend.deviation import chosen, deviations, second_layer
from lmcache_transformers.blend.forward import Layers, blend_into, compute, compute_chunk
from lmcache_transformers.geometry import Geometry
from lmcache_transformers.quality.mean import Mean
from lmcache_transformers.quality.prompts import KINDS, Prompt, make_prompts, read_prompts, shipped
from lmcache_transformers.room import cache_with_room, copy_rooms

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from lmcache_blend import Rope

CHUNKS_KEPT = 256  # of other prompts' documents, in memory


@dataclass(frozen=True)
class Outcome:
    """Of one prompt at one share. Over the tokens of the question and of the answer: the cosine of the logits; the
    Kullback-Leibler divergence in nats a token; how often the most likely token is the same. `same_answer`: 1 if greedy
    generation gives the same tokens, else 0. `deviation`: of the tokens that were kept, in the second layer, on
    average."""

    cosine: float
    divergence: float
    agreement: float
    same_answer: float
    deviation: float


@dataclass(frozen=True)
class Part:
    """Of the prompts of one kind and number of documents."""

    kind: str
    documents: int
    prompts: int
    divergence: Mean
    agreement: Mean
    same_answer: Mean


@dataclass(frozen=True)
class BlendQuality:
    """Of blending with one share and chunk size. `lossy`: as a certificate names it; `prefix_tokens`: how many stood in
    front of a chunk when it was computed; `steps`: how the divergence grows with what is measured before the answer;
    `parts`: by kind of prompt; the others as in `Outcome`, over `prompts` prompts."""

    chain: str
    lossy: list[tuple[str, Mapping[str, str | int | float]]]
    prefix_tokens: int
    prompts: int
    cosine: Mean
    divergence: Mean
    agreement: Mean
    same_answer: Mean
    deviation: Mean
    steps: list[Step]
    parts: list[Part]


@dataclass(frozen=True)
class Frame:
    """What stands around the documents of a prompt: a beginning that all prompts share, and an end."""

    head: list[int]
    tail: Callable[[str], list[int]]
    tokenize: Callable[[str], list[int]]


def frame_of(tokenizer: Any) -> Frame:
    """By the tokenizer's chat template, or plain."""

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": "<documents>"}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, _, after = whole.partition("<documents>")
        head = tokenize(before)
    else:
        head, after = list(tokenizer("")["input_ids"]), "\nAnswer:"
    head += tokenize("Answer the question from these documents.\n\n")
    return Frame(head, lambda question: tokenize(f"\n\nQuestion: {question}{after}"), tokenize)


def measure_blending(
    model: Any, tokenizer: Any, geometry: Geometry, rope: Rope, options: argparse.Namespace
) -> list[BlendQuality]:
    """All shares and chunk sizes of the options. Raises `UsageError` where no prompt fits the model."""
    trial = Trial(model, geometry, frame_of(tokenizer), rope, options.answer)
    found = []
    for chunk_tokens in options.chunk_tokens:
        prompts = list(_prompts(options, chunk_tokens, trial.tokens_max))
        if not prompts:
            raise UsageError(f"no prompt with chunks of {chunk_tokens} tokens fits the model and the texts")
        outcomes = []
        for at, prompt in enumerate(prompts):
            sys.stderr.write(f"\rchunks of {chunk_tokens} tokens: prompt {at + 1} of {len(prompts)}")
            outcomes.append(trial.run(prompt, chunk_tokens, options.shares))
        sys.stderr.write("\n")
        for share, of_share in zip(options.shares, zip(*outcomes, strict=True), strict=True):
            found.append(_quality(share, chunk_tokens, len(trial.head), prompts, of_share))
    return found


def _prompts(options: argparse.Namespace, chunk_tokens: int, tokens_max: int) -> Iterator[Prompt]:
    if options.prompts is not None:
        yield from read_prompts(options.prompts)
        return
    texts = shipped()
    for documents in options.documents:
        if documents * chunk_tokens > tokens_max:
            sys.stderr.write(f"left out: {documents} documents of {chunk_tokens} tokens, more than the model takes\n")
            continue
        for kind in KINDS:
            try:
                yield from make_prompts(texts, kind, options.each, documents, chunk_tokens)
            except UsageError as error:
                sys.stderr.write(f"left out: {documents} documents of {chunk_tokens} tokens, {kind}: {error}\n")


def _quality(
    share: float, chunk_tokens: int, prefix_tokens: int, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]
) -> BlendQuality:
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        groups.setdefault((prompt.kind, prompt.pieces or len(prompt.documents)), []).append(outcome)
    return BlendQuality(
        f"blend {share:.0%} of {chunk_tokens}",
        [described(share, chunk_tokens, prefix_tokens)],
        prefix_tokens,
        len(prompts),
        _mean(outcomes, "cosine"),
        _mean(outcomes, "divergence"),
        _mean(outcomes, "agreement"),
        _mean(outcomes, "same_answer"),
        _mean(outcomes, "deviation"),
        steps_of([(each.deviation, each.divergence) for each in outcomes]),
        [
            Part(kind, documents, len(own), *(_mean(own, name) for name in ("divergence", "agreement", "same_answer")))
            for (kind, documents), own in groups.items()
        ],
    )


def _mean(outcomes: Sequence[Outcome], name: str) -> Mean:
    return Mean.of([getattr(each, name) for each in outcomes])


class Trial:
    """Measures prompts of one model. Chunks are computed behind the beginning that all prompts share, and kept for the
    prompts to come."""

    def __init__(self, model: Any, geometry: Geometry, frame: Frame, rope: Rope, answer_tokens: int) -> None:
        self._model, self._geometry, self._frame, self._rope = model, geometry, frame, rope
        self._answer_tokens = answer_tokens
        self.head = frame.head
        self._prefix = cache_with_room(geometry, max(1, len(self.head)))
        if self.head:
            compute(model, self._prefix, self.head)
        self._chunks: dict[tuple[int, ...], Layers] = {}

    @property
    def tokens_max(self) -> int:
        """Of all documents of a prompt. A question takes less than 256 tokens."""
        return int(getattr(self._model.config, "max_position_embeddings", 1 << 20)) - len(self.head) - 256

    def run(self, prompt: Prompt, chunk_tokens: int, shares: Sequence[float]) -> list[Outcome]:
        """One outcome for each share. Raises `UsageError` for a prompt that is too long."""
        head, tail = self.head, self._frame.tail(prompt.question)
        chunks = prompt.chunks(self._frame.tokenize, chunk_tokens)
        body = [token for each in chunks for token in each]
        if len(body) > self.tokens_max:
            raise UsageError(f"the documents of a prompt have {len(body):,} tokens, and the model takes fewer")
        logits, answer = self._in_full(body, tail)
        expected = torch.log_softmax(logits, dim=-1)
        starts = list(accumulate(map(len, chunks[:-1]), initial=0))
        layers = self._moved(chunks, [len(head) + at for at in starts])
        keys, values = second_layer(self._model, self._geometry, self._prefix, body)
        deviation = deviations(keys.cpu(), values.cpu(), *layers[1])
        outcomes = []
        for share in shares:
            again = chosen(deviation, starts[1:], share, FIRST_TOKENS)  # the first one is where it was computed
            got = self._blended(body, [*tail, *answer[:-1]], ~again, layers)
            found, best = torch.log_softmax(got, dim=-1), got.argmax(dim=-1)
            outcomes.append(
                Outcome(
                    float(torch.nn.functional.cosine_similarity(logits, got, dim=-1).mean()),
                    max(0.0, float((expected.exp() * (expected - found)).sum(dim=-1).mean())),  # not below by rounding
                    float((logits.argmax(dim=-1) == best).float().mean()),
                    float(best[len(tail) - 1 :].tolist() == answer),
                    0.0 if bool(again.all()) else float(deviation[~again].mean()),
                )
            )
        return outcomes

    def _in_full(self, body: list[int], tail: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Logits after each token of the question and of the answer but its last, and the greedy answer."""
        cache = cache_with_room(self._geometry, len(self.head) + len(body) + len(tail) + self._answer_tokens)
        copy_rooms(self._prefix, cache)
        compute(self._model, cache, body)
        logits = [compute(self._model, cache, tail, logits=len(tail))]
        answer = [int(logits[0][-1].argmax())]
        while len(answer) < self._answer_tokens:
            logits.append(compute(self._model, cache, answer[-1:]))
            answer.append(int(logits[-1][-1].argmax()))
        return torch.cat(logits).float(), answer

    def _moved(self, chunks: Sequence[list[int]], starts: Sequence[int]) -> Layers:
        """All chunks in a row, the keys rotated to where they start."""
        moved = []
        for chunk, start in zip(chunks, starts, strict=True):
            if tuple(chunk) not in self._chunks:
                while len(self._chunks) >= CHUNKS_KEPT:
                    del self._chunks[next(iter(self._chunks))]
                self._chunks[tuple(chunk)] = compute_chunk(self._model, self._geometry, self._prefix, chunk)
            layers = []
            for keys, values in self._chunks[tuple(chunk)]:
                there = keys.clone()
                self._rope.rotate(there, len(self.head), start, token_axis=1)
                layers.append((there, values))
            moved.append(layers)
        return [
            (torch.cat([keys for keys, _ in layer], dim=1), torch.cat([values for _, values in layer], dim=1))
            for layer in zip(*moved, strict=True)
        ]

    def _blended(self, body: list[int], rest: list[int], keep: torch.Tensor, layers: Layers) -> torch.Tensor:
        """Logits after each token of `rest`. One call gives those of a whole answer: it is the greedy one if each of
        its tokens is the most likely one after those before it."""
        cache = cache_with_room(self._geometry, len(self.head) + len(body) + len(rest))
        copy_rooms(self._prefix, cache)
        kept = torch.arange(len(self.head), len(self.head) + len(body))[keep]
        own = [(keys[:, keep], values[:, keep]) for keys, values in layers]
        tokens = [*self.head, *body, *rest]
        return blend_into(self._model, cache, tokens, kept, own, logits=len(rest)).float()
