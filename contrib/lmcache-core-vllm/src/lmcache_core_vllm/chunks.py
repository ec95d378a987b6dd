"""Documents whose KV is found at any place in a prompt: a request that is marked for it is one document behind the
prefix tokens, and its KV is stored under keys of its content, too, for programs that blend (lmcache-blend).

Whoever blends describes its chunks in a file, which the scheduler's side compares with its engine. A worker's blocks
are its attention backend's own affair; where in one each value lies is learned by having the backend write numbers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core import Client, Layout, Status
from lmcache_core.errors import CacheError, SettingsError, UsageError
from lmcache_core.guard import guarded
from lmcache_core_vllm.counters import Counters
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import RankFacts
from lmcache_core_vllm.steps import ChunkSave

if TYPE_CHECKING:
    from lmcache_blend import Chunks
    from lmcache_blend.described import DescribedChunks

log = logging.getLogger("vllm.lmcache_core")

SETTING = '"chunks" in kv_connector_extra_config'
STORES_WAITING_MAX = 8  # chunks that were read from the engine's memory, and that the server has not taken yet
_DIGIT = 7  # bits of a number that every dtype holds exactly
# Fields of a configuration that say nothing about KV, or that an engine sets as it likes.
_IDLE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


@dataclass(frozen=True)
class Shape:
    """Of the KV of an engine's layers, as its configuration says it: `heads` of one rank."""

    layers: int
    heads: int
    size: int


class ChunkOffers:
    """The scheduler's side: which requests' documents are stored, and why others are not."""

    def __init__(self, path: str, config: Mapping[str, Any], shape: Shape | None) -> None:
        """`path`: of the description; empty for none. `config`: the model's; `shape`: None for layers that differ."""
        self._path, self._config, self._shape = path, config, shape
        self._agreed: DescribedChunks | None = None
        self._agreed_with: RankFacts | None = None

    def offer(
        self, request: Any, groups: Sequence[Group], shards: Sequence[RankFacts], block_ids: Sequence[int]
    ) -> ChunkSave:
        """The document of a request whose prompt has been computed into these blocks. Raises `UsageError`, and
        `SettingsError` for a description that does not fit this engine."""
        if not self._path:
            raise UsageError(f"no description of chunks is known: set {SETTING}")
        for name, what in (
            ("lora_request", "an adapter"),
            ("mm_features", "images"),
            ("cache_salt", "a salt of its own"),
            ("prompt_embeds", "embeddings in place of tokens"),
        ):
            given = getattr(request, name, None)
            if given is not None and (not hasattr(given, "__len__") or len(given)):
                raise UsageError(f"the request has {what}, which the key of a chunk does not have")
        about = self._description(groups, shards)
        tokens = list(request.all_token_ids[: request.num_prompt_tokens])
        front = about.space.prefix_tokens
        if tokens[: len(front)] != front:
            raise UsageError(f"the prompt does not begin with the {len(front)} prefix tokens of {self._path}")
        count = len(tokens) - len(front)
        if not 1 <= count <= about.space.maximum:
            raise UsageError(
                f"the document has {count:,} tokens, and chunks have 1 to {about.space.maximum:,}: cut it, and send "
                "each chunk as a request of its own"
            )
        return ChunkSave(about, tokens, list(block_ids[: -(-len(tokens) // groups[0].block_tokens)]))

    def _description(self, groups: Sequence[Group], shards: Sequence[RankFacts]) -> DescribedChunks:
        try:
            from lmcache_blend.described import DescribedChunks
        except ImportError as error:
            raise UsageError("chunks need lmcache-blend in the engine's environment") from error
        about = DescribedChunks.read(Path(self._path))
        if about != self._agreed or shards[0] != self._agreed_with:
            why = self._differs(about, groups, shards)
            if why:
                raise SettingsError(
                    f"{self._path} is of another engine than this one: {why}", cure="describe the chunks of this model"
                )
            self._agreed, self._agreed_with = about, shards[0]
        return about

    def _differs(self, about: DescribedChunks, groups: Sequence[Group], shards: Sequence[RankFacts]) -> str:
        if len(groups) > 1 or groups[0].kind is not Kind.FULL or len(shards) != 1 or self._shape is None:
            return "chunks are of one KV group, of full attention, equal layers, and one rank"
        if len(about.space.chunks) != 1:
            return f"it is of {len(about.space.chunks)} ranks"
        facts = shards[0]
        if (about.model, about.weights) != (facts.model, facts.weights_version):
            return f"the model is {about.model} {about.weights}, and here {facts.model} {facts.weights_version}"
        wanted = Layout.from_text(about.space.chunks[0][0].layout)
        shape, dtype = self._shape, facts.groups[0].dtype
        here = Layout(dtype, (shape.layers, 2, shape.heads, about.space.step_tokens, shape.size), "LKHTD")
        if wanted != here:
            return f"a chunk is {wanted}, and here {here}"
        own = json.loads(json.dumps(dict(self._config), default=str))
        both = (own.keys() & about.config.keys()) - _IDLE
        names = sorted(name for name in both if own[name] != about.config[name])
        return f"the configurations differ in {', '.join(names)}" if names else ""


Write = Callable[[Any, Any, Any, Any], None]  # keys, values [tokens, heads, size], a cache, and slots in it


class ChunkStores:
    """One worker's side: reads documents from the engine's memory at the end of a step, and stores them in a thread of
    its own, because no step waits for the server."""

    def __init__(self, client: Client, layers: Sequence[tuple[Any, Write]], counters: Counters) -> None:
        """`layers`: in the model's order, the tensor of blocks, and what writes to one of its form."""
        self._client, self._layers, self._counters = client, layers, counters
        self._places: list[Any] = []  # of each layer
        self._chunks: tuple[DescribedChunks, Chunks] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-core-chunks")
        self._running: list[Future[Status]] = []
        self._why = ""

    def save(self, saves: Sequence[ChunkSave]) -> None:
        """Read these from the engine's memory now; it is stored later."""
        self.hear()
        for each in saves:
            if len(self._running) >= STORES_WAITING_MAX:
                self._counters.add("save_dropped_chunks")
                continue
            layers = guarded(self._refused, self._read, each)
            if layers is not None:
                self._running.append(self._thread.submit(self._store, each, layers))

    def hear(self) -> None:
        """Count what has ended."""
        for each in [each for each in self._running if each.done()]:
            self._running.remove(each)
            error = each.exception()  # whatever it is, no step fails for a chunk
            if error is not None:
                self._refused(error)
                continue
            figure = {Status.STORED: "save_chunks", Status.EXISTS: "save_existing_chunks"}
            self._counters.add(figure.get(each.result(), "save_dropped_chunks"))

    def wait(self, timeout_s: float) -> bool:
        """Until all that was read is stored, or given up."""
        for each in self._running:
            try:
                each.exception(timeout_s)
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """What has not begun is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _refused(self, error: BaseException) -> None:
        self._counters.add("save_dropped_chunks")
        if str(error) != self._why:
            fault = None if isinstance(error, CacheError) else error
            log.warning("a document is not stored as a chunk: %s", error, exc_info=fault)
        self._why = str(error)

    def _read(self, save: ChunkSave) -> list[tuple[Any, Any]]:
        """Keys and values of each layer `[heads, tokens, size]`, without the prefix tokens."""
        self._places = self._places or [places_of(tensor[0], write) for tensor, write in self._layers]
        first, end = len(save.about.space.prefix_tokens), len(save.tokens)
        found = []
        for (tensor, _), places in zip(self._layers, self._places, strict=True):
            pages = tensor[save.block_ids].flatten(start_dim=1)[:, places.flatten()]
            keys, values = pages.unflatten(1, places.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first:end]
            found.append((keys, values))
        return found

    def _store(self, save: ChunkSave, layers: list[tuple[Any, Any]]) -> Status:
        from lmcache_blend.arrays import words_of
        from lmcache_blend.chunks import Missing
        from lmcache_blend.cutting import Span
        from lmcache_blend.described import chunks_of

        if self._chunks is None or self._chunks[0] != save.about:
            self._chunks = save.about, chunks_of(self._client, save.about.space)
        chunks = self._chunks[1]
        span = Span(chunks.space.base, len(save.tokens))
        (key,) = chunks.space.keys(words_of(save.tokens), [span], 0, bytes.fromhex(save.about.extra))
        (status,) = chunks.store([Missing(span, (key,), (0,))], [layers])
        return status


def places_of(page: Any, write: Write) -> Any:
    """Where in a page `[heads, tokens, 2 * size]`, whose values are in a row, the backend puts each value of the keys
    and of the values: `[2, heads, tokens, size]`. Raises `UsageError` if it does anything but put them somewhere."""
    import torch

    if page.dim() != 3 or page.shape[2] % 2 or not page.is_contiguous() or not page.is_cpu:
        raise UsageError(f"blocks of the shape {tuple(page.shape)} are none of keys and values by heads")
    heads, tokens, size = page.shape[0], page.shape[1], page.shape[2] // 2
    numbers = torch.arange(page.numel()).reshape(2, tokens, heads, size)
    seen = torch.zeros(page.numel(), dtype=torch.int64)
    for shift in range(0, page.numel().bit_length(), _DIGIT):
        keys, values = (numbers >> shift & (1 << _DIGIT) - 1).to(page.dtype)
        scratch = torch.zeros_like(page)[None]
        try:
            write(keys, values, scratch, torch.arange(tokens))
        except (AttributeError, RuntimeError, TypeError) as error:
            raise UsageError(f"the attention backend writes to no cache but its own: {error}") from error
        seen |= scratch.flatten().to(torch.int64) << shift
    if not torch.equal(seen.sort().values, numbers.flatten()):
        raise UsageError("the attention backend changes keys or values when it stores them")
    return seen.argsort().reshape(2, tokens, heads, size).transpose(1, 2)
