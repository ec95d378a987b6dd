"""`generate()` of a transformers model, with the KV of prompt prefixes from the pool and into it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError
from lmcache_core.limits import CHUNK_TOKENS
from lmcache_transformers.geometry import cache_argument
from lmcache_transformers.handover import CACHES, joined
from lmcache_transformers.prefix_cache import Prefix, PrefixCache
from lmcache_transformers.support import counts_positions_by_cache

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import DynamicCache, PreTrainedModel

    from lmcache_core import Client
    from lmcache_transformers.blend.blender import Blended, Blender, Blending, Marks

# Options of `generate` that do more than one answer for each prompt, token by token.
_OTHER_WAYS = (
    *("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
    *("custom_generate", "continuous_batching_config", "penalty_alpha", "dola_layers"),
    *("constraints", "force_words_ids", "token_healing"),
)
_OF_ALL_TOKENS = ("output_hidden_states", "output_attentions")
_SEVERAL = ("num_beams", "num_return_sequences")
_OWN = ("cache", "past_key_values", "input_ids", "inputs", "attention_mask", "position_ids")


@dataclass
class Moved:
    """Bytes between the pool and the model's memory, for all prompts of a call, and the seconds for everything: keys,
    lookup, waiting for tiers, and copying."""

    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_bytes: int = 0
    store_s: float = 0.0


@dataclass(frozen=True)
class Generated:
    """`output`: what `model.generate` gave: ids `[prompts, tokens]`, shorter prompts padded on the left, or with
    `return_dict_in_generate` its output object. `prompt_tokens`: how long the padded prompts are. `tokens_reused`: how
    many tokens of each prompt were not computed. `texts`: of each answer; empty without a tokenizer. `blended`: what
    became of each prompt with `reuse="blend"`; else empty."""

    output: Any
    prompt_tokens: int
    tokens_reused: tuple[int, ...]
    texts: tuple[str, ...]
    moved: Moved
    blended: tuple[Blended, ...] = ()

    @property
    def answers(self) -> list[list[int]]:
        """The ids behind each prompt."""
        ids = getattr(self.output, "sequences", self.output)
        return [row[self.prompt_tokens :] for row in ids.tolist()]


@dataclass(frozen=True)
class MarkedPrompt:
    """Token ids, and where documents begin and end in them. Made by `CachedGenerator.prompt`."""

    tokens: tuple[int, ...]
    marks: tuple[tuple[int, int], ...]


@dataclass
class _Reuse:
    """Of the prompts of one call."""

    tokens: list[int] = field(default_factory=list)
    blended: list[Blended] = field(default_factory=list)


class CachedGenerator:
    """Generates as `model.generate` does, but computes only the part of each prompt after its cached prefix.

    `tokenizer`: for text prompts; None if all are token ids. The other parameters are those of `PrefixCache`, which is
    `prefixes`. Raises `UsageError`, with the reason, for a model that cannot be served.

    `reuse`: "prefix", or "blend", which behind the prefix takes the KV of documents that were stored by
    `store_documents` and stand at another place now, and recomputes a part of their tokens, as `blending` says.
    Answers may differ then. It needs the package lmcache-blend, a `certificate` that covers it, and a model that can
    blend; else `UsageError` or `SettingsError` say why.

    Prompts are computed in steps that end where chunks end, one prompt after the other, whether or not anything was
    found: so an answer has the same bits however much of its prompt was in the cache, except with a `codec` or with
    `reuse="blend"`. One generator for one thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        client: Client,
        *,
        model_name: str = "",
        chunk_tokens: int = CHUNK_TOKENS,
        weights_version: str = "",
        tenant_salt: str = "",
        wait_s: float = 5.0,
        unproven_ok: bool = False,
        codec: str = "",
        certificate: Path | None = None,
        reuse: str = "prefix",
        blending: Blending | None = None,
    ) -> None:
        self.prefixes = PrefixCache(
            client,
            model,
            model_name=model_name,
            chunk_tokens=chunk_tokens,
            weights_version=weights_version,
            tenant_salt=tenant_salt,
            wait_s=wait_s,
            unproven_ok=unproven_ok,
            codec=codec,
            certificate=certificate,
        )
        self._model: Any = model
        self._tokenizer = tokenizer
        taken = inspect.signature(model.forward).parameters
        self._last_logits: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._takes_positions = "position_ids" in taken
        self._counts_positions_by_cache = counts_positions_by_cache(model)
        self._blender = _blender(self.prefixes, model, reuse, blending, certificate)

    def prompt(self, system: Any, documents: Sequence[Any], question: Any) -> MarkedPrompt:
        """One prompt of texts, or ids, whose documents are marked, so that they are found wherever they stand: each
        part has the ids that it has alone. Special tokens that the tokenizer puts in front stand before `system`."""
        tokens, marks = self._part(system, special=True), []
        for each in documents:
            marks.append((len(tokens), len(tokens) + len(ids := self._part(each))))
            tokens = tokens + ids
        return MarkedPrompt((*tokens, *self._part(question)), tuple(mark for mark in marks if mark[0] < mark[1]))

    def store_documents(self, documents: Sequence[Any]) -> int:
        """Compute documents, texts or ids, each by itself, and store their chunks for `reuse="blend"`. Returns how
        many chunks were stored now: those that were there already cost nothing. Raises `UsageError` without
        `reuse="blend"`."""
        if self._blender is None:
            raise UsageError('documents are stored for reuse="blend": make the generator with it')
        ids = [found for each in documents if (found := self._part(each))]
        return sum(self._blender.store(each, [(0, len(each))]) for each in ids)

    def describe_chunks(self, path: Path) -> None:
        """Write what `store_documents` stores under to a file, for an engine that computes the same model and stores
        documents too. Who reads it can make keys, so at first only this user may; anew when weights change. Raises
        `OSError`, and `UsageError` without `reuse="blend"`."""
        if self._blender is None:
            raise UsageError('chunks are stored for reuse="blend": make the generator with it')
        self._blender.describe().write(path)

    def _part(self, given: Any, *, special: bool = False) -> list[int]:
        if not isinstance(given, str):
            return [int(each) for each in _plain(given)]
        if self._tokenizer is None:
            raise UsageError("the prompt is text, and there is no tokenizer: give one, or token ids")
        return list(self._tokenizer(given, add_special_tokens=special)["input_ids"])

    def generate(
        self,
        prompts: Any,
        *,
        attention_mask: Any = None,
        cache_implementation: str | None = None,
        cache_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generated:
        """Answer one prompt or several.

        `prompts`: a text, texts, ids, lists of ids, a tensor `[prompts, tokens]` with an `attention_mask` where it is
        padded, what a tokenizer returns, or one or several of `prompt`. `cache_implementation`: what the answer is
        generated over: None (or "dynamic"), "static", or "quantized" with its `cache_config`. `options` are those of
        `model.generate`.

        Raises `UsageError` for inputs that are not tokens, for several answers to one prompt, and for assisted
        generation.
        """
        if isinstance(prompts, Mapping):  # of a tokenizer
            options = {name: each for name, each in prompts.items() if name != "token_type_ids"} | options
            attention_mask = options.pop("attention_mask", attention_mask)
            prompts = options.pop("input_ids", None)
        self._check(options, cache_implementation)
        prompts, marks = _unmarked(prompts)
        sequences = self._sequences(prompts, attention_mask)
        self._check_positions(sequences)
        answer_tokens = self._answer_tokens(options, max(map(len, sequences)))
        moved = Moved()
        if self._alone(sequences, options):
            options |= _kind(cache_implementation, cache_config)
            return self._finish(sequences, _Reuse([0] * len(sequences)), {}, options, moved)
        reuse = _Reuse()
        caches = [
            self._computed(each, marks[at] if marks else None, len(each) + answer_tokens, reuse, moved)
            for at, each in enumerate(sequences)
        ]
        cache = joined(
            self._model.config,
            caches,
            cache_implementation,
            cache_config or {},
            answer_tokens,
        )
        inputs = cache_argument(self._model, cache) | _kind(None, None)
        return self._finish(sequences, reuse, inputs, options, moved)

    def _computed(
        self, tokens: list[int], marks: Marks | None, room_tokens: int, reuse: _Reuse, moved: Moved
    ) -> DynamicCache:
        """All of a prompt but its last token: from the cache, blended, or computed and stored."""
        started_s = time.perf_counter()
        prefix = self.prefixes.load(tokens, room_tokens=room_tokens)
        moved.load_s += time.perf_counter() - started_s
        moved.loaded_bytes += prefix.nbytes
        if self._blender is not None:
            blended = self._blender.blend(tokens, marks, prefix.cache)
            reuse.blended.append(blended)
            reuse.tokens.append(blended.reused_exact + blended.reused_blended)
            if not blended.why:
                return prefix.cache  # and nothing of it is stored as a prefix
        else:
            reuse.tokens.append(prefix.tokens_reused)
        self._compute_rest(tokens, prefix, moved)
        return prefix.cache

    def _compute_rest(self, tokens: list[int], prefix: Prefix, moved: Moved) -> None:
        step, first, last = self.prefixes.chunk_tokens, prefix.tokens_reused, len(tokens) - 1
        ids = _ids([tokens], self._model.device)
        import torch

        with torch.no_grad():
            for at in range(first, last, step):
                end = min(at + step, last)
                positions = {"position_ids": _ids([list(range(at, end))], ids.device)} if self._takes_positions else {}
                # Positions, as model.generate gives them: some models count otherwise.
                part: Any = positions | self._last_logits | cache_argument(self._model, prefix.cache)
                self._model(input_ids=ids[:, at:end], use_cache=True, **part)
        if last // step * step > first:
            started_s = time.perf_counter()
            moved.stored_bytes += self.prefixes.store(tokens[:last], prefix.cache).nbytes
            moved.store_s += time.perf_counter() - started_s

    def _finish(
        self,
        sequences: Sequence[list[int]],
        reuse: _Reuse,
        inputs: dict[str, Any],
        options: dict[str, Any],
        moved: Moved,
    ) -> Generated:
        import torch

        longest = max(map(len, sequences))
        padded = [[self._pad] * (longest - len(each)) + each for each in sequences]
        ids = _ids(padded, self._model.device)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(sequences):
            mask[row, longest - len(each) :] = 1
        output = self._model.generate(ids, attention_mask=mask, **{"pad_token_id": self._pad} | inputs | options)
        made = Generated(output, longest, tuple(reuse.tokens), (), moved, tuple(reuse.blended))
        if self._tokenizer is None:
            return made
        return replace(made, texts=tuple(self._tokenizer.batch_decode(made.answers, skip_special_tokens=True)))

    @property
    def _pad(self) -> int:
        of_model = self._model.generation_config
        for number in (getattr(self._tokenizer, "pad_token_id", None), of_model.pad_token_id, of_model.eos_token_id, 0):
            if number is not None:
                return int(number[0] if isinstance(number, Sequence) else number)
        raise AssertionError

    def _check(self, options: Mapping[str, Any], cache_implementation: str | None) -> None:
        if cache_implementation not in CACHES:
            raise UsageError(f"cache_implementation is {cache_implementation!r}: use {', '.join(map(repr, CACHES))}")
        for name, value in options.items():
            if name in _OWN:
                raise UsageError(
                    f"{name} is this generator's to make: give prompts, and attention_mask where they are padded"
                )
            if hasattr(value, "data_ptr") or name == "inputs_embeds":
                raise UsageError(
                    f"{name} is an input that is no token, and the keys cover tokens alone: it is not served"
                )
        for name in _OTHER_WAYS:
            if self._option(options, name) not in (None, False):
                raise UsageError(f"{name} is not served: call model.generate for it")
        for name in _OF_ALL_TOKENS:
            if self._option(options, name):
                raise UsageError(f"{name} would lack what was not computed: call model.generate for it")
        for name in _SEVERAL:
            value = self._option(options, name)
            if value is not None and value > 1:
                raise UsageError(
                    f"{name} is {value}: one answer for each prompt is served; call model.generate for more"
                )

    def _check_positions(self, sequences: Sequence[list[int]]) -> None:
        if self._counts_positions_by_cache and len(set(map(len, sequences))) > 1:
            raise UsageError(
                f"the {type(self._model).__name__} counts padding as positions, and a cached prefix has none: give "
                "prompts of one length, or one at a time"
            )

    def _option(self, options: Mapping[str, Any], name: str) -> Any:
        for source in (options.get("generation_config"), self._model.generation_config):
            if name in options:
                return options[name]
            if getattr(source, name, None) is not None:
                return getattr(source, name)
        return None

    def _answer_tokens(self, options: Mapping[str, Any], prompt_tokens: int) -> int:
        """How many tokens are generated at most."""
        wanted = self._option(options, "max_new_tokens")
        if wanted is None:
            whole = self._option(options, "max_length")
            wanted = 0 if whole is None else max(0, whole - prompt_tokens)
        return int(wanted)

    def _alone(self, sequences: Sequence[list[int]], options: Mapping[str, Any]) -> bool:
        """Whether to use plain `model.generate`: without a cache, or if positions depend on the length of the whole
        prompt."""
        limit = self.prefixes.tokens_max
        return self._option(options, "use_cache") is False or (limit is not None and max(map(len, sequences)) > limit)

    def _sequences(self, prompts: Any, attention_mask: Any) -> list[list[int]]:
        """One list of ids for each prompt, without padding."""
        if isinstance(prompts, str) or (isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], str)):
            if self._tokenizer is None:
                raise UsageError("the prompt is text, and there is no tokenizer: give one, or token ids")
            if attention_mask is not None:
                raise UsageError("attention_mask is for prompts that are padded ids, and the prompt is text")
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            found = [list(self._tokenizer(text)["input_ids"]) for text in texts]
        else:
            found = _rows("the prompts", () if prompts is None else prompts)
            if attention_mask is not None:
                masks = _rows("attention_mask", attention_mask)
                if list(map(len, masks)) != list(map(len, found)):
                    raise UsageError(
                        f"attention_mask has rows of {list(map(len, masks))} and the prompts are of "
                        f"{list(map(len, found))} tokens: give one for each token"
                    )
                found = [_unpadded(at, ids, mask) for at, (ids, mask) in enumerate(zip(found, masks, strict=True))]
        if not found or not all(found):
            raise UsageError("a prompt is empty: give each at least one token")
        return found


def _blender(
    prefixes: PrefixCache, model: Any, reuse: str, blending: Blending | None, certificate: Path | None
) -> Blender | None:
    if reuse not in ("prefix", "blend"):
        raise UsageError(f'reuse is {reuse!r}: use "prefix" or "blend"')
    if reuse == "prefix":
        if blending is not None:
            raise UsageError('blending is for reuse="blend": it does nothing to prefixes')
        return None
    if prefixes.namespace != prefixes.plain:
        raise UsageError('codec and reuse="blend" go together in no certificate: use one of them')
    if find_spec("lmcache_blend") is None:
        raise UsageError('reuse="blend" needs the package lmcache-blend: pip install lmcache-blend')
    from lmcache_transformers.blend.blender import Blender, Blending

    return Blender(prefixes, model, blending or Blending(), certificate)


def _unmarked(prompts: Any) -> tuple[Any, list[Marks | None] | None]:
    """Prompts as ids, and the marks of each; without marks, as they are."""
    given = [prompts] if isinstance(prompts, MarkedPrompt) else prompts
    if not isinstance(given, list | tuple) or not any(isinstance(each, MarkedPrompt) for each in given):
        return prompts, None
    if not all(isinstance(each, MarkedPrompt) for each in given):
        raise UsageError("some prompts have marks and others do not: make all of them with prompt()")
    return [list(each.tokens) for each in given], [each.marks for each in given]


def _kind(cache_implementation: str | None, cache_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """For `model.generate`, whose own defaults are not used."""
    config = None if cache_config is None else dict(cache_config)
    return {"cache_implementation": cache_implementation, "cache_config": config}


def _ids(rows: list[list[int]], device: Any) -> torch.Tensor:
    import torch

    return torch.tensor(rows, dtype=torch.long, device=device)


def _rows(name: str, given: Any) -> list[list[Any]]:
    """Numbers, or rows of them, as rows: of lists, arrays or tensors. What the numbers are is looked at later."""
    rows = _plain(given)
    if not isinstance(rows, list):
        raise UsageError(f"{name} are {given!r}: give text, token ids, or lists of them")
    rows = list(map(_plain, rows))
    rows = rows if any(isinstance(each, list) for each in rows) else [rows] if rows else []
    for each in rows:
        if not isinstance(each, list) or any(isinstance(number, list | str | Mapping) for number in each):
            raise UsageError(f"{name}: {each!r} is not a row of numbers: give [prompts, tokens]")
    return rows


def _plain(given: Any) -> Any:
    if hasattr(given, "tolist"):
        return given.tolist()
    return list(given) if isinstance(given, list | tuple) else given


def _unpadded(at: int, ids: list[int], mask: list[int]) -> list[int]:
    kept = [number for number, seen in zip(ids, mask, strict=True) if seen]
    text = "".join("1" if seen else "0" for seen in mask)
    if "0" in text.strip("0"):
        raise UsageError(
            f"the attention mask of prompt {at} leaves tokens out in the middle: only padding can be masked"
        )
    return kept
