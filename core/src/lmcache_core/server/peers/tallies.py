"""Workers' own counts of what they found and read without a call: summed, but only as far as plausible.

A worker's line in the pool is its own claim. A figure that decreases, or grows faster than any worker could, is not
accepted, nor is anything else in its line at that reading; `doubted` counts it, and later readings are compared with
the new line. So an overwritten line costs the hits of one reading, and no total ever decreases.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from lmcache_core import limits
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tally import Tally

_WORDS = len(Tally)
_LINE = struct.Struct(f"={_WORDS}Q")
# For each word, in the order of `Tally`: the most that it may grow in a second.
_PER_S = (
    limits.TALLY_HITS_PER_S_MAX,
    limits.TALLY_HITS_PER_S_MAX,
    10**9 * limits.TALLY_THREADS_MAX,
    limits.TALLY_HITS_PER_S_MAX,
    limits.TALLY_HITS_PER_S_MAX,
    limits.TALLY_BYTES_PER_S_MAX,
    10**9 * limits.TALLY_THREADS_MAX,
    limits.TALLY_HITS_PER_S_MAX,
    *[limits.TALLY_TOKENS_PER_S_MAX] * 4,
    limits.TALLY_HITS_PER_S_MAX,
    limits.TALLY_HITS_PER_S_MAX,
)
OTHER = 0  # stands for namespaces that are not counted by themselves: no namespace has this id


@dataclass(slots=True)
class NamespaceTally:
    """What workers have counted in one namespace."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    read_hits: int = 0
    read_bytes: int = 0
    prompt_tokens: int = 0
    prompt_hit_tokens: int = 0

    def add(self, grown: Sequence[int]) -> None:
        """Keys and bytes."""
        self.lookup_hits += grown[Tally.LOOKUP_HITS]
        self.lookup_misses += grown[Tally.LOOKUP_MISSES]
        self.read_hits += grown[Tally.READ_HITS]
        self.read_bytes += grown[Tally.READ_BYTES]

    def add_prompts(self, grown: Sequence[int]) -> None:
        """Tokens."""
        self.prompt_tokens += grown[Tally.PROMPT_TOKENS]
        self.prompt_hit_tokens += sum(grown[Tally.INDEX_HIT_TOKENS : Tally.TIER_HIT_TOKENS + 1])


class WorkerTallies:
    """One line for each row in use. Lives on the loop's thread."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._total = [0] * _WORDS
        self._seen: dict[int, tuple[tuple[int, ...], float]] = {}  # for each row its line, and when it was read
        self._chunk_tokens: dict[int, int] = {}  # for each row, what its worker has declared
        self._spaces: dict[int, Collection[int]] = {}  # for each row, the namespaces of its worker
        self._unnamed: dict[int, list[int]] = {}  # for each row, what its worker counted before it named a namespace
        self._by_namespace: dict[int, NamespaceTally] = {}
        self.hit_tokens = 0  # of lookups, by workers that have declared how many tokens make a key
        self.doubted = 0

    def adopt(self, rows: Iterable[int]) -> None:
        """Rows of a former server's workers: what they have counted so far belongs to that server."""
        for row in rows:
            self._seen[row] = (self._read(row), time.monotonic())

    def watch(self, row: int, *, chosen: bool = False, chunk_tokens: int = 0, namespaces: Collection[int] = ()) -> None:
        """A worker gets this row, and counts from 0. `chosen`: it chose the row itself, has cleared its line, and may
        have begun to count. `chunk_tokens`: that make one of its keys; 0: not reported. `namespaces`: its own, now
        and later."""
        if not chosen:
            self._segment.clear_tally(row)
        self._seen[row] = ((0,) * _WORDS, time.monotonic())
        self._chunk_tokens[row] = chunk_tokens
        self._spaces[row] = namespaces

    def fold(self, row: int) -> None:
        """The row is about to be released: add its worker's counts to the total."""
        self.look(row)
        unnamed = self._unnamed.pop(row, None)
        if unnamed is not None:
            self._credit(self._spaces.get(row) or (OTHER,), unnamed)
        self._seen.pop(row, None)
        self._chunk_tokens.pop(row, None)
        self._spaces.pop(row, None)

    def totals(self) -> dict[Tally, int]:
        """Everything that all workers have counted since the start, as far as plausible."""
        for row in list(self._seen):
            self.look(row)
            if row in self._unnamed and (spaces := self._spaces.get(row)):
                self._credit(spaces, self._unnamed.pop(row))
        return dict(zip(Tally, self._total, strict=True))

    def by_namespace(self) -> dict[int, NamespaceTally]:
        """The same as of the last `totals`, by namespace. Under `OTHER` also what workers have counted that have named
        no namespace to this server yet, as after a restart: once they do, it is theirs."""
        found = dict(self._by_namespace)
        if self._unnamed:
            other = found[OTHER] = replace(found.get(OTHER, NamespaceTally()))
            for grown in self._unnamed.values():
                other.add(grown)
                other.add_prompts(grown)
        return found

    def look(self, row: int) -> None:
        """Add what its worker has counted since the last look. Do so before the worker's namespaces change, as what it
        has counted belongs to those until now."""
        seen = self._seen.get(row)
        if seen is None:
            return
        line, now, (before, at_s) = self._read(row), time.monotonic(), seen
        self._seen[row] = (line, now)
        if line == before:
            return
        allowed_s = now - at_s + limits.TALLY_SLACK_S
        grown = [new - old for new, old in zip(line, before, strict=True)]
        if all(0 <= each <= per_s * allowed_s for each, per_s in zip(grown, _PER_S, strict=True)):
            self._total = [total + each for total, each in zip(self._total, grown, strict=True)]
            self.hit_tokens += grown[Tally.LOOKUP_HITS] * self._chunk_tokens.get(row, 0)
            if spaces := self._spaces.get(row):
                self._credit(spaces, grown)
            else:
                had = self._unnamed.get(row, [0] * _WORDS)
                self._unnamed[row] = [sum(each) for each in zip(had, grown, strict=True)]
        else:
            self.doubted += 1

    def _credit(self, spaces: Collection[int], grown: Sequence[int]) -> None:
        """A worker does not say in which namespace it found a key: one that has several counts under `OTHER`. A prompt
        is looked up in all of them."""
        self._of(next(iter(spaces)) if len(spaces) == 1 else OTHER).add(grown)
        if grown[Tally.PROMPTS]:
            for namespace in spaces:
                self._of(namespace).add_prompts(grown)

    def _of(self, namespace: int) -> NamespaceTally:
        if namespace not in self._by_namespace and len(self._by_namespace) >= limits.TRAFFIC_NAMESPACES_MAX:
            namespace = OTHER
        return self._by_namespace.setdefault(namespace, NamespaceTally())

    def _read(self, row: int) -> tuple[int, ...]:
        return _LINE.unpack_from(self._segment.tables.tally(row).cast("B"))
