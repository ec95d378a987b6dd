"""What the cache has for a request: at once from the index, and from the server without blocking a step of the
engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_core.client.boundaries import KeyGroup, Need
from lmcache_core.client.client import Client
from lmcache_core.client.lookups import LookupHandle
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import Status
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.groups import Group, Kind, boundary_step, longest_boundary
from lmcache_core_vllm.namespaces import Hashing

_THERE = (Status.GRANTED, Status.HIT)


class Found(NamedTuple):
    """The cache has a request's blocks from `start` tokens on up to `boundary`. `tokens`: the request's, when it was
    looked up. `reachable`: a server could be asked. `promises`: if it was asked, what it holds of each group for each
    rank, key by key from `start` on, whether or not that will be loaded. `from_tiers`: how many of the last tokens
    before the boundary the pool did not have when they were looked up."""

    start: int
    boundary: int
    tokens: int
    at_s: float
    reachable: bool = True
    promises: tuple[tuple[Promise, ...], ...] = ()
    from_tiers: int = 0

    def promises_of(self, group: Group, first: int, end: int) -> list[Promise]:
        """The promises for a group's blocks `first` to `end`, by rank; empty if none holds them."""
        if not self.promises:
            return []
        asked_from = self.start // group.block_tokens
        return [promise.slice(first - asked_from, end - asked_from) for promise in self.promises[group.number]]

    @property
    def numbers(self) -> list[int]:
        """The server's ids of all its promises."""
        return [number for ranks in self.promises for promise in ranks for number in promise.numbers]

    @property
    def expires_at(self) -> float:
        """When the first of its promises expires, by the machine's monotonic clock."""
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
        traceparent: str = "",
    ) -> None:
        """`traceparent`: the trace that the request belongs to."""
        self.groups = groups
        self.bounds = bounds
        self.traceparent = traceparent
        self.keys: list[list[tuple[Namespace, list[bytes]]]] = []  # of each group for each rank
        for group in groups:
            first, end = bounds.start // group.block_tokens, bounds.limit // group.block_tokens
            chosen = group.block_hashes(hashes, first, end)
            namespaces = [of_rank[group.number] for of_rank in ranks]
            self.keys.append([(namespace, hashing.keys(chosen, namespace)) for namespace in namespaces])

    def by_index(self, client: Client, now_s: float) -> Found:
        """What the pool has. Makes no call."""
        asked, units = [], []
        for group, ranks in zip(self.groups, self.keys, strict=True):
            for namespace, keys in ranks:
                asked.append(KeyGroup(namespace, keys, _need(group)))
                units.append(group.block_tokens)
        found = client.lookup_many(asked, unit_tokens=units, ask=False)
        start = self.bounds.start
        return Found(start, start + found.tokens, self.bounds.tokens, now_s)


def _need(group: Group) -> Need:
    """`Group.first_needed`, in keys."""
    if group.kind is Kind.FULL:
        return Need.PREFIX
    return Need.LAST if group.kind is Kind.STATE else Need.last_window(group.window_blocks)


class Lookup:
    """Queries to the server, which asks its tiers, loads what they have, and holds what it has found. Only `wait`
    waits. For a window or a state the server is asked only for the last blocks before a boundary, and returns the last
    boundary that it has these for. If groups return different boundaries, those that lack what the first of these needs
    are asked again, up to there.
    """

    def __init__(
        self,
        client: Client,
        question: Question,
        by_index: Found,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`by_index`: what the index knows. `wait_s`: how long the server may load before it answers."""
        self.by_index = by_index
        self.bounds = question.bounds
        self.began_s = clock()
        self.outdated: list[int] = []  # promises of replaced answers: the caller frees them
        self._client = client
        self._wait_s = wait_s
        self._clock = clock
        self._groups = question.groups
        self._step_tokens = boundary_step(question.groups)
        self._keys = question.keys
        self._traceparent = question.traceparent
        self._boundary = question.bounds.limit
        self._asked = [self._ask(group) for group in question.groups]
        self._settled = False

    def _ask(self, group: Group) -> list[_Asked]:
        """Query a group for all ranks, for what it needs up to the boundary."""
        count = (self._boundary - self.bounds.start) // group.block_tokens
        return [
            _Asked(self._client, keys[:count], namespace, group, self._wait_s, self._traceparent)
            for namespace, keys in self._keys[group.number]
        ]

    def wait(self, timeout_s: float) -> None:
        """Wait for the answer, at most this long."""
        until = self._clock() + timeout_s
        while not self.done:
            for handle in [each for each in self._handles() if not each.done]:
                left = until - self._clock()
                if left <= 0:
                    return
                handle.wait(left)

    @property
    def done(self) -> bool:
        """Whether the server has answered, or cannot. Asks again if an answer was not the last one."""
        while not self._settled:
            if not all(handle.done for handle in self._handles()):
                return False
            self._settled = self._unreachable or not self._ask_on()
        return True

    def _ask_on(self) -> bool:
        """Whether groups have to be asked again: the boundary moves down to the smallest that any of them returned."""
        start = self.bounds.start
        told = min(self._told(group) for group in self._groups)
        self._boundary = max(start, told - told % self._step_tokens)
        if self._boundary == start:
            return False
        again = [group for group in self._groups if self._reach(group) < self._boundary]
        for group in again:
            self.outdated += self._numbers(group)
            self._asked[group.number] = self._ask(group)
        return bool(again)

    def _reach(self, group: Group) -> int:
        """The last boundary from which the group can continue, by the answers."""
        ranks = [each.there for each in self._asked[group.number]]
        there = [all(of_ranks) for of_ranks in zip(*ranks, strict=True)]
        return longest_boundary([group], [there], self.bounds.start, self._boundary)

    def _told(self, group: Group) -> int:
        """The same, or the first boundary that has not been asked for."""
        found = self._reach(group)
        before = max(each.before for each in self._asked[group.number])
        if found == self.bounds.start and before:
            return found + (before + group.window_blocks - 1) * group.block_tokens
        return found

    def _numbers(self, group: Group) -> list[int]:
        return [number for each in self._asked[group.number] for number in each.promise.numbers]

    @property
    def found(self) -> Found:
        """The answer, once it is done; if there was no server to ask, what the index has. The caller owns its promises,
        and frees them once their blocks are loaded, or not wanted."""
        promises = tuple(tuple(each.promise for each in ranks) for ranks in self._asked)
        if not any(promise for ranks in promises for promise in ranks):
            promises = ()
        if self._unreachable:
            return self.by_index._replace(reachable=False, promises=promises)
        from_tiers = max(0, self._boundary - self.by_index.boundary)
        return Found(self.bounds.start, self._boundary, self.bounds.tokens, self._clock(), True, promises, from_tiers)

    @property
    def _unreachable(self) -> bool:
        unserved = {Status.UNREACHABLE, Status.QUOTA}  # no server, or one that has no room for us
        return any(not unserved.isdisjoint(handle.result.statuses) for handle in self._handles() if handle.result)

    def cancel(self) -> list[int]:
        """The answer is not wanted any more: returns the ids of all promises so far, to be freed."""
        made = self.outdated + [number for group in self._groups for number in self._numbers(group)]
        for handle in self._handles():
            handle.cancel()
        return made

    def _handles(self) -> list[LookupHandle]:
        return [handle for ranks in self._asked for each in ranks for handle in each.handles]


class _Asked:
    """One rank's keys of a group, up to a boundary: all of them are requested, or only the last frame of them if only a
    window before the boundary is needed."""

    def __init__(
        self,
        client: Client,
        keys: Sequence[bytes],
        namespace: Namespace,
        group: Group,
        wait_s: float,
        traceparent: str,
    ) -> None:
        window = min(len(keys), _need(group).window)
        self.before = max(0, len(keys) - BATCH_KEYS_MAX) if window else 0  # keys that are not requested
        self.handles = [
            client.lookup_nowait(
                keys[first : first + BATCH_KEYS_MAX],
                namespace=namespace,
                prefix=not window,
                window=window,
                wait_s=wait_s,
                hold=True,
                traceparent=traceparent,
            )
            for first in range(self.before, len(keys), BATCH_KEYS_MAX)
        ]

    @property
    def there(self) -> list[bool]:
        """Of each key."""
        statuses = [status for handle in self.handles if handle.result for status in handle.result.statuses]
        return [False] * self.before + [status in _THERE for status in statuses]

    @property
    def promise(self) -> Promise:
        """One promise for all keys; it has no id for frames of which nothing is held."""
        parts = [_unkept(self.before)] if self.before else []
        for handle in self.handles:
            if handle.result is not None:
                parts.append(handle.result.promise or _unkept(len(handle.result.statuses)))
        return Promise.joined(parts) or Promise((), (), math.inf)


def _unkept(count: int) -> Promise:
    return Promise((0,) * count, (b"",) * count, math.inf)
