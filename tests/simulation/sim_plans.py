"""What is to happen in a schedule: a plan, and the scene that it may begin with.

A scene steers a schedule to a fault of one kind, which would be met too seldom by itself. It comes first, in a world
that is fit for it, and the plan goes on from there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sim_actors import Step


class Kind(NamedTuple):
    """Of the worlds that there are: how the server is set up."""

    warm: bool  # a new server adopts the pool of its predecessor
    dirty: str
    store: str
    prefetch: str
    eviction: str


KINDS = [
    Kind(warm, dirty, store, prefetch, eviction)
    for warm in (False, True)
    for dirty in ("drop", "keep", "wait")
    for store in ("default", "skip_l1")
    for prefetch in ("default", "retain")
    for eviction in ("lru", "isolated")
]
TIERS = [(), ("near",), ("near", "far"), ("near", "far")]
CAPACITIES = [None, 5, 12]  # of a tier, in objects


@dataclass(frozen=True)
class Scene:
    """`threads`: (client, thread) → its operations, each with what it is about. `kind`: fields of the world. `tiers`
    None: any, of any capacity."""

    threads: Mapping[tuple[int, int], str]
    kind: Mapping[str, Any]
    tiers: tuple[str, ...] | None = None
    capacity: int | None = None

    @classmethod
    def over_a_tier(cls, *operations: str) -> Scene:
        """Of one thread, over a tier that takes everything."""
        kind = {"store": "default", "dirty": "drop", "eviction": "lru"}
        return cls({(0, 0): ", ".join(operations)}, kind, ("near",))

    @classmethod
    def of_tenants(cls, first: str, second: str) -> Scene:
        """Of two clients, each of its own namespace, over a small tier."""
        kind = {"store": "default", "dirty": "drop", "eviction": "isolated"}
        return cls({(0, 0): first, (1, 0): second}, kind, ("near",), 12)


_STORED = "put 0:0-3, pause_for 1"  # and on the tier
_ANY: Mapping[str, Any] = {}

SCENES: dict[str, Scene] = {
    "a reader is slower than its lease": Scene({(0, 0): "read_slowly", (1, 0): "pause_long, turn_over"}, _ANY),
    "a client is closed under a copy": Scene(
        {(0, 0): "store_slowly", (0, 1): "pause_briefly, close", (1, 0): "pause_briefly, turn_over"}, _ANY
    ),
    "a session ends under a copy": Scene(
        {(0, 0): "store_slowly", (0, 1): "pause_briefly, end_session", (1, 0): "turn_over"}, _ANY
    ),
    "a client reconnects under a copy": Scene(
        {(0, 0): "store_slowly", (0, 1): "pause_briefly, lose_connection, call, turn_over"}, _ANY
    ),
    "a pool is adopted under a copy": Scene(
        {(0, 0): "store_slowly", (1, 0): "pause_briefly, restart_server, turn_over"},
        {"warm": True, "store": "default", "eviction": "lru"},
    ),
    # What waits for a tier that does not answer is evicted and stored again, behind something that stands.
    "a key is stored again while it waits for a tier": Scene.over_a_tier(
        "tiers_are down, put 0:10, pause_for 0.3, put 0:11, pause_for 0.3, put 0:12, pause_for 0.3",
        "put 0:14-15, hold 0:14-15, put 0:0-3, put 1:0-8, put 1:9-17, put 0:0-3, tiers_are well, pause_for 3",
    ),
    "a clear meets loads": Scene.over_a_tier(
        _STORED, "forget 0, tiers_are stuck, ask 0:0-3, pause_for 0.2, forget 0, tiers_are well, pause_for 1"
    ),
    "a tier gives one object for another": Scene.over_a_tier(
        "put 0:0-5, pause_for 1, forget 0, tiers_are confused, fetch 0:0-2, fetch 0:3-5, fetch 0:0-5, tiers_are well"
    ),
    "a server dies before its clear has deleted anything": Scene.over_a_tier(
        _STORED, "tiers_are stuck, clear_tiers 0, restart_server, tiers_are well, pause_for 1, fetch 0:0-3"
    ),
    "a load comes back once its slot is another's": Scene.over_a_tier(
        _STORED,
        "forget 0, tiers_are stuck, ask 0:0-3, pause_for 5.5, put 1:0-17, tiers_are well, pause_for 1",
        "fetch 1:0-17",
    ),
    # One tenant has what its quota covers. What the other one has been granted and not written yet counts, too …
    "a burst that commits nothing": Scene.of_tenants("put 0:0-8", "pause_for 0.5, grab 1:0-17"),
    # … and so does what is on its way to the tier.
    "a burst behind a tier that is stuck": Scene.of_tenants(
        "put 0:0-6, pause_for 1, tiers_are stuck, pause_for 1, tiers_are well",
        "pause_for 1.2, put 1:0, put 1:1, put 1:2-3, put 1:4-7",
    ),
}
SCENES_OF_A_HUNDRED = 45  # schedules that begin with one

# How often a plan takes an operation; the others come in scenes only.
WEIGHTS = {"store": 8, "burst": 2, "retrieve": 6, "lookup": 5, "redeem": 4, "lookup_nowait": 3, "write_in_place": 5,
           "read_in_place": 5, "pin": 1, "clear": 2, "end_session": 1, "close": 2, "drop": 1}  # fmt: skip
FAULT_WEIGHTS = {"kill_client": 3, "stop_client": 3, "cut": 4, "kill_server": 1, "restart_server": 3,
                 "stop_server": 2, "tier": 6}  # fmt: skip


def scene_of(seed: int) -> str | None:
    """The name of what a schedule begins with, if anything."""
    chance = random.Random(f"{seed}/scene")
    return chance.choice(list(SCENES)) if chance.randrange(100) < SCENES_OF_A_HUNDRED else None


def plan_of(seed: int) -> list[Step]:
    """What is to happen in a schedule."""
    chance = random.Random(f"{seed}/plan")
    steps = []
    name = scene_of(seed)
    for (client, thread), operations in SCENES[name].threads.items() if name else ():
        for operation in operations.split(", "):
            kind, _, what = operation.partition(" ")
            steps.append(Step(kind, client, thread, chance.getrandbits(32), what=what))
    clients = chance.randint(2, 4)
    for client in range(clients):
        for thread in range(chance.choice([1, 2, 2])):
            for _ in range(chance.randint(4, 12)):
                (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
                steps.append(Step(kind, client, thread, chance.getrandbits(32)))
    operations = len(steps)
    for _ in range(chance.choice([0, 1, 2, 3, 4, 6, 8])):
        (kind,) = chance.choices(list(FAULT_WEIGHTS), list(FAULT_WEIGHTS.values()))
        steps.append(
            Step(kind, chance.randrange(clients), 0, chance.getrandbits(32), chance.randrange(10, 20 + 9 * operations))
        )
    return steps


def world_of(seed: int, chance: random.Random) -> tuple[Kind, list[tuple[str, int | None]]]:
    """How a schedule's server is set up, and its tiers, each with its capacity."""
    kind, names = chance.choice(KINDS), chance.choice(TIERS)
    tiers = [(name, chance.choice(CAPACITIES)) for name in names]
    name = scene_of(seed)
    if name is None:
        return kind, tiers
    scene = SCENES[name]
    if scene.tiers is not None:
        tiers = [(name, scene.capacity) for name in scene.tiers]
    return kind._replace(**scene.kind), tiers
