"""Keys that are moved nearer to their home while others read, set, insert and delete them: every interleaving.

A model in small bounds, of one home with three slots. It has the steps of `l0_look`, `l0_lock_key`, `l0_put_new`,
`l0_claim_stands`, `l0_delete`, `l0_bound_lower`, `l0_move` and `l0_settle`, each access to shared memory by itself.
That a slot's word and its value are seen together is what `test_protocol.py` explores. Processes may be killed at any
step.

What is checked: who reads is given what stood there at some moment of its call; only a set makes its value appear, only
a delete makes the key disappear, and a move changes nothing. The variants leave one step out each: the exploration
must find out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

FREE, CLAIMED, LIVE, ARRIVING = "free", "claimed", "live", "arriving"
NOTHING = (FREE, "", 0)
THERE = (LIVE, ARRIVING)
Words = tuple[object, ...]  # an operation and what it is given
Step = Generator[Words, Any, Any]


class BrokenError(Exception):
    """The promise that was not kept."""


@dataclass(frozen=True)
class Memory:
    slots: tuple[tuple[str, str, int], ...]  # state, key, value
    locks: tuple[int | None, ...]
    moves: int
    distance: int

    def at(self, key: str) -> int | None:
        """What a reader finds that nothing disturbs."""
        for state, owner, value in self.slots[: self.distance + 1]:
            if state in THERE and owner == key:
                return value
        return None


# ---- the processes: each `yield` is one access to shared memory -------------------------------------------------


def reader(key: str, without: str) -> Step:
    moves, distance = yield ("bound",)
    for d in range(distance + 1):
        state, owner, value = yield ("slot", d)
        if state in THERE and owner == key:
            yield ("end", value)
    again, _ = yield ("bound",)
    if again == moves or without == "miss":
        yield ("end", None)
    yield ("become", reader, key)


def lower() -> Step:
    moves, distance = yield ("bound",)
    for d in range(distance, -1, -1):
        state, _, _ = yield ("slot", d)
        if state != FREE or d == 0:
            if d != distance:
                yield ("lower", moves, d)
            return


def settle(d: int, key: str) -> Step:
    """Our lock is on a copy whose mover is dead: take the other copy away."""
    _, distance = yield ("bound",)
    for e in range(d + 1, distance + 1):
        state, owner, _ = yield ("slot", e)
        if state not in THERE or owner != key:
            continue
        how = yield ("lock", e)
        if how == "dead":
            yield ("raise", 0)
        state, owner, _ = yield ("slot", e)
        if state in THERE and owner == key:
            yield ("store", e, NOTHING)
        yield ("unlock", e)
        break
    _, owner, value = yield ("slot", d)
    yield ("store", d, (LIVE, owner, value))


def clean(d: int) -> Step:
    """As l0_lock_clean: our lock, and no claim of a dead owner's under it."""
    how = yield ("lock", d)
    found = yield ("slot", d)
    if found[0] == CLAIMED:
        yield ("store", d, NOTHING)
        yield from lower()
        found = NOTHING
    return how, found


def lock_key(key: str, without: str, again: Words) -> Step:
    """The locked slot of the key, or None; looks `again` where a scan may have missed something."""
    moves, distance = yield ("bound",)
    for d in range(distance + 1):
        state, owner, _ = yield ("slot", d)
        if state == FREE or owner != key:
            continue
        how, (state, owner, _) = yield from clean(d)
        if how == "dead" and without != "raise":
            yield ("raise", 0)
        now, _ = yield ("bound",)
        if (now != moves and without != "stale") or state not in THERE or owner != key:
            yield ("unlock", d)
            yield ("become", *again)
        if state == ARRIVING and without != "settle":
            yield from settle(d, key)
        return d
    now, _ = yield ("bound",)
    if now != moves and without != "absent":
        yield ("become", *again)
    return None


def setter(key: str, value: int, without: str) -> Step:
    again = (setter, key, value)
    d = yield from lock_key(key, without, again)
    if d is None:
        d = yield from claim(key, without, again)
    yield ("store", d, (LIVE, key, value))
    yield ("unlock", d)
    yield ("end", value)


def claim(key: str, without: str, again: Words) -> Step:
    """A free slot that is ours, once nobody else can have the key."""
    for d in range(3):
        state, _, _ = yield ("slot", d)
        if state == FREE and (yield ("try", d)):
            state, _, _ = yield ("slot", d)
            if state == FREE:
                break
            yield ("unlock", d)
    else:
        yield ("end", "full")
    yield ("store", d, (CLAIMED, key, 0))
    moves, distance = yield ("raise", d)
    for _ in range(3):
        gives_way = False
        for e in range(distance + 1):
            state, owner, _ = yield ("slot", e)
            if e == d or state == FREE or owner != key:
                continue
            if state in THERE or e < d:
                gives_way = True
                break
            _, (state, owner, _) = yield from clean(e)
            yield ("unlock", e)
            if state in THERE and owner == key:
                gives_way = True
                break
        now, far = yield ("bound",)
        if gives_way or now == moves or without == "claim":
            break
        moves, distance, gives_way = now, far, True
    if gives_way:
        yield ("store", d, NOTHING)
        yield from lower()
        yield ("unlock", d)
        yield ("become", *again)
    return d


def deleter(key: str, without: str) -> Step:
    yield ("raise", 0)
    yield ("become", deleting, key)


def deleting(key: str, without: str) -> Step:
    d = yield from lock_key(key, without, (deleting, key))
    if d is not None:
        yield ("store", d, NOTHING)
        yield ("unlock", d)
        yield from lower()
    yield ("end", None)


def mover(far: int, near: int, without: str) -> Step:
    """Move whatever key lives in slot `far` to `near`, which is free. Never waits."""
    state, key, _ = yield ("slot", far)
    free, _, _ = yield ("slot", near)
    if state != LIVE or free != FREE or not (yield ("try", far)):
        yield ("end", "not moved")
    state, key, value = yield ("slot", far)
    copied = state != LIVE
    for e in range(0 if without == "copied" else far):
        other, owner, _ = yield ("slot", e)
        copied = copied or (other in THERE and owner == key)
    if copied or not (yield ("try", near)):
        yield ("unlock", far)
        yield ("end", "not moved")
    free, _, _ = yield ("slot", near)
    if free != FREE:
        yield ("unlock", near)
        yield ("unlock", far)
        yield ("end", "not moved")
    if without == "order":
        yield ("store", far, NOTHING)
    yield ("store", near, (LIVE if without == "arriving" else ARRIVING, key, value))
    if without != "bump":
        yield ("raise", near)
    if without != "order":
        yield ("store", far, NOTHING)
    yield ("store", near, (LIVE, key, value))
    yield ("unlock", near)
    yield ("unlock", far)
    yield from lower()
    yield ("end", "moved")


# ---- exploring them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """What runs, and what its accesses have given it so far: that is all its state."""

    body: Words
    given: Words = ()
    seen: frozenset[int | None] = frozenset()  # what stood under its key since its call began
    over: bool = False
    dead: bool = False


class Exploration:
    def __init__(self, without: str) -> None:
        self._without = without
        self._wishes: dict[Words, Words] = {}

    def wish(self, p: Process) -> Words:
        """Its next access."""
        at = (p.body, p.given)
        if at not in self._wishes:
            step = p.body[0](*p.body[1:], self._without)
            found = next(step)
            for each in p.given:
                found = step.send(each)
            self._wishes[at] = found
        return self._wishes[at]

    def step(self, m: Memory, all_: tuple[Process, ...], i: int) -> tuple[Memory, Process] | None:
        """One step of a process; None: it waits."""
        p = all_[i]
        match self.wish(p):
            case ("bound",):
                return m, gave(p, (m.moves, m.distance))
            case ("slot", d):
                return m, gave(p, m.slots[d])
            case ("store", d, slot):
                return replace(m, slots=put(m.slots, d, slot)), gave(p, None)
            case ("raise", d):
                m = replace(m, moves=m.moves + 1, distance=max(m.distance, d))
                return m, gave(p, (m.moves, m.distance))
            case ("lower", moves, d):
                return (replace(m, moves=moves + 1, distance=d) if m.moves == moves else m), gave(p, None)
            case ("try", d):
                free = m.locks[d] is None
                return (replace(m, locks=put(m.locks, d, i)) if free else m), gave(p, free)
            case ("lock", d):
                owner = m.locks[d]
                if owner is not None and not all_[owner].dead:
                    return None
                return replace(m, locks=put(m.locks, d, i)), gave(p, "free" if owner is None else "dead")
            case ("unlock", d):
                return replace(m, locks=put(m.locks, d, None)), gave(p, None)
            case ("become", *body):
                return m, replace(p, body=tuple(body), given=())
            case ("end", result):
                if result not in ("full", "not moved", "moved") and result not in p.seen:
                    raise BrokenError(f"{p.body[0].__name__} ended with {result}, and there was {set(p.seen)}")
                return m, replace(p, over=True, given=())
        raise AssertionError(self.wish(p))

    def after(self, m: Memory, all_: tuple[Process, ...], kills: int) -> Iterator[Words]:
        for i, p in enumerate(all_):
            if p.over or p.dead:
                continue
            if kills and p.given and p.body[0] is not reader:
                yield m, put(all_, i, replace(p, dead=True)), kills - 1
            stepped = self.step(m, all_, i)
            if stepped is None:
                continue
            now, q = stepped
            for key in "kx":
                self.judge(p, key, m.at(key), now.at(key))
            moved = put(all_, i, q)
            yield now, tuple(self.watch(each, now) for each in moved), kills

    def judge(self, p: Process, key: str, before: int | None, after: int | None) -> None:
        body = p.body
        allowed = (body[0] is setter and body[1] == key and after == body[2]) or (
            body[0] is deleting and body[1] == key and after is None
        )
        if before != after and not allowed:
            raise BrokenError(f"{body[0].__name__} turned {key} from {before} into {after}")

    def watch(self, p: Process, m: Memory) -> Process:
        if p.over or p.dead or p.body[0] is mover:
            return p
        value = m.at(p.body[1])
        return p if value in p.seen else replace(p, seen=p.seen | {value})

    def run(self, m: Memory, bodies: list[Words], kills: int) -> int:
        """Every state that can be reached, once. How many there are."""
        start = (m, tuple(self.watch(Process(body), m) for body in bodies), kills)
        seen, left = {hash(start)}, [start]
        while left:
            for following in self.after(*left.pop()):
                mark = hash(following)
                if mark not in seen:
                    seen.add(mark)
                    left.append(following)
        return len(seen)


def gave(p: Process, result: object) -> Process:
    return replace(p, given=(*p.given, result))


def put(values: Words, at: int, value: object) -> Words:
    return (*values[:at], value, *values[at + 1 :])


def home(*slots: tuple[str, str, int]) -> Memory:
    far = max(d for d, slot in enumerate(slots) if slot[0] != FREE)
    return Memory((*slots, NOTHING)[:3], (None,) * 3, 0, far)


K, X = (LIVE, "k", 1), (LIVE, "x", 5)
MOVES: dict[str, tuple[Memory, list[Words], int]] = {
    "read": (home(NOTHING, NOTHING, K), [(mover, 2, 0), (reader, "k"), (setter, "k", 2)], 1),
    "read twice moved": (home(NOTHING, NOTHING, K), [(mover, 2, 1), (mover, 1, 0), (reader, "k")], 1),
    "two setters": (home(NOTHING, K), [(mover, 1, 0), (setter, "k", 2), (setter, "k", 3)], 1),
    "deleted": (home(NOTHING, K), [(mover, 1, 0), (deleter, "k"), (reader, "k")], 2),
    "set and deleted": (home(NOTHING, K), [(mover, 1, 0), (deleter, "k"), (setter, "k", 2)], 1),
    "two movers killed": (
        home(NOTHING, NOTHING, K),
        [(mover, 2, 1), (mover, 2, 0), (setter, "k", 2), (deleter, "k")],
        2,
    ),
}
# Four processes and two kills have more states than fit in memory: that case only has to find what is left out.
WHOLE = [case for case in MOVES if case not in ("read", "two movers killed")]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in WHOLE]


@pytest.mark.parametrize("case", ["read", *SLOW])
def test_no_interleaving_and_no_kill_makes_a_move_seen(case):
    memory, bodies, kills = MOVES[case]
    assert Exploration("").run(memory, bodies, kills) > 20_000


@pytest.mark.parametrize(
    ("without", "case", "found"),
    [
        ("miss", "read", "reader ended with None"),  # the second look at the bound
        ("bump", "read", "reader ended with None"),  # the move of the bound
        ("order", "read", "mover turned k"),  # the copy before the slot is freed
        ("raise", "two setters", "setter ended with"),  # the move of the bound by who takes a lock from the dead
        ("stale", "two setters", "setter ended with"),  # the look at the bound behind a lock
        ("settle", "deleted", "deleting"),  # the end of the other copy
        ("arriving", "deleted", "deleting"),  # the state that says that there may be one
        pytest.param("copied", "two movers killed", "ended with|turned k", marks=pytest.mark.slow),  # no third copy
    ],
)
def test_the_exploration_finds_out_what_each_step_is_for(without, case, found):
    memory, bodies, kills = MOVES[case]
    with pytest.raises(BrokenError, match=found):
        Exploration(without).run(memory, bodies, kills)
