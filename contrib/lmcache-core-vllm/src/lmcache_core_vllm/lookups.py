"""What the cache has for a request: at once from the index, and from the server without blocking a step of the
engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_core import Client, CommonHandle, CommonHits, KeyGroup, Promise
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.groups import Group
from lmcache_core_vllm.namespaces import Hashing


class Found(NamedTuple):
    """The cache has a request's blocks from `start` tokens on up to `boundary`. `tokens`: the request's, when it was
    looked up. `reachable`: a server could be asked. `promises`: if it was asked, what it holds of each group for each
    rank, from block `promised_from` of the group on. `from_tiers`: how many of the last tokens before the boundary the
    pool did not have when they were looked up."""

    start: int
    boundary: int
    tokens: int
    at_s: float
    reachable: bool = True
    promises: tuple[tuple[Promise, ...], ...] = ()
    promised_from: tuple[int, ...] = ()
    from_tiers: int = 0

    def promises_of(self, group: Group, first: int, end: int) -> list[Promise]:
        """The promises for a group's blocks `first` to `end`, by rank; empty if none holds them."""
        if not self.promises:
            return []
        at = self.promised_from[group.number]
        return [promise.slice(max(0, first - at), max(0, end - at)) for promise in self.promises[group.number]]

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
        self.bounds = bounds
        self._traceparent = traceparent
        self._ranks = len(ranks)
        self._firsts = tuple(bounds.start // group.block_tokens for group in groups)
        self._keys: list[KeyGroup] = []  # of each group for each rank
        self._units: list[int] = []
        for group, first in zip(groups, self._firsts, strict=True):
            chosen = group.block_hashes(hashes, range(first, bounds.limit // group.block_tokens))
            for of_rank in ranks:
                namespace = of_rank[group.number]
                self._keys.append(KeyGroup(namespace, hashing.keys(chosen, namespace), group.need))
                self._units.append(group.block_tokens)

    def by_index(self, client: Client, now_s: float) -> Found:
        """What the pool has. Makes no call."""
        return self.found(client.lookup_many(self._keys, unit_tokens=self._units, ask=False), now_s)

    def count(self, client: Client, tokens: int, hit_tokens: int, from_tiers: int, *, asked: bool) -> None:
        """Count it where the server's figures come from. `asked`: the server was asked, too."""
        not_asked = [] if asked else self._units
        client.count_prompt(tokens, hit_tokens, from_tiers=min(from_tiers, hit_tokens), not_asked=not_asked)

    def ask(self, client: Client, wait_s: float, tiers: Sequence[str] | None = None) -> CommonHandle:
        """Ask the server, which asks its tiers (None: all of them), loads what they have within `wait_s`, and holds it
        all."""
        return client.lookup_many_nowait(
            self._keys,
            unit_tokens=self._units,
            hold="if_possible",
            wait_s=wait_s,
            tiers=tiers,
            traceparent=self._traceparent,
        )

    def found(self, hits: CommonHits, now_s: float) -> Found:
        """What these hits are for the request."""
        start, ranks = self.bounds.start, self._ranks
        found = Found(start, start + hits.tokens, self.bounds.tokens, now_s, hits.served)
        if hits.promise is None:
            return found
        promises = [each or Promise.none(0) for each in hits.promises]
        return found._replace(
            promises=tuple(tuple(promises[at : at + ranks]) for at in range(0, len(promises), ranks)),
            promised_from=tuple(
                first + each.first for first, each in zip(self._firsts, hits.groups[::ranks], strict=True)
            ),
        )


@dataclass
class Lookup:
    """A question that the server is working on. `by_index`: what the index had of it. `early`: it was sent when the
    request came, and the answer may be old when it is taken."""

    question: Question
    by_index: Found
    began_s: float
    handle: CommonHandle
    early: bool = False

    def found(self, now_s: float) -> Found | None:
        """The answer, once it is there; if there was no server to ask, what the index has. The caller owns its
        promises, and frees them once their blocks are loaded, or not wanted."""
        hits = self.handle.result
        if hits is None:
            return None
        found = self.question.found(hits, now_s)
        return found._replace(from_tiers=max(0, found.boundary - self.by_index.boundary))
