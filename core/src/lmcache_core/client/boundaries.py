"""The longest boundary up to which all KV groups of all ranks can be served: `Client.lookup_many`.

A model has several groups of layers, and a tensor-parallel engine has each of them on every rank. Full attention needs
every chunk before the boundary, a sliding window the last few, and a state-space layer only the state at the boundary.
A boundary counts only if all groups have what they need. The search goes downwards: each group lowers the boundary to
the last one that it can serve, until all of them agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from lmcache_core.client.hits import COUNT_IF_ALL, COUNT_NOTHING, Hits, checked_keys
from lmcache_core.client.lookups import ClientLookupOptions, ClientLookups
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import LookupResult, Status
from lmcache_core.errors import UsageError
from lmcache_core.tokens.namespace import Namespace

_HOLD_TRIES = 3  # if something was evicted between the search and the hold, search again
_LOOK_KEYS = 128  # keys looked at first in a window that ends far behind what is there


@dataclass(frozen=True, slots=True)
class Need:
    """What a group needs before a boundary: the last `window` keys, or all of them (0)."""

    window: int = 0

    PREFIX: ClassVar[Need]  # full attention
    LAST: ClassVar[Need]  # a state at the boundary

    def __post_init__(self) -> None:
        if type(self.window) is not int or self.window < 0:
            raise UsageError(f"a window of {self.window!r} keys: give a whole number, 0 for all keys")

    @staticmethod
    def last_window(keys: int) -> Need:
        """The last `keys` keys: sliding attention over that many chunks."""
        if not keys:
            raise UsageError("a window of 0 keys: give 1 or more, or Need.PREFIX for all")
        return Need(keys)


Need.PREFIX = Need()
Need.LAST = Need(1)


class KeyGroup(NamedTuple):
    """The keys of one KV group on one rank, in order, and which of them a hit needs. A plain tuple works, too."""

    namespace: Namespace
    keys: Sequence[bytes]
    need: Need = Need.PREFIX


class GroupHits(NamedTuple):
    """What a group must load: `keys[first:end]`, each of `unit_tokens` tokens."""

    first: int
    end: int
    unit_tokens: int

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Start and end of each chunk to load, in tokens."""
        unit = self.unit_tokens
        return [(at * unit, (at + 1) * unit) for at in range(self.first, self.end)]


@dataclass(frozen=True)
class CommonHits:
    """`tokens`: the longest boundary that every group can serve. `groups`: what each of them must load, in the given
    order. If not `done`, tiers are still loading some of it. `promise`: with `hold`, the promise for everything to
    load, group after group; `promises` splits it by group, for the workers."""

    tokens: int
    groups: Sequence[GroupHits]
    done: bool = True
    promise: Promise | None = None

    @property
    def promises(self) -> list[Promise | None]:
        """Each group's part of the promise, in order."""
        ends = list(accumulate(hits.end - hits.first for hits in self.groups))
        if self.promise is None:
            return [None] * len(ends)
        return [
            self.promise.slice(end - hits.end + hits.first, end) for hits, end in zip(self.groups, ends, strict=True)
        ]


class CommonLookups:
    """Lookups of many groups at once, of one client. Thread-safe."""

    def __init__(self, lookups: ClientLookups, hits: Hits) -> None:
        self._lookups = lookups
        self._hits = hits

    def lookup(
        self,
        groups: Sequence[KeyGroup | tuple[Any, ...]],
        units: int | Sequence[int],
        options: ClientLookupOptions,
        ask: bool,
    ) -> CommonHits:
        """See `Client.lookup_many`."""
        if not options.hold:
            return self._search(groups, units, options, ask)
        unheld = structs.replace(options, hold=False)
        for _ in range(_HOLD_TRIES):
            found = self._search(groups, units, unheld, ask)
            if not found.tokens:
                return found
            held = self._held(groups, found)
            if held is not None:
                return held
            if options.if_possible and self._lookups.unreachable:
                return found
        return CommonHits(0, [GroupHits(0, 0, hits.unit_tokens) for hits in found.groups])

    def _held(self, groups: Sequence[KeyGroup | tuple[Any, ...]], found: CommonHits) -> CommonHits | None:
        """The same with a promise; None if some of it has left."""
        kept = [
            self._lookups.hold(given[1][hits.first : hits.end], given[0])
            for given, hits in zip(groups, found.groups, strict=True)
        ]
        promise = Promise.joined([_promise_of(each, hits) for each, hits in zip(kept, found.groups, strict=True)])
        there = (Status.GRANTED,) if found.done else (Status.GRANTED, Status.LOADING)
        if all(status in there for each in kept for status in each.statuses):
            return replace(found, promise=promise)
        if promise is not None:
            self._lookups.free(promise)
        return None

    def _search(
        self,
        groups: Sequence[KeyGroup | tuple[Any, ...]],
        units: int | Sequence[int],
        options: ClientLookupOptions,
        ask: bool,
    ) -> CommonHits:
        asking = TierQuestions(self._lookups, options) if ask else None
        prefixes: list[GroupSearch] = []
        windows: list[GroupSearch] = []
        searches: list[GroupSearch] = []  # in the order of the groups
        bounds: list[int] = []
        for number, (given, unit) in enumerate(zip(groups, _units(units, len(groups)), strict=True)):
            namespace, keys, need = _group_of(number, given)
            keys = checked_keys(keys)
            if need.window:
                windows.append(WindowSearch(self._hits, asking, namespace, keys, unit, need.window))
                searches.append(windows[-1])
            else:
                prefixes.append(PrefixSearch(self._hits, asking, namespace, keys, unit, 0))
                searches.append(prefixes[-1])
            bounds.append(len(keys) * unit)
        if not searches:
            return CommonHits(0, [])
        step = units if isinstance(units, int) else math.lcm(*units)
        bound = _longest(min(bounds), prefixes + windows, step)  # windows matter only up to what prefixes have
        done = asking is None or all(search.done for search in searches)
        return CommonHits(bound, [search.hits(bound) for search in searches], done)


def _group_of(number: int, given: Any) -> KeyGroup:
    try:
        group = given if isinstance(given, KeyGroup) else KeyGroup(*given)
    except TypeError as error:
        raise UsageError(f"group {number} is {given!r}: give (namespace, keys) or (namespace, keys, need)") from error
    if not isinstance(group.need, Need):
        raise UsageError(
            f"group {number} needs {group.need!r}: give Need.PREFIX, Need.LAST or Need.last_window(number of keys)"
        )
    return group


def _promise_of(held: LookupResult, hits: GroupHits) -> Promise:
    """A promise for every key of the group, so that the groups' promises can be separated again."""
    count = hits.end - hits.first
    return held.promise or Promise((0,) * count, (b"",) * count, math.inf)


class TierQuestions:
    """How to ask the server for what the index does not have."""

    def __init__(self, lookups: ClientLookups, options: ClientLookupOptions) -> None:
        self._lookups = lookups
        self._options = options
        self._until = lookups.now() + options.wait_s if options.wait_s > 0 else 0.0

    def ask(self, keys: Sequence[bytes], namespace: Namespace, window: int) -> tuple[int, bool]:
        """The end according to the server, tiers included, and whether all of that is in the pool now."""
        wait_s = max(0.0, self._until - self._lookups.now()) if self._until else 0.0
        found = self._lookups.lookup(keys, namespace, structs.replace(self._options, window=window, wait_s=wait_s))
        return found.hits, found.done


@dataclass(slots=True, eq=False)
class GroupSearch(ABC):
    """One group in a search."""

    _hits: Hits
    _asking: TierQuestions | None
    _namespace: Namespace
    _keys: Sequence[bytes]
    unit: int
    _window: int
    done: bool = True

    @abstractmethod
    def reach(self, end: int) -> int:
        """The longest boundary up to `end` that the group can serve."""

    def hits(self, tokens: int) -> GroupHits:
        """What the group must load of a prompt up to there."""
        end, window = tokens // self.unit, self._window
        return GroupHits(end - window if 0 < window < end else 0, end, self.unit)


@dataclass(slots=True, eq=False)
class PrefixSearch(GroupSearch):
    """A group that needs every key. It looks once, because ends only decrease."""

    _end: int = -1

    def reach(self, end: int) -> int:
        if self._end < 0:
            self._end = self._look(end)
        return min(end, self._end)

    def _look(self, end: int) -> int:
        keys = self._keys if end == len(self._keys) else self._keys[:end]
        # Without the server, which counts the misses, this does not count as a lookup.
        counts = COUNT_NOTHING if self._asking is None else COUNT_IF_ALL
        found = self._hits.find(keys, self._namespace, True, False, counts)
        there = 0 if found is None else len(found)
        if there < end and self._asking is not None:
            there, self.done = self._asking.ask(keys, self._namespace, 0)
        return there


@dataclass(slots=True, eq=False)
class WindowSearch(GroupSearch):
    """A group that needs only the last keys. It looks at as many as necessary, from the end."""

    _there: bytes = b""  # of the keys from `_low`
    _low: int = -1

    def reach(self, end: int) -> int:
        found = self._by_index(end)
        if found == end or self._asking is None:
            return found
        asked, self.done = self._asking.ask(self._keys[:end], self._namespace, min(self._window, end))
        return max(found, asked)

    def _by_index(self, end: int) -> int:
        window = self._window
        if self._low < 0:
            self._look_on(end, window)
        run = b"\1" * window
        while True:
            at = self._there.rfind(run, 0, end - self._low)
            if at >= 0:
                return self._low + at + window
            if self._low == 0:
                gap = self._there.find(b"\0", 0, end)
                return end if gap < 0 else gap
            self._look_on(self._low, max(len(self._there), window, _LOOK_KEYS))

    def _look_on(self, end: int, count: int) -> None:
        low = max(0, end - count)
        found = self._hits.find(self._keys[low:end], self._namespace, False, False, COUNT_IF_ALL)
        self._there = (bytes(end - low) if found is None else found) + self._there
        self._low = low


def _longest(bound: int, searches: Sequence[GroupSearch], step: int) -> int:
    """The longest boundary up to `bound`, a multiple of `step`, that all searches can serve."""
    bound -= bound % step
    agreed = 0  # how many in a row have agreed
    while bound:
        for search in searches:
            reached = search.reach(bound // search.unit) * search.unit
            if reached < bound:
                bound, agreed = reached - reached % step, 0
                if not bound:
                    break
            else:
                agreed += 1
                if agreed == len(searches):
                    return bound
    return 0


def _units(given: int | Sequence[int], count: int) -> Sequence[int]:
    units = [given] * count if isinstance(given, int) else given
    if len(units) != count:
        raise UsageError(f"unit_tokens has {len(units)} figures for {count} groups: give one, or one for each group")
    for unit in {*units}:
        if type(unit) is not int or unit < 1:
            raise UsageError(f"unit_tokens is {unit!r}: give the tokens of one key, 1 or more")
    return units
