"""The protocol of a stripe, every interleaving of it: writers that may be killed at any step, and a reader with a view.

A model in small bounds: two slots of one stripe, `spares` spare buffers of two words each. It has the steps of
`l0_write`, `l0_fill`, `l0_take`, `l0_retire` and `l0_ring_repair`, each store or load by itself, and is explored whole.
That the steps are seen in this order by others is the fences' part, argued in docs/internals/l0.md and raced in C.
The variants leave one step out each: the exploration must find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

SLOTS = 2


class BrokenError(Exception):
    """The promise that was not kept."""


@dataclass(frozen=True)
class Writer:
    todo: tuple[int, ...]  # slots, in order
    at: str = "lock"
    buffer: int = -1
    dead: bool = False


@dataclass(frozen=True)
class Reader:
    at: str = "current"
    version: tuple[int, int] = (0, 0)  # generation, buffer
    words: tuple[object, ...] = ()
    retired: bool = False  # its key was written again
    taken: int = 0  # writes that took a buffer since


@dataclass(frozen=True)
class State:
    current: tuple[tuple[int, int], ...]  # of each slot: generation, buffer
    stamps: tuple[object, ...]
    words: tuple[tuple[object, object], ...]
    ring: tuple[int, ...]
    locks: tuple[int | None, ...]  # of each slot
    stripe: int | None
    writers: tuple[Writer, ...]
    reader: Reader
    kills: int


@dataclass(frozen=True)
class Protocol:
    spares: int
    without: str = ""
    plans: tuple[tuple[int, ...], ...] = ((0, 1), (0, 0))
    kills: int = 1
    reads: int = field(default=0)  # the slot that is read

    def start(self) -> State:
        buffers = SLOTS + self.spares
        return State(
            current=tuple((1, slot) for slot in range(SLOTS)),
            stamps=tuple((i, 1) if i < SLOTS else 0 for i in range(buffers)),
            words=tuple(((i, 1), (i, 1)) if i < SLOTS else (0, 0) for i in range(buffers)),
            ring=tuple(range(SLOTS, buffers)),
            locks=(None,) * SLOTS,
            stripe=None,
            writers=tuple(Writer(plan) for plan in self.plans),
            reader=Reader(),
            kills=self.kills,
        )

    def after(self, s: State) -> Iterator[State]:
        for i, w in enumerate(s.writers):
            if w.dead or not w.todo:
                continue
            stepped = self.write(s, i, w)
            if stepped is not None:
                yield stepped
            if s.kills and w.at != "lock":
                yield replace(with_writer(s, i, replace(w, dead=True)), kills=s.kills - 1)
        yield from self.read(s)

    def write(self, s: State, i: int, w: Writer) -> State | None:
        """One step of a writer; None: it waits."""
        slot = w.todo[0]
        generation, owned = s.current[slot]
        free = lambda owner: owner is None or s.writers[owner].dead  # noqa: E731

        def go(state: State, at: str, **more: object) -> State:
            return with_writer(state, i, replace(w, at=at, **more))

        match w.at:
            case "lock":
                return go(replace(s, locks=put(s.locks, slot, i)), "stripe") if free(s.locks[slot]) else None
            case "stripe":
                if not free(s.stripe):
                    return None
                repairs = s.stripe is not None and self.without != "repair"
                return go(replace(s, stripe=i), "repair" if repairs else "take")
            case "repair":
                named = {buffer for _, buffer in s.current}
                spares = [b for b in range(SLOTS + self.spares) if b not in named]
                known = [] if self.without == "order" else [b for b in s.ring if b in spares]
                return go(replace(s, ring=(*known, *(b for b in spares if b not in known))), "take")
            case "take":
                return go(s, "unstamp", buffer=s.ring[0])
            case "unstamp":
                if s.reader.at == "view":
                    taken = s.reader.taken + s.reader.retired
                    s = replace(s, reader=replace(s.reader, taken=taken))
                    if w.buffer == s.reader.version[1] and taken < self.spares:
                        raise BrokenError(f"a view ended after {taken} writes")
                stamps = s.stamps if self.without == "unstamp" else put(s.stamps, w.buffer, 0)
                return go(replace(s, stamps=stamps), "word 0")
            case "word 0" | "word 1":
                n = int(w.at[-1])
                value = (slot, generation + 1, i)  # two writers may try the same generation, if one of them dies
                words = put(s.words, w.buffer, put(s.words[w.buffer], n, value))
                return go(replace(s, words=words), "word 1" if n == 0 else "stamp")
            case "stamp":
                return go(replace(s, stamps=put(s.stamps, w.buffer, (slot, generation + 1))), "swing")
            case "swing":
                s = replace(s, current=put(s.current, slot, (generation + 1, w.buffer)))
                if s.reader.at == "view" and slot == self.reads:
                    s = replace(s, reader=replace(s.reader, retired=True))
                # What it owned until now stands in no word any more: only this writer knows it.
                return go(s, "retire", buffer=owned)
            case "retire":
                return go(replace(s, ring=(*s.ring[1:], w.buffer)), "leave stripe")
            case "leave stripe":
                return go(replace(s, stripe=None), "unlock")
            case "unlock":
                return with_writer(replace(s, locks=put(s.locks, slot, None)), i, Writer(w.todo[1:]))
        raise AssertionError(w.at)

    def read(self, s: State) -> Iterator[State]:
        r = s.reader
        generation, buffer = r.version
        match r.at:
            case "current":
                yield replace(s, reader=replace(r, at="word 0", version=s.current[self.reads]))
            case "word 0" | "word 1":
                n = int(r.at[-1])
                words = (*r.words, s.words[buffer][n])
                yield replace(s, reader=replace(r, at="word 1" if n == 0 else "check", words=words))
            case "check":
                if self.without == "check" or s.stamps[buffer] == (self.reads, generation):
                    if r.words[0] != r.words[1] or r.words[0][:2] != (self.reads, generation):
                        raise BrokenError(f"a reader was given {r.words} for generation {generation}")
                    gone = s.current[self.reads] != r.version
                    # A key that was written again before the check promises nothing that can be counted from here.
                    yield replace(s, reader=Reader("over") if gone else replace(r, at="view"))
                else:
                    yield replace(s, reader=Reader())
            case "view":
                yield replace(s, reader=Reader("over"))

    def holds(self, s: State) -> None:
        r = s.reader
        if r.at == "view" and s.stamps[r.version[1]] == (self.reads, r.version[0]) and s.words[r.version[1]] != r.words:
            raise BrokenError("a view is called valid and shows other bytes")
        owned = [buffer for _, buffer in s.current]
        if len(set(owned)) != len(owned):
            raise BrokenError(f"one buffer belongs to two slots: {owned}")
        if s.stripe is None and sorted([*owned, *s.ring]) != list(range(SLOTS + self.spares)):
            raise BrokenError(f"slots own {owned} and {s.ring} are spare")


def put(values: tuple, at: int, value: object) -> tuple:
    return (*values[:at], value, *values[at + 1 :])


def with_writer(s: State, i: int, writer: Writer) -> State:
    return replace(s, writers=put(s.writers, i, writer))


def explore(protocol: Protocol) -> int:
    """Every state that can be reached, once. How many there are."""
    start = protocol.start()
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        protocol.holds(state)
        for following in protocol.after(state):
            if following not in seen:
                seen.add(following)
                left.append(following)
    return len(seen)


@pytest.mark.parametrize(
    ("spares", "plans", "kills"),
    [
        (1, ((0, 1), (0, 0)), 1),
        (2, ((0, 1, 1), (1,)), 1),
        (2, ((0,), (1,), (0,)), 1),
        (2, ((0, 1), (1, 0)), 2),
        pytest.param(2, ((0, 0), (1, 1), (0,)), 2, marks=pytest.mark.slow),
    ],
)
def test_no_interleaving_and_no_kill_breaks_what_a_stripe_promises(spares, plans, kills):
    assert explore(Protocol(spares, plans=plans, kills=kills)) > 10_000


@pytest.mark.parametrize(
    ("without", "found"),
    [
        ("unstamp", "a reader was given|called valid"),
        ("check", "a reader was given"),
        ("repair", "belongs to two slots|are spare|a view ended"),
    ],
)
def test_the_exploration_finds_out_what_each_step_is_for(without, found):
    with pytest.raises(BrokenError, match=found):
        explore(Protocol(2, without, plans=((0, 0, 0), (1, 0))))
