"""What the cache has of a request: at once by the index, and by the server without making a step of the engine wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_core.client.boundaries import KeyGroup, Need
from lmcache_core.client.client import Client
from lmcache_core.client.lookups import LookupHandle
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import LookupResult, Status
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.groups import Group, Kind, longest_boundary
from lmcache_core_vllm.namespaces import Hashing

_THERE = (Status.GRANTED, Status.HIT)


class Found(NamedTuple):
    """The cache has a request's blocks from `start` tokens on up to `boundary`. `tokens`: the request's, when it was
    looked up. `reachable`: a server was there to be asked. `promises`: where it was asked, what it keeps of each group
    for each rank, key by key from `start` on, whether or not that is to be loaded."""

    start: int
    boundary: int
    tokens: int
    at_s: float
    reachable: bool = True
    promises: tuple[tuple[Promise, ...], ...] = ()

    def promises_of(self, group: Group, first: int, end: int) -> list[Promise]:
        """Of a group's blocks `first` to `end`, by rank; empty where nobody keeps them."""
        if not self.promises:
            return []
        asked_from = self.start // group.block_tokens
        return [promise.slice(first - asked_from, end - asked_from) for promise in self.promises[group.number]]

    @property
    def numbers(self) -> list[int]:
        """The server's, of all its promises."""
        return [number for ranks in self.promises for promise in ranks for number in promise.numbers]

    @property
    def expires_at(self) -> float:
        """When the first of its promises ends, by the machine's monotonic clock."""
        return min((promise.expires_at for ranks in self.promises for promise in ranks), default=math.inf)


class Bounds(NamedTuple):
    """Tokens that the engine has, the last boundary that may be a hit, and the request's tokens."""

    start: int
    limit: int
    tokens: int


class Question:
    """A request's keys between `bounds`, of all groups and ranks."""

    def __init__(
        self,
        groups: Sequence[Group],
        ranks: Sequence[Sequence[Namespace]],
        hashing: Hashing,
        hashes: Sequence[bytes],
        bounds: Bounds,
    ) -> None:
        self.groups = groups
        self.bounds = bounds
        self.keys: list[list[tuple[Namespace, list[bytes]]]] = []  # of each group for each rank
        for group in groups:
            first, end = bounds.start // group.block_tokens, bounds.limit // group.block_tokens
            chosen = group.block_hashes(hashes, first, end)
            namespaces = [of_rank[group.number] for of_rank in ranks]
            self.keys.append([(namespace, hashing.keys(chosen, namespace)) for namespace in namespaces])

    def by_index(self, client: Client, now_s: float) -> Found:
        """What is in the pool. Makes no call."""
        asked, units = [], []
        for group, ranks in zip(self.groups, self.keys, strict=True):
            for namespace, keys in ranks:
                asked.append(KeyGroup(namespace, keys, _need(group)))
                units.append(group.block_tokens)
        found = client.lookup_many(asked, unit_tokens=units, ask=False)
        start = self.bounds.start
        return Found(start, start + found.tokens, self.bounds.tokens, now_s)


def _need(group: Group) -> Need:
    """In keys, what `Group.first_needed` says in blocks."""
    if group.kind is Kind.FULL:
        return Need.PREFIX
    return Need.LAST if group.kind is Kind.STATE else Need.last_window(group.window_blocks)


class Lookup:
    """A question to the server, which asks its tiers, loads what they have, and keeps what it has found. Nothing here
    waits but `wait`."""

    def __init__(
        self,
        client: Client,
        question: Question,
        by_index: Found,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`by_index`: what is known without it. `wait_s`: how long the server may load before it answers."""
        self.by_index = by_index
        self.bounds = question.bounds
        self.began_s = clock()
        self._clock = clock
        self._groups = question.groups
        self._handles = [
            [_ask(client, keys, namespace, group.kind is Kind.FULL, wait_s) for namespace, keys in ranks]
            for group, ranks in zip(question.groups, question.keys, strict=True)
        ]  # by group, rank, and frame of keys

    def wait(self, timeout_s: float) -> None:
        """Until the answer is there, at most for that long."""
        until = self._clock() + timeout_s
        for handle in self._all():
            if not handle.done:
                left = until - self._clock()
                if left <= 0:
                    return
                handle.wait(left)

    @property
    def done(self) -> bool:
        """Whether the server has answered, or cannot."""
        return all(handle.done for handle in self._all())

    @property
    def found(self) -> Found:
        """The answer, once it is done; what the index has, where there was no server to ask. Its promises are the
        caller's, to be given back once what they keep is loaded, or not wanted."""
        results = [[[handle.result for handle in rank] for rank in ranks] for ranks in self._handles]
        there = []
        for ranks in results:
            of_ranks = [[status in _THERE for each in rank if each for status in each.statuses] for rank in ranks]
            there.append([all(ranks_have) for ranks_have in zip(*of_ranks, strict=True)])
        flat = [each for ranks in results for rank in ranks for each in rank if each]
        promises = tuple(tuple(_joined(rank) for rank in ranks) for ranks in results)
        if not any(promise for ranks in promises for promise in ranks):
            promises = ()
        if any(Status.UNREACHABLE in each.statuses for each in flat):
            return self.by_index._replace(reachable=False, promises=promises)
        boundary = longest_boundary(self._groups, there, self.bounds.start, self.bounds.limit)
        return Found(self.bounds.start, boundary, self.bounds.tokens, self._clock(), promises=promises)

    def cancel(self) -> None:
        """Nobody wants to know any more."""
        for handle in self._all():
            handle.cancel()

    def _all(self) -> list[LookupHandle]:
        return [handle for ranks in self._handles for rank in ranks for handle in rank]


def _ask(
    client: Client, keys: Sequence[bytes], namespace: Namespace, prefix: bool, wait_s: float
) -> list[LookupHandle]:
    frames = [keys[first : first + BATCH_KEYS_MAX] for first in range(0, len(keys), BATCH_KEYS_MAX)]
    return [
        client.lookup_nowait(frame, namespace=namespace, prefix=prefix, wait_s=wait_s, hold=True) for frame in frames
    ]


def _joined(frames: Sequence[LookupResult | None]) -> Promise:
    """One of all keys that were asked for; frames of which nothing is kept have no number in it."""
    parts = []
    for frame in frames:
        if frame is not None:
            unkept = Promise((0,) * len(frame.statuses), (b"",) * len(frame.statuses), math.inf)
            parts.append(frame.promise or unkept)
    return Promise.joined(parts) or Promise((), (), math.inf)
