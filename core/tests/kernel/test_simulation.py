"""Deterministic simulation: workers, lanes and an operator as small processes, interleaved by a seed, in virtual
time; and after every single step of every schedule, a crash.

Each process is a generator that makes one call a step. A schedule is replayed from the start for each crash point,
so whatever a crash finds half done is found at every stage of being half done. `World` compares with its model and
checks all invariants after each call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from kernel_model import World

from lmcache_core.kernel import LeaseKind

STEPS = 40
Process = Iterator[None]


def writer(world: World, session: int, chance: random.Random) -> Process:
    """Stores a prompt in two pages, one of its gathers fails."""
    while True:
        namespace, first = chance.randint(1, 2), chance.randrange(8)
        lease = world.store(session, namespace, chance.choice([1, 2, 3]), list(range(first, first + 3)))
        yield
        if chance.random() < 0.5:
            world.store(session, namespace, 1, list(range(first + 3, first + 6)), lease)
            yield
        if chance.random() < 0.3:
            world.settle(session, lease, [1], "abort")
            yield
        if chance.random() < 0.1:
            world.pass_time(11.0)
            yield
        world.settle(session, lease, None, "commit")
        yield


def reader(world: World, scheduler: int, session: int, chance: random.Random) -> Process:
    """A scheduler looks up, its worker reads under the promise."""
    while True:
        namespace, first = chance.randint(1, 2), chance.randrange(8)
        keys = list(range(first, first + 4))
        promise = world.lookup(scheduler, namespace, keys, hold=True, prefix=True)
        yield
        lease = world.retrieve(session, namespace, keys[: chance.randint(1, 4)], promise, prefix=True)
        yield
        if chance.random() < 0.3:
            world.settle(session, lease, [0], "finish")
            yield
        world.settle(session, lease, None, "finish")
        yield
        if promise:
            world.free_promise(scheduler, promise)
            yield


def lane(world: World, chance: random.Random) -> Process:
    """Loads from a tier, sometimes too late; reads what it stores to one."""
    while True:
        namespace, first = chance.randint(1, 2), chance.randrange(8)
        lease = world.store(0, namespace, 1, [first, first + 1], loading=True)
        yield
        if chance.random() < 0.2:
            world.pass_time(12.0)
            yield
        world.settle(0, lease, None, chance.choice(["commit", "commit", "abort"]), retain=chance.random() < 0.5)
        yield
        lease = world.retrieve(0, namespace, [first, first + 1])
        yield
        world.settle(0, lease, None, "finish")
        yield


def operator(world: World, session: int, chance: random.Random) -> Process:
    while True:
        what = chance.randrange(7)
        if what == 0:
            world.pin(session, 1, [1, 2], 9.0)
        elif what == 1:
            world.clear(chance.choice([None, 1, 2]))
        elif what == 2:
            world.drop(2, [1, 2, 3])
        elif what == 3:
            world.trim()
        elif what == 4:
            world.begin_clear(chance.choice([None, 1, 2]))
        elif what == 5:
            world.free_cleared()
        else:
            world.pass_time(1.0)
        yield


def run(seed: int, steps: int) -> World:
    """The first `steps` steps of the schedule of `seed`."""
    chance = random.Random(seed)
    world = World(pool_mib=5)
    first, second, scheduler = world.join(), world.join(), world.join()
    processes = [
        writer(world, first, chance),
        writer(world, second, chance),
        reader(world, scheduler, second, chance),
        reader(world, scheduler, first, chance),
        lane(world, chance),
        operator(world, scheduler, chance),
    ]
    for _ in range(steps):
        next(chance.choice(processes))
    return world


def holds_nothing(world: World, session: int) -> bool:
    return not any(permit.owner == session and permit.open_at() for permit in world.permits.values())


def kill_one(world: World) -> None:
    world.end(1, "session_dead")
    assert holds_nothing(world, 1)


def lose_one_then_kill_it(world: World) -> None:
    world.end(1, "session_lost")
    world.pass_time(30.0)
    world.end(1, "session_dead")
    assert holds_nothing(world, 1)


def lose_one_and_have_it_back(world: World) -> None:
    held = [lease for lease, permit in world.permits.items() if permit.owner == 1]
    world.end(1, "session_lost")
    world.pass_time(1.0)
    world.join()
    world.join()
    world.reclaim(1, world.join() - 2, held[::2])


def kill_all(world: World) -> None:
    """And the tiers give up: then nothing but what is ready may be left, and a clear leaves nothing at all."""
    for session in [session for session in world.sessions if session]:
        world.end(session, "session_dead")
    for lease, permit in world.permits.items():
        if permit.open_at():
            world.settle(0, lease, None, "abort" if permit.kind is LeaseKind.WRITE else "finish")
    usage = world.kernel.usage()
    assert usage.used_bytes == usage.bytes_by_state["ready"]
    world.clear(None)
    assert world.kernel.usage().used_bytes == 0


@pytest.mark.parametrize("crash", [kill_one, lose_one_then_kill_it, lose_one_and_have_it_back, kill_all])
@pytest.mark.parametrize("seed", range(3))
def test_a_crash_after_any_step_leaves_a_pool_that_goes_on(seed: int, crash: Callable[[World], None]) -> None:
    for steps in range(STEPS):
        world = run(seed, steps)
        crash(world)
        newcomer = world.join()
        lease = world.store(newcomer, 3, 1, [1])
        world.settle(newcomer, lease, None, "commit")


def test_a_schedule_is_its_seed_and_nothing_else() -> None:
    first, second = run(3, 200), run(3, 200)
    assert first.marks == second.marks
    assert first.kernel.usage() == second.kernel.usage()
