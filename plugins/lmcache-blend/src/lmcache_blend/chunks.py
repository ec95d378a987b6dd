"""Chunks of one model, through one client: found anywhere in a prompt, moved on their way out of the pool."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_blend.arrays import array_of, positions_of, words_of
from lmcache_blend.cutting import Span, spans_of
from lmcache_blend.rope import KINDS, move
from lmcache_blend.space import ChunkSpace
from lmcache_core import Client, Namespace, Status
from lmcache_core.errors import DisconnectedError, LeaseExpiredError, LimitError, UsageError
from lmcache_core.limits import BATCH_KEYS_MAX, CHUNK_TOKENS
from lmcache_core.tokens.canonical import Tokens
from lmcache_core.tokens.keys import chunk_keys

if TYPE_CHECKING:
    from lmcache_core import LookupHandle, LookupResult
    from lmcache_core.client import ReadLease

ANSWER_S = 1.0  # for the server's answer that a wait is over
Layers = Sequence[tuple[Any, Any]]  # keys and values of each layer: [heads, tokens, size], a view of a longer cache


class Match(NamedTuple):
    """Tokens of a prompt whose KV is stored.

    `tokens` of them: from `new_start` on in the prompt, and from `old_start` on where the KV was computed. `offset`: at
    which token of the object they begin; not 0 if its first ones belong to the prefix. `keys`: of the object, one for
    each rank. `exact`: prompt and chunk begin alike, and at the same position: the KV is what the model would compute.
    """

    old_start: int
    new_start: int
    tokens: int
    offset: int
    room: int
    keys: tuple[bytes, ...]
    exact: bool

    @property
    def key(self) -> bytes:
        """Of the first rank."""
        return self.keys[0]


class Missing(NamedTuple):
    """A chunk of a prompt behind the prefix that at least one rank does not have."""

    span: Span
    keys: tuple[bytes, ...]
    ranks: tuple[int, ...]


class Found(NamedTuple):
    """What is stored of a prompt of `tokens` tokens.

    `prefix_tokens`: of the longest prefix that is stored, exact; `prefix_keys`: its chunks, of the first rank.
    `matches`: chunks behind it, in the order of the prompt, apart from each other and from the prefix. `missing`: the
    chunks that are not stored, for `Chunks.store`. `rank_hits`: how many of all chunks behind the prefix each rank has.
    `prefix_rank_tokens`: how far each rank has the prefix, of which the least counts; empty if none was looked up.
    """

    tokens: int
    prefix_tokens: int
    prefix_keys: tuple[bytes, ...]
    matches: tuple[Match, ...]
    missing: tuple[Missing, ...]
    rank_hits: tuple[int, ...]
    prefix_rank_tokens: tuple[int, ...] = ()

    @property
    def matched_tokens(self) -> int:
        """Of all matches."""
        return sum(match.tokens for match in self.matches)


class Chunks:
    """Finds, stores and reads the chunks of a `ChunkSpace`. Any number of threads may use it.

    `prefixes`: the namespace in which prefixes of the same model are stored, in chunks of `prefix_chunk_tokens`, or one
    for each rank; None: prefixes are not looked up. Without a server everything misses, and nothing is stored.
    """

    def __init__(
        self,
        client: Client,
        space: ChunkSpace,
        prefixes: Namespace | Sequence[Namespace] | None = None,
        prefix_chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.client = client
        self.space = space
        ranks = range(space.kv_ranks)
        if isinstance(prefixes, Namespace):
            prefixes = [replace(prefixes, kv_shard=(rank, space.kv_ranks)) for rank in ranks]
        if prefixes is not None and len(prefixes) != space.kv_ranks:
            raise UsageError(f"{len(prefixes)} namespaces of prefixes for {space.kv_ranks} ranks: give one for each")
        self.prefixes = tuple(prefixes or ())
        self.prefix_chunk_tokens = prefix_chunk_tokens

    def find(
        self,
        tokens: Tokens,
        marks: Sequence[tuple[int, int]] | None = None,
        *,
        extra: bytes = b"",
        prefix_hits: int | None = None,
        wait_s: float = 0.0,
        keys_max: int | None = None,
    ) -> Found:
        """The longest stored prefix, then the chunks behind it.

        `marks`: first token and end of each document, if the application knows them, as for `cut`. `extra`: as for
        `chunk_keys`. `prefix_hits`: how many tokens of the prefix are in use already; None: look it up. `wait_s`: how
        long to wait for the tiers: for the prefix, then for all missing chunks at once; 0: only the pool's index is
        searched, without a call. `keys_max`: how many chunks behind the prefix, times ranks, are looked up at most.
        Raises `UsageError`, and `LimitError` for more than `keys_max`.
        """
        deadline = time.monotonic() + wait_s
        words = words_of(tokens)
        spans = spans_of(words, self.space.lengths, marks)
        prefix_keys, by_rank = self._prefix(words, extra, deadline) if prefix_hits is None else ((), ())
        if prefix_hits is None:
            prefix_hits = min(by_rank, default=0)
        behind = [span for span in spans if span.end > prefix_hits]
        ranks, base = self.space.kv_ranks, self.space.base
        if keys_max is not None and len(behind) * ranks > keys_max:
            raise LimitError(
                f"{len(behind):,} chunks for {ranks} ranks are {len(behind) * ranks:,} keys, and the limit is "
                f"{keys_max:,}: ask for fewer tokens at once, or cut longer chunks"
            )
        keys = [self.space.keys(words, behind, rank, extra) for rank in range(ranks)]
        rooms = [self.space.room(end - first) for first, end in behind]
        there = self._there(rooms, keys, max(0.0, deadline - time.monotonic()))
        everywhere = set.intersection(*there)
        begins = tuple(words[:base].tolist()) == self.space.prefix_tokens
        matches, missing = [], []
        for at, (span, own) in enumerate(zip(behind, zip(*keys, strict=True), strict=True)):
            first, end = span
            if at in everywhere:
                offset = prefix_hits - first if first < prefix_hits else 0
                start = first + offset
                matches.append(
                    Match(base + offset, start, end - start, offset, rooms[at], own, begins and first == base)
                )
            else:
                missing.append(Missing(span, own, tuple(rank for rank, found in enumerate(there) if at not in found)))
        hits = tuple(map(len, there))
        return Found(len(words), prefix_hits, prefix_keys, tuple(matches), tuple(missing), hits, by_rank)

    def _prefix(
        self, words: npt.NDArray[np.uint32], extra: bytes, deadline: float
    ) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """The keys of the longest prefix that all ranks have, and how many tokens of it each has."""
        if len(words) < self.prefix_chunk_tokens:
            return (), (0,) * len(self.prefixes)
        keys, tokens = [], []
        for namespace in self.prefixes:
            keys.append(chunk_keys(words, namespace, self.prefix_chunk_tokens, extra=extra))
            self._register(namespace)
            left_s = max(0.0, deadline - time.monotonic())
            found = self.client.lookup(keys[-1], namespace=namespace, wait_s=left_s, ask=left_s > 0)
            tokens.append(found.hits * self.prefix_chunk_tokens)
        return tuple(keys[0][: min(tokens) // self.prefix_chunk_tokens]) if keys else (), tuple(tokens)

    def _there(self, rooms: Sequence[int], keys: Sequence[Sequence[bytes]], wait_s: float) -> list[set[int]]:
        """For each rank the chunks that it has. One search of the index for each room; then all that is missing is
        asked for before the first answer is waited for."""
        by_room: dict[int, list[int]] = {}
        for at, room in enumerate(rooms):
            by_room.setdefault(room, []).append(at)
        there: list[set[int]] = [set() for _ in keys]
        deadline = time.monotonic() + wait_s
        pending: list[tuple[set[int], list[int], LookupHandle]] = []
        for rank, own in enumerate(keys):
            for room, chunks in by_room.items():
                namespace, wanted = self._namespace(room, rank), [own[at] for at in chunks]
                found = self.client.lookup(wanted, namespace=namespace, prefix=False, ask=False)
                there[rank].update(_served(chunks, found))
                rest = [at for at in chunks if at not in there[rank]] if wait_s > 0 else []
                for first in range(0, len(rest), BATCH_KEYS_MAX):
                    part = rest[first : first + BATCH_KEYS_MAX]
                    handle = self.client.lookup_nowait(
                        [own[at] for at in part], namespace=namespace, prefix=False, wait_s=wait_s
                    )
                    pending.append((there[rank], part, handle))
        for found_there, part, handle in pending:
            answer = handle.wait(max(0.0, deadline + ANSWER_S - time.monotonic()))
            if answer is None:
                handle.cancel()
            else:
                found_there.update(_served(part, answer))
        return there

    def _namespace(self, room: int, rank: int) -> Namespace:
        namespace = self.space.namespace(room, rank)
        self._register(namespace)
        return namespace

    def _register(self, namespace: Namespace) -> None:
        """With the server that is there now, so that the index can be searched without a call; a call for each server.
        Without one, the index of the last one still serves."""
        self.client.register_layout(namespace)

    # --- bytes ------------------------------------------------------------------------------------------

    def store(self, chunks: Sequence[Missing], sources: Sequence[Layers], *, rank: int = 0) -> list[Status]:
        """Store the KV of chunks of one rank, as computed at position 0 behind the model's prefix tokens.

        `sources`: for each chunk the keys and values of each layer, [heads, tokens, size] without the prefix tokens:
        numpy arrays or torch tensors in host memory, of the layout's dtype (see `check_layout`). Returns a status for
        each chunk; those that are stored already are not copied, and of equal ones the first is: the others then exist.
        Raises `UsageError`.
        """
        if len(chunks) != len(sources):
            raise UsageError(f"{len(sources)} sources for {len(chunks)} chunks: give one for each")
        statuses = [Status.UNREACHABLE] * len(chunks)
        firsts: dict[bytes, int] = {}
        for at, chunk in enumerate(chunks):
            firsts.setdefault(chunk.keys[rank], at)
        by_room: dict[int, list[int]] = {}
        for at in firsts.values():
            by_room.setdefault(self.space.room(chunks[at].span.tokens), []).append(at)
        for room, positions in by_room.items():
            namespace = self._namespace(room, rank)
            kind = check_layout(namespace)
            layers = [_checked(sources[at], namespace, chunks[at].span.tokens) for at in positions]
            keys = [chunks[at].keys[rank] for at in positions]
            with self.client.prepare_store(keys, namespace=namespace) as lease:
                with contextlib.suppress(DisconnectedError, LeaseExpiredError):  # the statuses say so
                    for position in lease.granted:
                        _fill(lease.view(position), layers[position], namespace, kind)
                    lease.commit()
            for at, status in zip(positions, lease.statuses, strict=True):
                statuses[at] = Status.ABORTED if status is Status.GRANTED else status
        for at, chunk in enumerate(chunks):
            if (first := firsts[chunk.keys[rank]]) != at:
                statuses[at] = Status.EXISTS if statuses[first] is Status.STORED else statuses[first]
        return statuses

    def read(
        self, matches: Sequence[Match], targets: Sequence[Layers], *, rank: int = 0, new_starts: Sequence[int] = ()
    ) -> list[bool]:
        """Copy the KV of matches out of the pool, the keys moved to the positions of the prompt, in one pass.

        `targets`: for each match the keys and values of each layer, [heads, tokens, size]: views of a cache are fine.
        `new_starts`: other positions than the matches have. Returns which were read: what has left the pool since it
        was found, or is not whole, is a miss, and its target's content is undefined. Raises `UsageError`.
        """
        if len(matches) != len(targets) or (new_starts and len(new_starts) != len(matches)):
            raise UsageError(f"{len(targets)} targets for {len(matches)} matches: give one for each")
        starts = list(new_starts) or [match.new_start for match in matches]
        read = [False] * len(matches)
        by_room: dict[int, list[int]] = {}
        for at, match in enumerate(matches):
            by_room.setdefault(match.room, []).append(at)
        for room, positions in by_room.items():
            namespace = self._namespace(room, rank)
            kind = check_layout(namespace)
            layers = [_checked(targets[at], namespace, matches[at].tokens, writable=True) for at in positions]
            keys = [matches[at].keys[rank] for at in positions]
            finished: list[Status] = []
            with (
                contextlib.suppress(DisconnectedError, LeaseExpiredError),  # nothing that was read can be trusted
                self.client.prepare_retrieve(keys, namespace=namespace, prefix=False, optimistic=True) as lease,
            ):
                for position in lease.granted:
                    at = positions[position]
                    self._take(lease, position, matches[at], starts[at], layers[position], kind)
                finished = lease.finish()
            for at, status in zip(positions, finished, strict=False):
                read[at] = status is Status.HIT
        return read

    def _take(self, lease: ReadLease, position: int, match: Match, start: int, layers: Layers, kind: str) -> None:
        layout, rope = lease.namespace.layout, self.space.rope
        tokens = slice(match.offset, match.offset + match.tokens)
        with lease.view(position) as view:
            stored = np.frombuffer(view, _item(kind)).reshape(layout.shape)
            table = None
            if start != match.old_start:
                old, new = positions_of(match.old_start, match.tokens), positions_of(start, match.tokens)
                table = rope.turn(old, new)
            for number, (keys, values) in enumerate(layers):
                move(stored[number, 0, :, tokens], keys, table, kind, rope.dimensions, rope.interleaved, 1)
                move(stored[number, 1, :, tokens], values, None, kind, 0, False, 1)
            del stored


def _served(chunks: Sequence[int], found: LookupResult) -> list[int]:
    return [at for at, status in zip(chunks, found.statuses, strict=True) if status is Status.GRANTED]


def check_layout(namespace: Namespace) -> str:
    """The dtype of objects that `store` and `read` can copy: axes LKHTD (layer; keys, then values; head; token; size),
    of float32, float16 or bfloat16. Raises `UsageError` for others, whose owner copies them."""
    layout = namespace.layout
    if layout.memory_format != "LKHTD" or layout.dtype not in KINDS or layout.shape[1] != 2:
        raise UsageError(f"chunks with the layout {layout} are copied by their owner: only LKHTD of {', '.join(KINDS)}")
    return layout.dtype


def _checked(layers: Layers, namespace: Namespace, tokens: int, *, writable: bool = False) -> Layers:
    """As numpy arrays. Before a slot is asked for, so that no mistake is made while one is held."""
    count, _, heads, room, size = namespace.layout.shape
    if len(layers) != count or not 0 < tokens <= room:
        raise UsageError(f"{len(layers)} layers of {tokens} tokens, and {namespace.layout} is the layout of an object")
    found = []
    for number, pair in enumerate(layers):
        both = []
        for name, given in zip(("keys", "values"), pair, strict=True):
            array, kind = array_of(given, f"{name} of layer {number}", namespace.layout.dtype, writable=writable)
            if kind != namespace.layout.dtype or array.shape != (heads, tokens, size):
                raise UsageError(
                    f"{name} of layer {number} are {kind}{list(array.shape)}, and {namespace.layout.dtype}"
                    f"{[heads, tokens, size]} are asked for"
                )
            both.append(array)
        found.append((both[0], both[1]))
    return found


def _fill(view: memoryview, layers: Layers, namespace: Namespace, kind: str) -> None:
    with view:
        slot = np.frombuffer(view, _item(kind)).reshape(namespace.layout.shape)
        for number, (keys, values) in enumerate(layers):
            tokens = keys.shape[1]
            move(keys, slot[number, 0, :, :tokens], None, kind, 0, False, 1)
            move(values, slot[number, 1, :, :tokens], None, kind, 0, False, 1)
        slot[:, :, :, tokens:] = 0  # what another object has left there is nobody's to read
        del slot


def _item(kind: str) -> Any:
    return {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[kind]
