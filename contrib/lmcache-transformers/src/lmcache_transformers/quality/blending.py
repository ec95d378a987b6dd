"""What blending does to a model's answers: prompts of several documents, computed in full and blended."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

import torch

from lmcache_core.errors import UsageError
from lmcache_transformers.blend.certificate import Step, steps_of
from lmcache_transformers.blend.conditions import FIRST_TOKENS, FORMAT, Conditions
from lmcache_transformers.blend.deviation import look
from lmcache_transformers.blend.forward import Layers, blend_into, compute, compute_chunk
from lmcache_transformers.geometry import Geometry
from lmcache_transformers.quality.mean import Mean, finite
from lmcache_transformers.quality.outcomes import Outcome, Outcomes, Tried
from lmcache_transformers.quality.prompts import KINDS, Prompt, make_prompts, read_prompts, shipped
from lmcache_transformers.room import cache_with_room, copy_rooms

_Used = tuple[tuple[str, int], Tried]  # kind of the prompt and its documents; what came of it

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from lmcache_blend import Rope

CHUNK_TOKENS_KEPT = 1 << 15  # of other prompts' documents, in memory: a small model has 46 kB for each


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
    """Of blending under some conditions. `lossy`: as a certificate names them; `steps`: how the divergence grows with
    what is measured before the answer; `parts`: by kind of prompt; the others as in `Outcome`, over `prompts`
    prompts."""

    chain: str
    lossy: Sequence[tuple[str, Mapping[str, str | int | float]]]
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
    model: Any, tokenizer: Any, geometry: Geometry, rope: Rope, options: argparse.Namespace, of: str
) -> list[BlendQuality]:
    """All shares and chunk sizes of the options. `of`: what the numbers are of, besides the prompt: model, weights,
    dtype. Raises `UsageError` where no prompt fits the model."""
    trial = Trial(model, geometry, frame_of(tokenizer), rope, options.answer, options.prefix_tokens)
    prompts = _in_turns(options, trial.tokens_max)
    used: dict[int, list[_Used]] = {chunk_tokens: [] for chunk_tokens in options.chunk_tokens}
    with Outcomes(options.outcomes) as outcomes:
        for at, (chunk_tokens, prompt) in enumerate(prompts):
            sys.stderr.write(f"\rprompt {at + 1} of {len(prompts)}")
            cut = trial.cut(prompt, chunk_tokens)
            digest = trial.digest(cut, options.shares, of)
            if digest not in outcomes:
                lengths = list(map(len, cut.chunks))
                outcomes.add(Tried(digest, min(lengths), max(lengths), trial.run(cut, options.shares)))
            part = (prompt.kind, prompt.pieces or len(prompt.documents))
            used[chunk_tokens].append((part, outcomes[digest]))
        sys.stderr.write("\n")
    return [
        _quality(share, at, chunk_tokens, trial.prefix_tokens, own)
        for chunk_tokens, own in used.items()
        for at, share in enumerate(options.shares)
    ]


def _in_turns(options: argparse.Namespace, tokens_max: int) -> list[tuple[int, Prompt]]:
    """The first prompt of each kind and size, then the second ones: so that a measurement that ends early has some of
    all."""
    cells: list[list[tuple[int, Prompt]]] = []
    for chunk_tokens in options.chunk_tokens:
        own = [[(chunk_tokens, prompt) for prompt in cell] for cell in _cells(options, chunk_tokens, tokens_max)]
        if not own:
            raise UsageError(f"no prompt with chunks of {chunk_tokens} tokens fits the model and the texts")
        cells += own
    return [each for turn in zip_longest(*cells) for each in turn if each is not None]


def _cells(options: argparse.Namespace, chunk_tokens: int, tokens_max: int) -> Iterator[list[Prompt]]:
    if options.prompts is not None:
        yield read_prompts(options.prompts)
        return
    texts = shipped()
    for documents in options.documents:
        tokens = documents * chunk_tokens
        if tokens > tokens_max:
            sys.stderr.write(f"left out: {documents} documents of {chunk_tokens} tokens, more than the model takes\n")
            continue
        each = options.each if options.each_tokens is None else min(options.each, max(1, options.each_tokens // tokens))
        for kind in KINDS:
            try:
                yield make_prompts(texts, kind, each, documents, chunk_tokens)
            except UsageError as error:
                sys.stderr.write(f"left out: {documents} documents of {chunk_tokens} tokens, {kind}: {error}\n")


def _quality(share: float, at: int, chunk_tokens: int, prefix_tokens: int, used: Sequence[_Used]) -> BlendQuality:
    """`at`: which of the shares it is."""
    outcomes = [tried.outcomes[at] for _, tried in used]
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for part, tried in used:
        groups.setdefault(part, []).append(tried.outcomes[at])
    shortest, longest = min(tried.shortest for _, tried in used), max(tried.longest for _, tried in used)
    return BlendQuality(
        f"blend {share:.0%} of {chunk_tokens}",
        Conditions(share, shortest, longest, prefix_tokens).lossy(),
        len(outcomes),
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


@dataclass(frozen=True)
class Cut:
    """A prompt as ids: its documents' chunks, and what stands behind them."""

    chunks: list[list[int]]
    tail: list[int]


class Trial:
    """Measures prompts of one model. Chunks are computed behind the first `prefix_tokens` tokens (None: all) of the
    beginning that all prompts share, and kept for the prompts to come."""

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        frame: Frame,
        rope: Rope,
        answer_tokens: int,
        prefix_tokens: int | None = None,
    ) -> None:
        self._model, self._geometry, self._frame, self._rope = model, geometry, frame, rope
        self._answer_tokens = answer_tokens
        self.head = frame.head
        self.prefix_tokens = len(self.head) if prefix_tokens is None else prefix_tokens
        if self.prefix_tokens > len(self.head):
            raise UsageError(f"a prompt begins with {len(self.head)} tokens, and --prefix-tokens is {prefix_tokens}")
        self._prefix, self._front = self._computed(self.head), self._computed(self.head[: self.prefix_tokens])
        self._chunks: dict[tuple[int, ...], Layers] = {}

    def _computed(self, tokens: Sequence[int]) -> Any:
        cache = cache_with_room(self._geometry, len(tokens))
        if tokens:
            compute(self._model, cache, tokens)
        return cache

    @property
    def tokens_max(self) -> int:
        """Of all documents of a prompt. A question takes less than 256 tokens."""
        return int(getattr(self._model.config, "max_position_embeddings", 1 << 20)) - len(self.head) - 256

    def cut(self, prompt: Prompt, chunk_tokens: int) -> Cut:
        """Raises `UsageError` for a prompt that is too long."""
        cut = Cut(prompt.chunks(self._frame.tokenize, chunk_tokens), self._frame.tail(prompt.question))
        tokens = sum(map(len, cut.chunks))
        if tokens > self.tokens_max:
            raise UsageError(f"the documents of a prompt have {tokens:,} tokens, and the model takes fewer")
        return cut

    def digest(self, cut: Cut, shares: Sequence[float], of: str) -> str:
        """Of all that the outcomes depend on."""
        how = (of, FORMAT, FIRST_TOKENS, self._answer_tokens, self.prefix_tokens, list(map(float, shares)))
        return hashlib.sha256(repr((*how, self.head, cut.chunks, cut.tail)).encode()).hexdigest()

    def run(self, cut: Cut, shares: Sequence[float]) -> list[Outcome]:
        """One outcome for each share. Raises `UsageError` if a number is not finite."""
        chunks, tail, base = cut.chunks, cut.tail, len(self.head)
        body = [token for each in chunks for token in each]
        logits, answer = self._in_full(body, tail)
        expected = torch.log_softmax(logits, dim=-1)
        starts = list(accumulate(map(len, chunks[:-1]), initial=0))
        layers = self._moved(chunks, [base + at for at in starts])
        moved = starts if self.prefix_tokens < base else starts[1:]  # the first one may be where it was computed
        places = torch.arange(base, base + len(body))
        looked = look(self._model, self._geometry, self._prefix, [*self.head, *body, *tail], places, layers, moved)
        outcomes = []
        for share in shares:
            again, deviation = looked.choose(share)
            got = self._blended(body, [*tail, *answer[:-1]], ~again, layers)
            found, best = torch.log_softmax(got, dim=-1), got.argmax(dim=-1)
            cosine = float(torch.nn.functional.cosine_similarity(logits, got, dim=-1).mean())
            divergence = float((expected.exp() * (expected - found)).sum(dim=-1).mean())
            finite([cosine, divergence, deviation])  # before it is written anywhere
            outcomes.append(
                Outcome(
                    cosine,
                    max(0.0, divergence),  # not below by rounding
                    float((logits.argmax(dim=-1) == best).float().mean()),
                    float(best[len(tail) - 1 :].tolist() == answer),
                    deviation,
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
                while self._chunks and sum(map(len, self._chunks)) > CHUNK_TOKENS_KEPT:
                    del self._chunks[next(iter(self._chunks))]
                self._chunks[tuple(chunk)] = compute_chunk(self._model, self._geometry, self._front, chunk)
            layers = []
            for keys, values in self._chunks[tuple(chunk)]:
                there = keys.clone()
                self._rope.rotate(there, self.prefix_tokens, start, token_axis=1)
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
