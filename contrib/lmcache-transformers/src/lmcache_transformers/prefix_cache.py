"""The KV of prompts that were computed once, for one transformers model: load the prefix, compute the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lmcache_core import Status
from lmcache_core.limits import CHUNK_TOKENS
from lmcache_core.tokens import Namespace, chunk_keys
from lmcache_core.tokens.canonical import Tokens
from lmcache_transformers.chunks import Chunk, layout_of, pages_of, regions_of
from lmcache_transformers.geometry import geometry_of
from lmcache_transformers.support import check_model, tokens_max
from lmcache_transformers.weights import computed_by, names_of

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Cache, DynamicCache, PreTrainedModel

    from lmcache_core import Client, Region
    from lmcache_quant.dense import Dense


class Prefix(NamedTuple):
    """What `load` found: a cache that holds the first `tokens_reused` tokens, made of `nbytes` from the pool."""

    cache: DynamicCache
    tokens_reused: int
    nbytes: int


class Stored(NamedTuple):
    """What `store` did: chunks written now, chunks that were there already, and the bytes written."""

    chunks_written: int
    chunks_present: int
    nbytes: int


class PrefixCache:
    """Loads and stores prompt prefixes of one model, through one client.

    `model_name` and `weights_version` say whose KV it is: give the same ones wherever the weights are the same, and
    other ones where they are not. By default they are the repository and commit that the model was loaded from, or the
    content of the folder, wherever that is. A few
    values of every weight are in the keys too: weights that change under one name do not find KV of the old ones.
    `tenant_salt` keeps tenants apart. `wait_s`: how long `load` may wait for a tier; chunks that are not there by then
    are computed. `unproven_ok`: accept models that were not proven. `codec`: keep chunks encoded in the pool, by
    "int8", "k8v4" or "int4" of lmcache-quant: they take 0.52 to 0.28 of the bytes, and come back a little different.
    `certificate`: a file of `lmcache-core quality` that the codec must have for this model.

    Raises `UsageError`, with the reason, for a model that cannot be served. One sequence at a time (batch of one).
    Without a server, loads miss, and stores store nothing.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        *,
        model_name: str = "",
        chunk_tokens: int = CHUNK_TOKENS,
        weights_version: str = "",
        tenant_salt: str = "",
        wait_s: float = 5.0,
        unproven_ok: bool = False,
        codec: str = "",
        certificate: Path | None = None,
    ) -> None:
        check_model(model, unproven_ok=unproven_ok)
        model_name, weights_version = names_of(model, model_name, weights_version)
        self.client = client
        self.chunk_tokens = chunk_tokens
        self.geometry = geometry_of(model)
        self.layout = layout_of(self.geometry, chunk_tokens)
        self.namespace = Namespace(
            model_name,
            self.layout,
            weights_version,
            tenant_salt=tenant_salt,
            format=self.geometry.format(chunk_tokens),
        )
        self.plain = self.namespace  # in which chunks lie as they are, and no codec has them
        self._dense = _dense(client, self.namespace, codec, certificate) if codec else None
        if self._dense is not None:
            self.namespace = self._dense.namespace
        self.wait_s = wait_s
        self.tokens_max = tokens_max(model.config)
        self._model = model

    def keys(self, tokens: Tokens) -> list[bytes]:
        """The key of each whole chunk of `tokens`, for the current weights, adapters and autocast. Raises `UsageError`
        if the model is in training mode."""
        return chunk_keys(tokens, self.namespace, self.chunk_tokens, extra=computed_by(self._model))

    def load(self, tokens: Tokens, *, room_tokens: int = 0) -> Prefix:
        """The longest cached prefix of `tokens`, in whole chunks, as a cache to call the model with.

        At least one token is always left to compute: the model needs one to predict the next. Call the model with
        `tokens[prefix.tokens_reused:]` and `cache=prefix.cache` (before transformers 5.24: `past_key_values`).
        `room_tokens`: how many tokens the cache will hold in the end; more are possible, and cost a copy.

        If positions depend on the length of the prompt (see `tokens_max`), longer ones find nothing.
        """
        from lmcache_transformers.room import cache_with_room, copy_rooms, fill

        capacity = max(room_tokens, len(tokens) + self.chunk_tokens)
        keys = self.keys(tokens)[: max(0, len(tokens) - 1) // self.chunk_tokens]
        if self._too_long(len(tokens)):
            keys = []
        hits = self.client.lookup(keys, namespace=self.namespace, wait_s=self.wait_s).hits if keys else 0
        on_host = all(layer.device.type == "cpu" for layer in self.geometry.layers)
        if hits:
            held = cache_with_room(self.geometry, capacity if on_host else hits * self.chunk_tokens, "cpu")
            hits = self._read(keys[:hits], held)
            if hits and on_host:
                fill(held, hits * self.chunk_tokens)
                return self._prefix(held, hits)
        cache = cache_with_room(self.geometry, capacity)
        if hits:
            fill(held, hits * self.chunk_tokens)
            copy_rooms(held, cache)
        return self._prefix(cache, hits)

    def _prefix(self, cache: DynamicCache, chunks: int) -> Prefix:
        return Prefix(cache, chunks * self.chunk_tokens, chunks * self.namespace.layout.nbytes)

    def _read(self, keys: list[bytes], cache: DynamicCache) -> int:
        """How many chunks from the first on are now in the rooms of `cache`. A chunk that left the pool meanwhile is a
        miss, and so are those behind it."""
        regions = regions_of(cache, self.geometry, self.chunk_tokens, len(keys), reserved=True)
        if self._dense is not None:
            return self._decode(self._dense, keys, regions)
        got = self.client.retrieve_strided(keys, regions, range(len(keys)), namespace=self.namespace)
        statuses = list(got.statuses[0])
        return next((at for at, status in enumerate(statuses) if status is not Status.HIT), len(statuses))

    def store(self, tokens: Tokens, cache: Cache) -> Stored:
        """Store the whole chunks of `tokens` whose KV is in `cache`, straight into the pool. `tokens` are those that
        the cache holds, from its first on. Chunks that exist are not copied again; chunks that find no room are
        skipped. If positions depend on the length of the prompt (see `tokens_max`), nothing of longer ones is stored.
        """
        length = int(cache.get_seq_length())
        keys = self.keys(tokens)[: min(len(tokens), length) // self.chunk_tokens]
        if not keys or self._too_long(length):
            return Stored(0, 0, 0)
        have = self.client.lookup(keys, namespace=self.namespace, ask=False).hits
        if have == len(keys):
            return Stored(0, have, 0)
        regions = regions_of(cache, self.geometry, self.chunk_tokens, len(keys))
        if self._dense is None:
            result = self.client.store_strided(keys, regions, range(len(keys)), namespace=self.namespace)
            statuses = list(result.statuses)
        else:
            statuses = self._encode(self._dense, keys, regions)
        written = statuses.count(Status.STORED)
        return Stored(written, statuses.count(Status.EXISTS), written * self.namespace.layout.nbytes)

    def _encode(self, dense: Dense, keys: list[bytes], regions: list[Region]) -> list[Status]:
        """One chunk after another, so that a single one is copied into a row."""
        chunk, statuses = Chunk([pages_of(region) for region in regions], self.layout.nbytes), []
        for at, key in enumerate(keys):
            chunk.gather(at)
            statuses += dense.store([key], [chunk.row])
        return statuses

    def _decode(self, dense: Dense, keys: list[bytes], regions: list[Region]) -> int:
        chunk = Chunk([pages_of(region) for region in regions], self.layout.nbytes)
        for at, key in enumerate(keys):
            if dense.retrieve([key], [chunk.row]) != [Status.HIT]:
                return at
            chunk.scatter(at)
        return len(keys)

    def _too_long(self, tokens: int) -> bool:
        return self.tokens_max is not None and tokens > self.tokens_max


def _dense(client: Client, namespace: Namespace, codec: str, certificate: Path | None) -> Dense:
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins

    serde = load_plugins().build(Kind.SERDE, codec, None)  # says what to install
    from lmcache_quant.dense import Dense

    return Dense(client, namespace, serde, certificate)
