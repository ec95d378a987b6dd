"""The longest boundary up to which all KV groups of all ranks can be served: `Client.lookup_many`.

A model has several groups of layers, and a tensor-parallel engine has each of them on every rank. Full attention needs
every chunk before the boundary, a sliding window the last few, and a state-space layer only the state at the boundary.
A boundary counts only if all groups have what they need. The search goes downwards: each group lowers the boundary to
the last one that it can serve, until all of them agree.

`BoundarySearch` never waits. `lookup_many` waits for each of its questions to the server, and asks one at a time, so
that tiers load nothing that the others cannot use. A `CommonHandle` asks for all groups at once, because its caller
cannot wait for one after the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from lmcache_core.client.find.hits import COUNT_IF_ALL, COUNT_NOTHING, Hits, checked_keys
from lmcache_core.client.find.lookups import UNPROMISED, ClientLookupOptions, ClientLookups, LookupHandle
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError, UsageError
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.tokens.namespace import Namespace

_HOLD_TRIES = 3  # if something was evicted between the search and the hold, search again
_LOOK_KEYS = 128  # keys looked at first in a window that ends far behind what is there
_WAIT_S = 60.0  # every question is answered in the end, at the latest when the server is given up


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


Groups = Sequence[KeyGroup | tuple[Any, ...]]
Units = int | Sequence[int]
"""Tokens of one key: for all groups, or for each."""


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
    load, group after group; `promises` splits it by group, for the workers. If not `served`, a question found no
    server, or one that had no room for it."""

    tokens: int
    groups: Sequence[GroupHits]
    done: bool = True
    promise: Promise | None = None
    served: bool = True

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

    def lookup(self, groups: Groups, units: Units, options: ClientLookupOptions, ask: bool) -> CommonHits:
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
            if options.if_possible and self._lookups.links.why_unreachable:
                return found
        return CommonHits(0, [GroupHits(0, 0, hits.unit_tokens) for hits in found.groups])

    def start(self, groups: Groups, units: Units, options: ClientLookupOptions) -> CommonHandle:
        """See `Client.lookup_many_nowait`."""
        search = BoundarySearch(self._hits, Questions(self._lookups, options, together=True), groups, units)
        by_index = BoundarySearch(self._hits, None, groups, units) if options.if_possible else None
        return CommonHandle(search, by_index, self._lookups.links.now)

    def _search(self, groups: Groups, units: Units, options: ClientLookupOptions, ask: bool) -> CommonHits:
        questions = Questions(self._lookups, options, together=False) if ask else None
        search = BoundarySearch(self._hits, questions, groups, units)
        while not search.advance():
            search.wait(_WAIT_S)
        return search.found()

    def _held(self, groups: Groups, found: CommonHits) -> CommonHits | None:
        """The same with a promise for what is to be loaded and nothing else; None if some of it has left."""
        kept = [
            self._lookups.hold(given[1][hits.first : hits.end], given[0])
            for given, hits in zip(groups, found.groups, strict=True)
        ]
        promise = Promise.joined(
            [each.promise or Promise.none(hits.end - hits.first) for each, hits in zip(kept, found.groups, strict=True)]
        )
        there = (Status.GRANTED,) if found.done else (Status.GRANTED, Status.LOADING)
        if all(status in there for each in kept for status in each.statuses):
            return replace(found, promise=promise)
        if promise is not None:
            self._lookups.free(promise)
        return None


class CommonHandle:
    """A pending lookup of many groups. `done`, `result` and `cancel` never wait; `result` is None until it is done."""

    def __init__(self, search: BoundarySearch, by_index: BoundarySearch | None, clock: Callable[[], float]) -> None:
        """`by_index`: gives the result if there is no server to ask."""
        self._search = search
        self._by_index = by_index
        self._clock = clock
        self._result: CommonHits | None = None
        self._sent = False  # before its questions were given up
        try:
            search.advance()
        except CacheError:
            if not search.asked:
                raise
            # what the server has refused by now is raised to the caller that asks for the result

    @property
    def done(self) -> bool:
        """Whether `result` is available. Asks the server again if an answer was not the last one."""
        return self._result is not None or self._search.advance()

    @property
    def asked(self) -> bool:
        """Whether a question was sent to a server, which counts its keys: one that
        hangs does so once it goes on."""
        return self._sent or self._search.asked

    @property
    def result(self) -> CommonHits | None:
        """The result, if it has come. The caller owns its promise from now on; those of a handle that is dropped
        unread, or cancelled, are freed."""
        if self._result is None and self._search.advance():
            found = self._search.found()
            if not found.served and self._by_index is not None:
                self._give_up()
                self._by_index.advance()
                found = replace(self._by_index.found(), served=False)
            self._search.give_promises()
            self._result = found
        return self._result

    def wait(self, timeout_s: float) -> CommonHits | None:
        """Wait for the result, at most that long. None: it has not come yet."""
        deadline = self._clock() + timeout_s
        while not self.done and (left := deadline - self._clock()) > 0:
            self._search.wait(left)
        return self.result

    def cancel(self) -> None:
        """Give the lookup up: the server stops loads that nobody else waits for. Unless the caller has read `result`,
        all promises are freed at once, and the result is that nothing can be served."""
        if self._result is None:
            self._give_up()
            self._result = self._search.found()

    def _give_up(self) -> None:
        self._sent = self.asked
        self._search.cancel()


class BoundarySearch:
    """The longest boundary that all groups can serve. Never waits: `advance` goes on as far as the answers allow that
    have come so far."""

    def __init__(self, hits: Hits, questions: Questions | None, groups: Groups, units: Units) -> None:
        """Without `questions` only the index is searched."""
        self._together = questions is not None and questions.together
        self._groups: list[GroupSearch] = []
        prefixes: list[GroupSearch] = []
        windows: list[GroupSearch] = []
        bounds: list[int] = []
        for number, (given, unit) in enumerate(zip(groups, _units(units, len(groups)), strict=True)):
            namespace, keys, need = _group_of(number, given)
            keys = checked_keys(keys)
            kind = WindowSearch if need.window else PrefixSearch
            search = kind(hits, questions, namespace, keys, unit, need.window)
            (windows if need.window else prefixes).append(search)
            self._groups.append(search)
            bounds.append(len(keys) * unit)
        self._turns = prefixes + windows  # windows matter only up to what prefixes have
        self._turn = 0
        self._agreed = 0  # how many in a row can serve the boundary
        self._pending: LookupHandle | None = None  # the first question without an answer, when it was looked at last
        self._step = 1 if not bounds else units if isinstance(units, int) else math.lcm(*units)
        self._bound = min(bounds, default=0)
        self._bound -= self._bound % self._step

    def advance(self) -> bool:
        """Go on without waiting; returns whether the boundary is known."""
        turns = self._turns
        if self._pending is not None and self._still_pending():
            return False
        while self._bound and self._agreed < len(turns):
            search = turns[self._turn]
            reached = search.reach(self._bound // search.unit)
            if reached is None:
                if self._together:
                    for other in turns:
                        other.reach(self._bound // other.unit)
                self._pending = search.questions[-1]
                return False
            self._turn = (self._turn + 1) % len(turns)
            if reached * search.unit < self._bound:
                self._bound = reached * search.unit
                self._bound -= self._bound % self._step
                self._agreed = 0
            else:
                self._agreed += 1
        return True

    def _still_pending(self) -> bool:
        """Whether an answer has not come yet. All are awaited, because each may lower the boundary."""
        self._pending = next((question for question in self._questions() if not question.done), None)
        return self._pending is not None

    def _questions(self) -> list[LookupHandle]:
        return [question for search in self._turns for question in search.questions]

    @property
    def asked(self) -> bool:
        """Whether a question was sent."""
        return any(question.sent for question in self._questions())

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, at most this long."""
        if self._pending is not None:
            self._pending.wait_done(timeout_s)

    def found(self) -> CommonHits:
        """What was found, once the boundary is known. The promises stay with the search."""
        hits = [search.hits(self._bound) for search in self._groups]
        questions = self._questions()
        if not questions:
            return CommonHits(self._bound, hits)
        answers = [answer for question in questions if (answer := question.answer) is not None]
        done = all(answer.done for answer in answers)
        served = all(UNPROMISED.isdisjoint(answer.statuses) for answer in answers)
        promise = None
        if any(answer.promise for answer in answers):
            parts = [search.promise(*each[:2]) for search, each in zip(self._groups, hits, strict=True)]
            promise = Promise.joined([part for group in parts for part in group])
        return CommonHits(self._bound, hits, done, promise, served)

    def give_promises(self) -> None:
        """The caller owns the promises of `found` from now on."""
        for question in self._questions():
            question.take()

    def cancel(self) -> None:
        """Give all questions up, and free what was held for them: nothing can be served."""
        for question in self._questions():
            question.cancel()
        for search in self._turns:
            search.questions = ()
        self._bound = 0


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


class Questions:
    """How to ask the server for what the index does not have. `together`: for all groups at once."""

    def __init__(self, lookups: ClientLookups, options: ClientLookupOptions, *, together: bool) -> None:
        self._lookups = lookups
        self._options = structs.replace(options, if_possible=False) if options.if_possible else options
        self._until = lookups.links.now() + options.wait_s if options.wait_s > 0 else 0.0
        self.together = together
        self.hold = options.hold

    def ask(self, keys: Sequence[bytes], namespace: Namespace, window: int) -> LookupHandle:
        """Ask for at most one frame of keys. All questions together wait for loads `wait_s` at most."""
        wait_s = max(0.0, self._until - self._lookups.links.now()) if self._until else 0.0
        options = structs.replace(self._options, window=window, wait_s=wait_s)
        return self._lookups.start(keys, namespace, options)


@dataclass(slots=True, eq=False)
class GroupSearch(ABC):
    """One group in a search. `questions`: those whose answers count, in the order of their keys."""

    _hits: Hits
    _server: Questions | None
    _namespace: Namespace
    _keys: Sequence[bytes]
    unit: int
    _window: int
    questions: Sequence[LookupHandle] = ()
    _first: int = 0  # the first key that they are about

    @abstractmethod
    def reach(self, end: int) -> int | None:
        """The longest boundary up to `end` that the group can serve; None: the server has been asked for it. Each `end`
        is at most the one before."""

    def hits(self, tokens: int) -> GroupHits:
        """What the group must load of a prompt up to there."""
        end, window = tokens // self.unit, self._window
        return GroupHits(end - window if 0 < window < end else 0, end, self.unit)

    def promise(self, first: int, end: int) -> list[Promise]:
        """What is held of `keys[first:end]`, key by key. Questions about other keys alone are given up."""
        parts, at = [], self._first
        for question in self.questions:
            low, high = max(first, at), min(end, at + question.keys)
            held = None if question.answer is None else question.answer.promise
            if low >= high:
                question.cancel()
            else:
                parts.append(held.slice(low - at, high - at) if held else Promise.none(high - low))
            at += question.keys
        return parts


@dataclass(slots=True, eq=False)
class PrefixSearch(GroupSearch):
    """A group that needs every key. It looks once, because ends only decrease."""

    _end: int | None = None

    def reach(self, end: int) -> int | None:
        if self._end is None:
            self._end = self._by_server() if self.questions else self._look(end)
        return None if self._end is None else min(end, self._end)

    def _look(self, end: int) -> int | None:
        if end < len(self._keys):
            self._keys = self._keys[:end]
        if self._server is not None and self._server.hold:
            return self._by_server()
        # Without the server, which counts the misses, this does not count as a lookup.
        counts = COUNT_NOTHING if self._server is None else COUNT_IF_ALL
        found = self._hits.find(self._keys, self._namespace, True, False, counts)
        there = 0 if found is None else len(found)
        return there if there == end or self._server is None else self._by_server()

    def _by_server(self) -> int | None:
        """The end by the answers, frame by frame: the first that is not full ends the prefix."""
        server, keys, sent = self._server, self._keys, self.questions
        assert server is not None
        frames = range(0, len(keys), BATCH_KEYS_MAX)
        for number, first in enumerate(frames):
            if number == len(sent):
                lows = frames[number:] if server.together else (first,)
                more = [server.ask(keys[low : low + BATCH_KEYS_MAX], self._namespace, 0) for low in lows]
                self.questions = [*sent, *more]
                return None
            answer = sent[number].answer
            if answer is None:
                return None
            if answer.hits < sent[number].keys:
                return first + answer.hits
        return len(keys)


@dataclass(slots=True, eq=False)
class WindowSearch(GroupSearch):
    """A group that needs only the last keys. It looks at as many as necessary, from the end."""

    _there: bytes = b""  # of the keys from `_low`
    _low: int = -1

    def reach(self, end: int) -> int | None:
        found = 0 if self._server is not None and self._server.hold else self._by_index(end)
        if found == end or self._server is None:
            return found
        answered = self._by_server(end)
        return None if answered is None else max(found, answered)

    def _by_server(self, end: int) -> int | None:
        """The end by the answer about the last frame before it that has one."""
        if not self.questions:
            self._ask(end)
            return None
        answer, first, window = self.questions[0].answer, self._first, self._window
        if answer is None:
            return None
        if first and answer.hits < window and UNPROMISED.isdisjoint(answer.statuses):
            self._ask(min(end, first + window - 1))  # the frame before it, which it overlaps: each window lies in one
            return None
        reached = first + answer.hits if answer.hits else 0
        if reached <= end:
            return reached
        # It was asked for behind this end: what its window did not need may be there all the same.
        low = max(0, end - window)
        if low >= first and {*answer.statuses[low - first : end - first]} == {Status.GRANTED}:
            return end
        self._ask(end)
        return None

    def _ask(self, end: int) -> None:
        assert self._server is not None
        for question in self.questions:
            question.cancel()
        self._first = max(0, end - BATCH_KEYS_MAX)
        keys = self._keys[self._first : end]
        self.questions = [self._server.ask(keys, self._namespace, min(self._window, end))]

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
        found = self._hits.find(self._keys[low:end], self._namespace, False, False, COUNT_NOTHING)
        self._there = (bytes(end - low) if found is None else found) + self._there
        self._low = low


def _units(given: Units, count: int) -> Sequence[int]:
    units = given if isinstance(given, Sequence) else [given] * count
    if len(units) != count:
        raise UsageError(f"unit_tokens has {len(units)} figures for {count} groups: give one, or one for each group")
    for unit in {*units}:
        if type(unit) is not int or unit < 1:
            raise UsageError(f"unit_tokens is {unit!r}: give the tokens of one key, 1 or more")
    return units
