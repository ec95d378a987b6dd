"""The KV of prompts that were computed once, for one transformers model: load the prefix, compute the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from lmcache_core.client.results import Status
from lmcache_core.errors import ClearedError, DisconnectedError, LeaseExpiredError
from lmcache_core.limits import CHUNK_TOKENS
from lmcache_core.tokens import Namespace, chunk_keys
from lmcache_core.tokens.canonical import Tokens
from lmcache_transformers.chunks import gather_chunks, layout_for, write_chunks

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from lmcache_core.client.client import Client

_ENDED_WITHOUT_US = (ClearedError, DisconnectedError, LeaseExpiredError)


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

    `model_name` and `weights_version` say whose KV it is: give the same ones wherever the weights are the same,
    and other ones where they are not; nothing looks into the weights. `tenant_salt` keeps tenants apart.
    `wait_s`: how long `load` may wait for what a tier holds; what is not there by then is computed.

    One sequence at a time (batch of one). A lost server is a miss, and a store that stores nothing.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        *,
        model_name: str,
        chunk_tokens: int = CHUNK_TOKENS,
        weights_version: str = "",
        tenant_salt: str = "",
        wait_s: float = 5.0,
    ) -> None:
        self.client = client
        self.chunk_tokens = chunk_tokens
        self.layout = layout_for(model.config, chunk_tokens, model.dtype)
        self.namespace = Namespace(model_name, self.layout, weights_version, tenant_salt=tenant_salt)
        self.wait_s = wait_s
        self._device = model.device

    def keys(self, tokens: Tokens) -> list[bytes]:
        """The key of each whole chunk of `tokens`."""
        return chunk_keys(tokens, self.namespace, self.chunk_tokens)

    def load(self, tokens: Tokens) -> Prefix:
        """The longest cached prefix of `tokens`, in whole chunks, as a cache to call the model with.

        At least one token is always left to compute: the model needs one to say what comes next. Call the model
        with `tokens[prefix.tokens_reused:]` and `past_key_values=prefix.cache`.
        """
        keys = self.keys(tokens)[: max(0, len(tokens) - 1) // self.chunk_tokens]
        found = self.client.lookup(keys, namespace=self.namespace, wait_s=self.wait_s)
        # Without a call, and proven afterwards. What left the pool while it was copied is read again under a lease.
        for optimistic in (True, False) if found.hits else ():
            prefix = self._read(keys[: found.hits], optimistic)
            if prefix is not None:
                return prefix
        return Prefix(write_chunks([]), 0, 0)

    def _read(self, keys: Sequence[bytes], optimistic: bool) -> Prefix | None:
        """None: it cannot be shown that what was copied is what these keys stand for."""
        with self.client.prepare_retrieve(keys, namespace=self.namespace, optimistic=optimistic) as lease:
            reused = lease.hits
            if optimistic and reused < len(keys):  # the server knows more than the index, or again
                return None
            cache = write_chunks([lease.tensor(position) for position in range(reused)], self._device)
            try:
                read = lease.finish()
            except _ENDED_WITHOUT_US:
                # The server that kept these slots for us is gone, and its successor may have emptied them while
                # we copied. Computing the prompt is slower; trusting the copy would be wrong.
                return None
        if read[:reused].count(Status.HIT) < reused:
            return None
        return Prefix(cache, reused * self.chunk_tokens, reused * self.layout.nbytes)

    def store(self, tokens: Tokens, cache: DynamicCache) -> Stored:
        """Store the whole chunks of `tokens` whose KV stands in `cache`, straight into the pool.

        `tokens` are those that the cache holds, from its first on. What is there already is not copied again;
        what finds no room now is left out.
        """
        held = min(len(tokens), cache.get_seq_length())
        keys = self.keys(tokens)[: held // self.chunk_tokens]
        with self.client.prepare_store(keys, namespace=self.namespace) as lease:
            present = lease.statuses.count(Status.EXISTS)
            granted = [at for at, status in enumerate(lease.statuses) if status is Status.GRANTED]
            if granted:
                gather_chunks(cache, granted, [lease.tensor(at) for at in granted])
                with suppress(*_ENDED_WITHOUT_US):  # not stored, then
                    lease.commit()
            written = lease.statuses.count(Status.STORED)
        return Stored(written, present, written * self.layout.nbytes)
