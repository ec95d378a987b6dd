"""The order of a prompt's documents of which most is stored as a prefix. Nothing about KV changes: this is exact."""

from __future__ import annotations

import hashlib
import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_blend.arrays import words_of
from lmcache_core import Client, Namespace
from lmcache_core.errors import UsageError
from lmcache_core.limits import CHUNK_TOKENS
from lmcache_core.tokens.canonical import Tokens
from lmcache_core.tokens.keys import chunk_keys

DOCUMENTS_MAX = 256  # of one prompt: a step looks at each, so the work grows with the square
STEPS_PER_DOCUMENT = 4  # each looks at all documents that are left; a greedy walk takes one
WALKED_TOKENS_MAX = 1 << 26  # of all branches: half a second
KEY_TOKENS, BRANCH_TOKENS = 128, 512  # that take as long to hash as a key to be made and searched, and a branch kept
SEEN_MAX = 65_536  # documents: about 10 MB. Then counts are halved, and single ones forgotten
_Words = npt.NDArray[np.uint32]


class Prefixes(Protocol):
    """How somebody stores prefixes: in chunks of `chunk_tokens` tokens, each with a name that stands for all before it,
    too. `lmcache_core_vllm.planning` has one for an engine's blocks."""

    @property
    def chunk_tokens(self) -> int:
        """Of a chunk."""
        ...

    def register(self, client: Client) -> None:
        """So that the index can be searched without a call. Called for each plan."""
        ...

    def names(self, words: npt.NDArray[np.uint32], previous: bytes | None) -> list[bytes]:
        """One for each whole chunk of these tokens, behind the chunk of the name `previous`; None: at the beginning."""
        ...

    def stored(self, client: Client, names: Sequence[bytes]) -> int:
        """How many of the first ones are stored, by the index."""
        ...


@dataclass(frozen=True)
class KeyedPrefixes:
    """Prefixes under the keys of `chunk_keys`."""

    namespace: Namespace
    chunk_tokens: int = CHUNK_TOKENS
    extra: bytes = b""

    def register(self, client: Client) -> None:
        """With the server that is there now."""
        client.register_layout(self.namespace)

    def names(self, words: npt.NDArray[np.uint32], previous: bytes | None) -> list[bytes]:
        """The keys themselves."""
        if previous is None:
            extra = self.extra if len(words) else b""
            return chunk_keys(words, self.namespace, self.chunk_tokens, extra=extra)
        return chunk_keys(words, self.namespace, self.chunk_tokens, previous=previous)

    def stored(self, client: Client, names: Sequence[bytes]) -> int:
        """Not by `lookup`, which would count each branch as a lookup in the server's figures."""
        return int(client.lookup_many([(self.namespace, names)], unit_tokens=1, ask=False).tokens)


class Plan(NamedTuple):
    """`order`: positions of the documents. `reused_tokens`: what is stored of the prompt in this order, in whole
    chunks. `tokens`: of the prompt. `steps` it took, and searches of the index, one for each of `branches`."""

    order: tuple[int, ...]
    reused_tokens: int
    tokens: int
    steps: int
    branches: int


class _Branch(NamedTuple):
    """The beginning of a prompt of which every whole chunk is stored. `rest` are the tokens behind its last one,
    as views of documents: a branch copies none."""

    order: tuple[int, ...]
    chunks: int
    key: bytes | None
    rest: tuple[_Words, ...]


class Planner:
    """Plans prompts of one namespace of prefixes, through one client. Any number of threads may use it.

    `prefixes`: where the prefixes are; `chunk_tokens` and `extra`: as they were stored with; or, in place of all three,
    how somebody else stores them. Only the pool's index is searched: what lies on a tier alone counts as not stored.
    """

    def __init__(
        self,
        client: Client,
        prefixes: Namespace | Prefixes,
        chunk_tokens: int = CHUNK_TOKENS,
        *,
        extra: bytes = b"",
    ) -> None:
        self.client = client
        self.prefixes: Prefixes = (
            KeyedPrefixes(prefixes, chunk_tokens, extra) if isinstance(prefixes, Namespace) else prefixes
        )
        self._seen = _Seen()

    def plan(self, system: Tokens, documents: Sequence[Tokens], question: Tokens = ()) -> Plan:
        """Walk the tree of stored prefixes from `system` on: at each step all documents that are left are looked up
        behind those that were chosen. The branch that reaches farthest goes first; another is taken up when it
        ends. When nothing more is stored, or a walk has done the work of `WALKED_TOKENS_MAX` tokens, the rest follows,
        first what this planner has seen in most prompts: then the next prompts have more to share. Raises `UsageError`.
        """
        if len(documents) > DOCUMENTS_MAX:
            raise UsageError(f"{len(documents)} documents in one prompt, and the limit is {DOCUMENTS_MAX}")
        self.prefixes.register(self.client)
        parts = [words_of(each) for each in documents]
        start, last = words_of(system), words_of(question)
        tokens = len(start) + sum(map(len, parts)) + len(last)
        steps_max = STEPS_PER_DOCUMENT * (len(parts) + 1)
        ends, open_branches = _Best(), _Open()
        steps, branches, walked = 0, 2, 0
        (root,) = self._extended(_Branch((), 0, None, ()), [(None, start)])
        ends.note(root)
        open_branches.add(root)
        while steps < steps_max and walked < WALKED_TOKENS_MAX and (best := open_branches.take()) is not None:
            left = [at for at in range(len(parts)) if at not in best.order]
            after: list[tuple[int | None, _Words]] = [(at, parts[at]) for at in left] or [(None, last)]
            steps, branches = steps + 1, branches + len(after)
            looked = len(after) * sum(map(len, best.rest)) + sum(len(words) for _, words in after)
            walked += looked + looked // self.prefixes.chunk_tokens * KEY_TOKENS + len(after) * BRANCH_TOKENS
            for reached in self._extended(best, after):
                ends.note(reached)
                if left:
                    open_branches.add(reached)
        order = (*ends.order, *self._rest(parts, ends.order))
        whole = np.concatenate([start, *(parts[at] for at in order), last])
        (reached,) = self._extended(_Branch((), 0, None, ()), [(None, whole)])
        return Plan(order, reached.branch.chunks * self.prefixes.chunk_tokens, tokens, steps, branches)

    def _rest(self, parts: Sequence[_Words], chosen: Sequence[int]) -> list[int]:
        counts = self._seen.count([hashlib.sha256(part.data).digest() for part in parts])
        left = [at for at in range(len(parts)) if at not in chosen]
        return sorted(left, key=lambda at: -counts[at])

    def _extended(self, branch: _Branch, steps: Sequence[tuple[int | None, _Words]]) -> list[_Reached]:
        """The branch with each of these behind it; each is one search of the index."""
        reached = []
        for number, words in steps:
            pieces = (*branch.rest, words)
            text = np.concatenate(pieces) if len(pieces) > 1 else words
            keys = self.prefixes.names(text, branch.key)
            hits = self.prefixes.stored(self.client, keys) if keys else 0
            order = branch.order if number is None else (*branch.order, number)
            rest = _last(pieces, len(text) - len(keys) * self.prefixes.chunk_tokens)
            last = keys[-1] if keys else branch.key
            reached.append(_Reached(_Branch(order, branch.chunks + hits, last, rest), hits == len(keys)))
        return reached


def _last(pieces: Sequence[_Words], tokens: int) -> tuple[_Words, ...]:
    """Views of the last so many tokens of the pieces."""
    found: list[_Words] = []
    for piece in reversed(pieces):
        if tokens <= 0:
            break
        found.append(piece[max(0, len(piece) - tokens) :])
        tokens -= len(piece)
    return tuple(reversed(found))


class _Reached(NamedTuple):
    """Where a branch came to. `alive`: all of its whole chunks are stored, so it can go on; a document that ends within
    a chunk adds none, and says nothing."""

    branch: _Branch
    alive: bool


class _Open:
    """Branches that can go on, the farthest first; of equals the one that has used fewer documents."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, _Branch]] = []
        self._number = 0

    def add(self, reached: _Reached) -> None:
        if reached.alive:
            branch = reached.branch
            self._number += 1
            heapq.heappush(self._heap, (-branch.chunks, len(branch.order), self._number, branch))

    def take(self) -> _Branch | None:
        return heapq.heappop(self._heap)[-1] if self._heap else None


class _Best:
    """The branch that has reached farthest."""

    def __init__(self) -> None:
        self.order: tuple[int, ...] = ()
        self._chunks = -1

    def note(self, reached: _Reached) -> None:
        if reached.branch.chunks > self._chunks:
            self.order, self._chunks = reached.branch.order, reached.branch.chunks


class _Seen:
    """In how many prompts documents were."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def count(self, documents: Sequence[bytes]) -> list[int]:
        """One prompt more. Returns how often each of its documents was seen before."""
        with self._lock:
            before = [self._counts.get(each, 0) for each in documents]
            for each, times in zip(documents, before, strict=True):
                self._counts[each] = times + 1
            if len(self._counts) > SEEN_MAX:
                self._counts = {each: times // 2 for each, times in self._counts.items() if times > 1}
            if len(self._counts) > SEEN_MAX:  # all of them are popular
                self._counts = {}
        return before
