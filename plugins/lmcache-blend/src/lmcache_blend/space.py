"""What separates the chunks of one model from all others, and their keys: of their own tokens, not of those before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_blend.cutting import LENGTHS, Lengths, Span
from lmcache_blend.rope import Rope
from lmcache_core import Layout, Namespace
from lmcache_core.errors import UsageError
from lmcache_core.tokens.canonical import TOKEN_BYTES, token_words
from lmcache_core.tokens.namespace import label_from

# First in what is hashed. Keys of prefixes are hashes of other bytes: none of them is a key of a chunk.
_TAG = b"lmcache-blend chunk 1"
STEP_TOKENS = (
    64  # objects are as long as their chunk, rounded up to this: so many kinds of objects, and so little waste
)
ROOMS_MAX = 64  # each is a namespace


@dataclass(frozen=True)
class ChunkSpace:
    """The chunks of one model.

    `layout_of`: the layout of an object for so many tokens. Chunks differ in length and the objects of a namespace do
    not, so there is a namespace for each multiple of `step_tokens` up to the longest chunk: `rooms`.

    `prefix_tokens`: what stands in front of a chunk when its KV is computed, from position 0 on (BOS; what an attention
    sink needs). They are part of each key, and not of the objects. `rope`: how the model rotates keys. `kv_ranks`: into
    how many parts the KV is divided, as in `Namespace.kv_shard`; each is stored by its rank. The other fields are those
    of `Namespace`. Raises `UsageError`.
    """

    model: str
    layout_of: Callable[[int], Layout] = field(compare=False)
    rope: Rope
    prefix_tokens: tuple[int, ...] = ()
    lengths: Lengths = LENGTHS
    step_tokens: int = STEP_TOKENS
    weights_version: str = ""
    kv_ranks: int = 1
    tenant_salt: str = field(default="", repr=False)
    format: str = ""
    _namespaces: dict[tuple[int, int], Namespace] = field(default_factory=dict, init=False, repr=False, compare=False)
    _roots: dict[tuple[int, int], bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.lengths.check()
        if type(self.step_tokens) is not int or not self.step_tokens >= 1:
            raise UsageError(f"step_tokens is {self.step_tokens!r}: give a whole number of tokens, 1 or more")
        if self.room(self.lengths.maximum) // self.step_tokens > ROOMS_MAX:
            raise UsageError(
                f"chunks of up to {self.lengths.maximum} tokens in steps of {self.step_tokens} need more than "
                f"{ROOMS_MAX} namespaces: use a larger step_tokens"
            )
        if type(self.kv_ranks) is not int or self.kv_ranks < 1:
            raise UsageError(f"kv_ranks is {self.kv_ranks!r}: give how many parts there are, 1 or more")
        self.namespace(self.step_tokens)  # says what is wrong with the names

    @property
    def base(self) -> int:
        """The position of a chunk's first token when its KV was computed."""
        return len(self.prefix_tokens)

    def room(self, tokens: int) -> int:
        """For how many tokens the object of such a chunk has room."""
        return -(-tokens // self.step_tokens) * self.step_tokens

    @property
    def rooms(self) -> list[int]:
        """All rooms, in tokens."""
        return list(range(self.step_tokens, self.room(self.lengths.maximum) + 1, self.step_tokens))

    def namespace(self, room: int, rank: int = 0) -> Namespace:
        """Of the objects with this room, of one rank."""
        found = self._namespaces.get((room, rank))
        if found is None:
            found = Namespace(
                self.model,
                self.layout_of(room),
                self.weights_version,
                (rank, self.kv_ranks),
                self.tenant_salt,
                f"{self.format} chunks by content, {room} tokens from {self.base} on, {self.rope.text}",
                label_from(self.model, f" chunks {room}" + (f" {rank}/{self.kv_ranks}" if self.kv_ranks > 1 else "")),
            )
            self._namespaces[room, rank] = found
        return found

    def use(self, room: int, rank: int, namespace: Namespace) -> None:
        """Use this one from now on: for somebody who knows its digest, and not the salt that it was made of."""
        self._namespaces[room, rank] = namespace
        self._roots.pop((room, rank), None)

    def keys(
        self, words: npt.NDArray[np.uint32], spans: Sequence[Span], rank: int = 0, extra: bytes = b""
    ) -> list[bytes]:
        """SHA-256 of the namespace, the prefix tokens, `extra`, and the chunk's tokens. `extra`: what the KV depends on
        besides, as for `chunk_keys`. `words` are those of the whole text."""
        text, extra, step = words.data.cast("B"), _length_first(extra), self.step_tokens
        states: dict[int, Any] = {}
        keys = []
        for first, end in spans:
            steps = (end - first - 1) // step
            state = states.get(steps)
            if state is None:
                state = states[steps] = hashlib.sha256(self._root(self.room(end - first), rank) + extra)
            one = state.copy()
            one.update(text[first * TOKEN_BYTES : end * TOKEN_BYTES])
            keys.append(one.digest())
        return keys

    def _root(self, room: int, rank: int) -> bytes:
        found = self._roots.get((room, rank))
        if found is None:
            found = _TAG + self.namespace(room, rank).digest + _length_first(self._prefix_bytes)
            self._roots[room, rank] = found
        return found

    @cached_property
    def _prefix_bytes(self) -> bytes:
        return bytes(token_words(self.prefix_tokens))


def _length_first(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
