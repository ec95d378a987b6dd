"""Tiers whose media are slow, hang, fail and lie, in virtual time: the real tiering, over a dictionary each.

The lanes are the real ones, too. Their threads are tasks of the server's process: each step of a call, each half of an
object that is read from a slot or put into one, is an event, and others may come in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import sim_isolation
import sim_world
from sim_shadow import OBJECT_BYTES, Shadow
from sim_world import Broken, Killed, Task, World

import lmcache_core.tiers.retry as retry_module
import lmcache_core.tiers.tier.lanes as lanes_module
from lmcache_core.buffers import address_of
from lmcache_core.errors import TierError
from lmcache_core.policies.contracts import EvictionPolicy
from lmcache_core.policies.lru import LruEviction
from lmcache_core.tiers.contract import (
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import HEADER_BYTES, payload_checksum, read_header, split_tier_key, tier_key
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_core.tiers.tier.config import TierConfig
from lmcache_core.tiers.tier.tier import Tier

if TYPE_CHECKING:
    from sim_nodes import ServerProcess

    from lmcache_core.server.server import Server

DEADLINE_S = 5.0
STORED_BYTES = HEADER_BYTES + OBJECT_BYTES
HANGS_S = 40.0  # what merely hangs does so no longer: who waits for its end is told some day
OPERATIONS = ["exists", "load", "store", "delete", "scan"]
MOODS = ["well", "slow", "hangs", "fails", "lies", "mute", "mute once"]
MOOD_WEIGHTS = [3, 2, 3, 3, 2, 2, 2]


class SimulatedTier:
    """One medium, which outlives its servers. `mood`: what it does to those who call it, until it changes.

    In one operation it may be `mute`: then these calls, and only these, hang until it is in another mood, if ever; or
    `mute once`: then the next of them alone does, and hangs until the end, whatever the mood.
    Scenes know three more: `stuck` hangs in all that moves or removes objects, `down` fails whatever is asked, and
    `confused` gives another key's object for each that is loaded. In the end all are `prompt`: well, and never slow.
    """

    def __init__(
        self, world: World, shadow: Shadow, name: str, chance: random.Random, capacity: int | None, eviction: str
    ) -> None:
        self.world = world
        self.shadow = shadow
        self.name = name
        self.objects: dict[bytes, bytes] = {}
        self.loaded: set[bytes] = set()  # what was ever loaded from it, whether or not it is still there
        self.capacity = capacity  # in objects
        self._eviction = eviction
        self.mood = "well"
        self.has_lied = False
        self._hung: list[Callable[[], None]] = []
        self._hung_for_good: list[Callable[[], None]] = []
        if chance.random() < 0.4:
            self.change(chance)

    def attach(self, server: Server) -> Tier:
        """A new server begins to use it."""
        eviction: EvictionPolicy | None = None
        if self.capacity is not None:
            isolated = self._eviction == "isolated"
            eviction = sim_isolation.policy(self.capacity, STORED_BYTES) if isolated else LruEviction()
        capacity_bytes = None if self.capacity is None else self.capacity * STORED_BYTES
        config = TierConfig(deadline_s=DEADLINE_S, capacity_bytes=capacity_bytes)
        tier = Tier(self.name, Medium(self), config, eviction=eviction)
        server.parts.tiers.opened().add_tier(tier)
        return tier

    def change(self, chance: random.Random) -> None:
        """Another mood."""
        mood = chance.choices(MOODS, MOOD_WEIGHTS)[0]
        self.set_mood(f"{mood} in {chance.choice(OPERATIONS)}" if mood.startswith("mute") else mood)

    def set_mood(self, mood: str) -> None:
        self.world.note(self.name, f"is {mood} now")
        self.mood = mood
        self.has_lied |= mood in ("lies", "confused")
        if mood not in ("hangs", "stuck"):  # mute in something else: what hung there is answered
            hung, self._hung = self._hung, []
            if mood == "prompt":
                hung += self._hung_for_good
            for wake in hung:
                wake()

    def hang_once(self, task: Task) -> None:
        """This call, and no other."""
        self.set_mood("well")
        task.wait(float("inf"), self._hung_for_good.append)

    def hang(self, task: Task, seconds: float = HANGS_S) -> None:
        """Until it is in another mood, or so much time has passed that the caller's system gives up."""
        task.wait(self.world.now + seconds, self._hung.append)


class Medium(L2Adapter):
    """The adapter of one server."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True)

    def __init__(self, tier: SimulatedTier, context: object = None) -> None:
        self._tier = tier
        self._world = tier.world
        self._shadow = tier.shadow

    # --- the contract -------------------------------------------------------------------------------------

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        task = self._begin("store")
        return self._end(task, [self._store(task, item) for item in items])

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        task = self._begin("exists")
        there = [key in self._tier.objects for key in keys]
        if self._chance(0.2, "lies"):
            there = [not each for each in there]
        self._lag(task)
        return there

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        task = self._begin("load")
        return self._end(task, [self._load(task, item) for item in items])

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        task = self._begin("delete")
        outcomes = []
        for key in keys:
            refused = self._refused()
            done = refused is None or self._chance(0.3, "fails")  # done, and its answer is lost
            if done and not self._chance(0.3, "lies"):
                self._note("loses", key)
                self._tier.objects.pop(key, None)
            outcomes.append(refused or Outcome(Result.DONE))
            task.breathe()
        return self._end(task, outcomes)

    def usage(self) -> Usage:
        return Usage(sum(map(len, self._tier.objects.values())), len(self._tier.objects))

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        task = self._begin("scan")
        after = bytes.fromhex(cursor or "")
        page = list(islice((key for key in sorted(self._tier.objects) if key > after), 8))
        entries = [ScanEntry(key, len(self._tier.objects[key]), float(at)) for at, key in enumerate(page)]
        for key in page:
            self._note("lists", key)
        self._lag(task)
        return ScanPage(entries, page[-1].hex() if len(page) == 8 else None)

    def medium(self) -> str:
        return f"simulated://{self._tier.name}"

    def close(self) -> None:
        pass

    # --- one object ---------------------------------------------------------------------------------------

    def _store(self, task: Task, item: StoreItem) -> Outcome:
        header, payload = item.buffers
        content = bytearray(header)
        place = self._shadow.begin_read(task, address_of(payload))
        try:
            half = OBJECT_BYTES // 2
            content += payload[:half]
            task.breathe()
            content += payload[half:]
        finally:
            self._shadow.end_read(task, place)
        self._judge(item.key, bytes(content))
        refused = self._refused(Result.FULL)
        done = refused is None or (refused.result is Result.FAILED and self._chance(0.5, "fails"))
        if done and not self._chance(0.2, "lies"):
            self._note("keeps", item.key)
            self._tier.objects[item.key] = bytes(content)
        task.breathe()
        return refused or Outcome(Result.DONE, item.nbytes)

    def _judge(self, tier_key: bytes, content: bytes) -> None:
        """What a tier is given to keep is whole, committed, of the key that its header names, and has its sum."""
        header, body = read_header(memoryview(content)[:HEADER_BYTES]), content[HEADER_BYTES:]
        incarnation = self._shadow.incarnation(body)
        if header.checksum != payload_checksum([body]):
            raise self._broken(f"was given incarnation {incarnation.number} with a checksum of other bytes")
        if (header.key, header.namespace, header.epoch) != split_tier_key(tier_key):
            raise self._broken(f"was given incarnation {incarnation.number} under another key than its header's")
        if self._shadow.named(header.namespace, header.key) != (incarnation.namespace, incarnation.key):
            raise self._broken(f"was given incarnation {incarnation.number} under another key than its own")
        try:
            self._shadow.check(body, incarnation.namespace, incarnation.key, self._tier.name)
        except Broken as error:
            raise self._broken(str(error)) from error

    def _broken(self, said: str) -> Broken:
        """The tiers' own code holds off what adapters raise: it must be heard all the same."""
        broken = Broken(f"{self._tier.name} {said}")
        self._world.failure = self._world.failure or broken
        return broken

    def _load(self, task: Task, item: LoadItem) -> Outcome:
        content = self._tier.objects.get(item.key)
        refused = self._refused(Result.DAMAGED)
        if self._chance(0.1, "lies"):
            content = None
        if content is None:
            return refused or Outcome(Result.MISS)
        if self._tier.mood == "confused":
            content = self._another(content)
        elif self._chance(0.4, "lies"):
            content = self._lie(content)
        self._tier.loaded.add(item.key)
        header, payload = item.buffers
        header[:] = content[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
        body = content[HEADER_BYTES:]
        half = min(len(body), OBJECT_BYTES // 2)
        try:
            place = self._shadow.lane_begins(task, address_of(payload))
            payload[:half] = body[:half]
            task.work()
            payload[half : len(body)] = body[half:]
            self._shadow.lane_ends(task, place)
        except Broken as error:
            raise self._broken(str(error)) from error
        return refused or Outcome(Result.DONE, len(content))

    def _lie(self, content: bytes) -> bytes:
        """Something else than what was stored."""
        chance = self._world.chance
        kind = chance.randrange(4)
        if kind == 0:
            at = chance.randrange(len(content))
            return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        if kind == 1:
            return content[: chance.randrange(len(content))]
        if kind == 2:
            return bytes(len(content))
        return self._another(content)

    def _another(self, content: bytes) -> bytes:
        """Of another key, if there is one."""
        others = [key for key in sorted(self._tier.objects) if self._tier.objects[key] != content]
        return self._tier.objects[self._world.chance.choice(others)] if others else content

    def _note(self, what: str, tier_key: bytes) -> None:
        key, namespace, epoch = split_tier_key(tier_key)
        number, of_namespace = reversed(self._shadow.named(namespace, key))
        self._world.note(self._tier.name, f"{what} key {number} of namespace {of_namespace} in epoch {epoch}")

    # --- what goes wrong ----------------------------------------------------------------------------------

    def _chance(self, share: float, mood: str) -> bool:
        return self._tier.mood == mood and self._world.chance.random() < share

    def _begin(self, operation: str) -> Task:
        task = self._world.task
        assert task is not None
        if task.node.dead:
            raise Killed  # which a lane takes for a failure, and goes on
        task.busy_since = self._world.now
        self._lag(task)
        if self._chance(0.4, "hangs") or (operation in ("store", "load", "delete") and self._tier.mood == "stuck"):
            self._tier.hang(task)
        if self._tier.mood == f"mute in {operation}":
            self._tier.hang(task, float("inf"))
        if self._tier.mood == f"mute once in {operation}":
            self._tier.hang_once(task)
        if self._chance(0.3, "fails") or self._tier.mood == "down":
            raise TierError("connection reset", retryable=self._world.chance.random() < 0.5)
        return task

    def _lag(self, task: Task) -> None:
        if self._tier.mood == "prompt":
            return
        draw = self._world.chance.random()
        if self._tier.mood == "slow":
            seconds = draw * 0.5 if draw < 0.8 else draw * 2 * DEADLINE_S
        else:
            seconds = self._world.pause() if draw < 0.97 else 4 * DEADLINE_S * self._world.chance.random()
        if seconds:
            task.wait(self._world.now + seconds)

    def _refused(self, other: Result = Result.THROTTLED) -> Outcome | None:
        """The answer of an object that is not done, None for one that is."""
        if not self._chance(0.3, "fails"):
            return None
        result = self._world.chance.choice([Result.FAILED, Result.FAILED, Result.THROTTLED, other])
        return Outcome(result, error="refused", retryable=self._world.chance.random() < 0.5)

    def _end(self, task: Task, outcomes: list[Outcome]) -> list[Outcome]:
        self._lag(task)
        if self._chance(0.1, "fails"):
            raise TierError("the answer was lost", retryable=False)
        if self._chance(0.05, "lies"):
            outcomes.pop()
        return outcomes


def on_tasks() -> None:
    """What lanes and retries ask of the system is the simulation's."""
    lanes_module.os = SimpleNamespace(nice=lambda increment: None)  # type: ignore[attr-defined]
    retry_module.random = SimpleNamespace(uniform=_uniform)  # type: ignore[attr-defined]


def _uniform(low: float, high: float) -> float:
    assert sim_world.world is not None
    return sim_world.world.chance.uniform(low, high)


def beside(server: Server, process: ServerProcess) -> None:
    """A lane's thread that has something to say begins a turn of its server's loop."""
    tiering = server.tiering
    assert tiering is not None
    tiering._wake = lambda: None if process.dead else process.world.soon(process.turn)


def check_lanes(server: Server) -> None:
    """A tier all of whose threads hang in one operation is not called for that. As long as one does not, deletes go
    on."""
    for tier in () if server.tiering is None else server.tiering.tiers:
        reclaim, since_s = tier.reclaim, tier._no_room_since_s
        rests = (
            tier.accounting.scanning
            or tier.accounting.bytes_reserved
            or reclaim._out
            or reclaim._paused_until > server.parts.clock.now
            or tier.health.deletes.state is not BreakerState.CLOSED
        )
        if reclaim.hung and not rests and since_s is not None and since_s < server.parts.clock.now - DEADLINE_S:
            raise Broken(f"{tier.name} has no room, a delete hangs, and stores wait for nothing else to go")
        lookups, loads, stores, removals = tier.lanes
        for what, lane, breaker in (
            ("lookup", lookups, tier.health.lookups),
            ("load", loads, tier.health.loads),
            ("store", stores, tier.health.stores),
            ("delete", removals, tier.health.deletes),
        ):
            hung = [call for call in lane._running if call.was_late and call.what == what and call.allowed_s >= 1.0]
            if len(hung) == lane._threads_max + lane._replacements_max and breaker.state is BreakerState.CLOSED:
                raise Broken(f"{len(hung)} {what}s of {tier.name} hang, and it is asked for more")


def settled_with(server: Server, tiers: Sequence[SimulatedTier]) -> dict[str, int]:
    """What the tiers hold that they should not, once everybody is gone and the media are well."""
    tiering = server.tiering
    assert tiering is not None
    status = tiering.status()
    left = {
        "faults of the tiers": status["faults"],
        "bytes on their way to tiers": status["stores"]["in_flight_bytes"],
        "loads that are out": status["lookups"]["loads_out"],
    }
    for medium in tiers:
        (tier,) = [each for each in tiering.tiers if each.name == medium.name]
        books = tier.accounting
        of = f"of {medium.name}"
        left |= {
            f"calls and watches {of}": tier.order.kept,
            f"running calls {of}": sum(lane.running for lane in tier.lanes),
            f"reserved bytes {of}": books.bytes_reserved,
            f"leaving bytes {of}": books.bytes_leaving,
        }
        if not medium.has_lied:
            epochs = tiering._epochs
            former = [entry for shard in books.shards() for entry in shard if entry.epoch < epochs.of(entry.namespace)]
            left[f"objects of former epochs {of}"] = len(former)
            accounted = {key: entry.nbytes for shard in books.shards() for key, entry in _by_key(shard)}
            there = {key: len(content) for key, content in medium.objects.items()}
            left[f"objects that only the accounts {of} have"] = len(accounted.keys() - there.keys())
            left[f"objects that the accounts {of} do not have"] = len(there.keys() - accounted.keys())
            left[f"bytes that the accounts {of} have too many"] = books.bytes_used - sum(accounted.values())
            if medium.capacity is None:
                left[f"objects that the server owes {medium.name}"] = tiering.owed[medium.name]
                ready = [item for item in server.parts.l1.walk() if item is not None]
                names = [tier_key(item.key, item.namespace, epochs.of(item.namespace)) for item in ready]
                # What was loaded from another tier is owed to nobody, even if that tier evicts it later.
                elsewhere = {name for other in tiers if other is not medium for name in (*other.objects, *other.loaded)}
                lost = {name: tier.losses.find(name) for name in set(names) - there.keys() - elsewhere}
                settled = (TierReason.NO_ROOM, TierReason.EVICTED)
                missing = [name for name, loss in lost.items() if loss is None or loss.reason not in settled]
                left[f"objects that the pool has and {medium.name} has not"] = len(missing)
            else:
                left[f"bytes {of} over its capacity"] = max(0, sum(there.values()) - medium.capacity * STORED_BYTES)
    return left


def _by_key(entries: Sequence[Any]) -> list[tuple[bytes, Any]]:
    return [(entry.tier_key, entry) for entry in entries]
