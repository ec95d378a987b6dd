"""The simulation: clients, wire, server, dispatch, lookups, tiering and kernel in one process, in virtual time.

    python tests/simulation/run.py [--schedules 2000] [--first SEED] [--jobs N] [--replay SCHEDULE] [--plant FAULT]
                                   [--trace]

Each seed is one schedule: several client processes of several uids, each with threads, store, look up, read, pin,
clear, drop their clients and die, while connections are lost, processes are stopped, and servers are killed and come
back. After every step it is checked that no slot is in two hands, that nothing uncommitted is seen, that waits end
when they should, and at the end that nobody holds anything. A schedule that breaks one of these is made as short as
it can be and printed; `--replay` runs it again. Exit status 0, or 1 with what was broken.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import sim_world

from lmcache_core.pool.segment import Segment

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":  # a seed is a schedule in every process
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})

sim_world.take_over_time()

import sim_faults  # noqa: E402 - only now may anything of ours be imported
import sim_isolation  # noqa: E402
from sim_actors import RESTART_S, Actor, Step, watch_copies, watch_waits  # noqa: E402
from sim_nodes import ClientNode, ServerNode  # noqa: E402
from sim_plans import KINDS, Kind, plan_of, scene_of, world_of  # noqa: E402
from sim_shadow import LAYOUT, NAMESPACES, Shadow  # noqa: E402
from sim_tier import SimulatedTier, on_tasks, settled_with  # noqa: E402
from sim_world import Broken, World  # noqa: E402

from lmcache_core.kernel.answers import LeaseKind  # noqa: E402
from lmcache_core.plugins import loader  # noqa: E402
from lmcache_core.plugins.loader import load_plugins  # noqa: E402
from lmcache_core.plugins.registry import Registry  # noqa: E402
from lmcache_core.pool.lifelock import LifeLock  # noqa: E402
from lmcache_core.pool.mapping import Mapping  # noqa: E402
from lmcache_core.server.server import Server  # noqa: E402
from lmcache_core.settings.compose import make_settings  # noqa: E402
from lmcache_core.settings.model import Settings  # noqa: E402

SLOTS = 16
WRITE_TTL_S, READ_TTL_S, PROMISE_TTL_S = 10.0, 8.0, 6.0
OVER_S = 60.0  # after the last operation everything has ended by then, whatever became of whom
SHRINK_RUNS_MAX = 400


class Schedule:
    """One world with its nodes, from the first step to the proof that nothing is left."""

    shadow: Shadow

    def __init__(self, seed: int, plan: Sequence[Step], settings: dict[Kind, Settings], registry: Registry) -> None:
        chance = random.Random(f"{seed}/world")
        self.world = world = World(seed)
        self.shadow = Schedule.current = Shadow(world)
        self.shadow.namespaces([each.id for each in NAMESPACES])
        kind, tiers = world_of(seed, chance)
        chosen = settings[kind]
        self.tiers = [
            SimulatedTier(world, self.shadow, name, chance, capacity, kind.eviction) for name, capacity in tiers
        ]
        self.shadow.outside = bool(self.tiers)
        (chosen.state_dir / f"{chosen.name}.epochs").unlink(missing_ok=True)
        self.server = ServerNode(world, self.shadow, lambda clock: Server(chosen, registry, clock), self.tiers)
        self.clients = [ClientNode(world, self.shadow, self.server, number, chance) for number in range(4)]
        self.plan = plan
        self._faults = sorted(
            ((step.at_step, at, step) for at, step in enumerate(plan) if step.at_step), key=lambda each: each[:2]
        )

    current: Shadow

    def run(self) -> BaseException | None:
        """What was found, or None."""
        world = self.world
        sim_world.world = world
        world.on_step = self._strike
        try:
            self.server.start()
            promises: list[object] = []
            threads = sorted({(step.client, step.thread) for step in self.plan if not step.at_step})
            for client, thread in threads:
                node = self.clients[client]
                steps = [
                    step for step in self.plan if (step.client, step.thread) == (client, thread) and not step.at_step
                ]
                actor = Actor(world, self.shadow, node, promises)
                world.start(f"{node.name}.{thread}", node, lambda actor=actor, steps=steps: actor.run(steps))  # type: ignore[misc]
            world.run(lambda: world.all_done)
            if world.failure is None:
                self._finish()
        except Broken as error:
            world.failure = world.failure or error
        finally:
            self._unwind()
            sim_world.world = None
        return world.failure

    def _strike(self) -> None:
        """The faults that are due."""
        while self._faults and self._faults[0][0] <= self.world.steps:
            self._fault(self._faults.pop(0)[2])

    def _fault(self, step: Step) -> None:
        chance, node = random.Random(step.seed), self.clients[step.client]
        if step.kind == "kill_client":
            node.kill()
        elif step.kind == "stop_client":
            node.stop(chance.choice([0.01, 0.5, 4.0, 20.0]))
        elif step.kind == "cut":
            node.cut()
        elif step.kind == "tier":
            if self.tiers:
                chance.choice(self.tiers).change(chance)
        elif step.kind == "stop_server":
            self.server.stop(chance.choice([0.01, 0.5, 4.0, 35.0]))
        elif step.kind == "kill_server":
            self.server.kill()
            self.world.at(self.world.now + 30.0, self.server.start)
        elif step.kind == "restart_server":
            self.server.kill()
            self.world.at(self.world.now + chance.choice([RESTART_S, RESTART_S, 1.0]), self.server.start)

    def _finish(self) -> None:
        """Everybody goes, one way or another; once all time is up nobody may hold anything."""
        world = self.world
        if not any(step.at_step or step.kind == "lose_connection" for step in self.plan):
            self._every_promise_was_told()
        self._faults.clear()
        if any(step.kind == "drop" for step in self.plan):
            gc.collect()  # a client that has lost a connection, in a thread that has gone on since
        for number, node in enumerate(self.clients):
            if node.client is not None and not node.dead:
                if world.chance.random() < 0.5:
                    world.start(f"{node.name}.end", node, Actor(world, self.shadow, node, []).close)
                else:
                    world.at(world.now + number, node.kill)
        for tier in self.tiers:
            tier.set_mood("prompt")  # a queue of dozens goes out through a small tier within the time that is left
        world.run(lambda: world.all_done)
        self.server.start()
        over_s = world.now + OVER_S
        world.run(lambda: world.now > over_s or (world.steps % 20 == 0 and not self._held()))
        if world.failure is None:
            self._nothing_is_held()

    def _every_promise_was_told(self) -> None:
        """Where no connection was lost and nobody died, who made a promise knows of it, or it has been taken back."""
        world, server = self.world, self.server.server
        assert server is not None
        until, over_s = world.now + 3.5, world.now + OVER_S  # what is under way arrives; a promise lasts longer
        # A lookup that waits for a tier holds what it has found, and says so with its answer.
        world.run(lambda: world.now > until and (not server.parts.lookups.under_way or world.now > over_s))
        for node in self.clients:  # an answer that nobody waited for is found by the next call
            if node.client is not None:
                world.start(f"{node.name}.call", node, Actor(world, self.shadow, node, []).call)
        world.run(lambda: world.all_done)
        until = world.now + 0.5
        world.run(lambda: world.now > until)
        open_ = [lease.id for lease in server.parts.kernel.leases.by_id.values() if lease.kind is LeaseKind.PROMISE]
        untold = [promise for promise in open_ if promise not in self.shadow.told]
        if untold:
            raise Broken(f"{len(untold)} promises are open that nobody was told of")

    def _held(self) -> dict[str, int]:
        """What anybody holds that must be free once everybody is gone."""
        server = self.server.server
        assert server is not None
        usage = server.parts.kernel.usage()
        held = {
            "sessions of the server": len(server.parts.sessions),
            "sessions of the kernel": usage.sessions,
            "leases": sum(usage.leases_by_kind.values()),
            "bytes in quarantine": sum(usage.quarantine_by_holder.values()),
            "bytes that are not ready objects": usage.used_bytes - usage.bytes_by_state["ready"],
            "bytes that are kept from eviction": sum(
                each.promised_bytes + each.read_bytes for each in usage.holders.values()
            ),
            "worker rows": sum(server.parts.segment.tables.row_claimed(row) for row in range(64)),
            "lookups under way": server.parts.lookups.under_way,
            "threads inside slots": self.shadow.inside,
            "peers that were turned away": server.dispatch.counters["refused_peers"],
            "faults of the loop": server.dispatch.counters["internal_errors"],
        }
        if self.tiers:
            held |= settled_with(server, self.tiers)
        return {what: count for what, count in held.items() if count}

    def _nothing_is_held(self) -> None:
        server, left = self.server.server, self._held()
        assert server is not None
        if left:
            raise Broken(
                "at the end somebody still holds " + ", ".join(f"{count} {what}" for what, count in left.items())
            )
        self.server.check_tenants()
        server.parts.kernel.clear(self.world.now)
        server.parts.l1.apply()
        if server.parts.kernel.usage().used_bytes:
            raise Broken(f"{server.parts.kernel.usage().used_bytes} bytes are left in an empty pool")

    def _unwind(self) -> None:
        """End every thread, and close what stands for the operating system."""
        world = self.world
        world.on_step = lambda: None
        self.server.process.dead = True
        for node in self.clients:
            node.dead = True
            node.close_descriptors()
        for task in world.tasks:
            while not task.done:
                world.hand(task)
        if self.server.server is not None:
            self.server.server._close()
        for node in self.clients:
            node.client = None
            node.close()


class Runner:
    """Runs schedules, and makes those that break something short."""

    def __init__(self, folder: Path) -> None:
        self.registry = registry = load_plugins()
        loader.load_plugins = lambda: registry  # `isolated` asks for them whenever it is built: 60 ms
        self.settings = {kind: self._settings(folder, kind) for kind in KINDS}
        watch_copies(lambda: Schedule.current)
        watch_waits()
        _watch_mappings()
        _watch_life_locks()
        sim_world.take_over_threading()
        on_tasks()
        gc.collect()
        gc.freeze()
        gc.disable()  # what a schedule does must not depend on when the collector comes
        self.since_collected = 0

    @staticmethod
    def _settings(folder: Path, kind: Kind) -> Settings:
        tenants = {"tenants": sim_isolation.tenants(sim_isolation.OF_THE_POOL)} if kind.eviction == "isolated" else {}
        return make_settings(
            name=f"sim{os.getpid()}{'w' if kind.warm else 'c'}",
            runtime_dir=str(folder / "run"),
            state_dir=str(folder / "state"),
            l1={
                "size_bytes": SLOTS * LAYOUT.nbytes,
                "access": "group",  # which clients of all uids are in
                "gids": (os.getegid(),),
                "backing": "shm" if kind.warm else "memfd",
                "on_stale": "adopt" if kind.warm else "recreate",
                "eviction": {"type": kind.eviction, **tenants},
            },
            lease={"write_ttl_s": WRITE_TTL_S, "read_ttl_s": READ_TTL_S, "promise_ttl_s": PROMISE_TTL_S},
            zmq={"ipc": False},
            dirty=kind.dirty,
            store_policy=kind.store,
            prefetch_policy=kind.prefetch,
        )

    def run(self, seed: int, plan: Sequence[Step]) -> Schedule:
        schedule = Schedule(seed, plan, self.settings, self.registry)
        schedule.run()
        self.since_collected += 1
        if self.since_collected >= 40:
            self.since_collected = 0
            gc.collect()
        return schedule

    def shrink(self, seed: int, plan: Sequence[Step], chosen: list[int], wanted: str) -> list[int]:
        """The positions of as few steps as still break the same, by leaving out what is not needed."""
        kept, runs, part = chosen, 0, len(chosen) // 2
        while part >= 1 and runs < SHRINK_RUNS_MAX:
            at, smaller = 0, False
            while at < len(kept) and runs < SHRINK_RUNS_MAX:
                without = kept[:at] + kept[at + part :]
                runs += 1
                failure = self.run(seed, [plan[position] for position in without]).world.failure
                if failure is not None and _kind(failure) == wanted:
                    kept, smaller = without, True
                else:
                    at += part
            if not smaller or part > 1:
                part //= 2
        return kept


def _watch_mappings() -> None:
    """Every process's view of a pool is known to the shadow, by its address."""
    made = Mapping.__init__

    def watched(self: Mapping, fd: int, nbytes: int) -> None:
        made(self, fd, nbytes)
        if sim_world.world is not None:
            Schedule.current.mapped(self.address, nbytes, fd)

    Mapping.__init__ = watched  # type: ignore[method-assign]


def _watch_life_locks() -> None:
    """A life lock belongs to the simulated process that takes it, and ends with it."""
    acquire: Callable[..., LifeLock] = LifeLock.acquire.__func__  # type: ignore[attr-defined]

    def acquired(cls: type[LifeLock], segment: Segment, row: int) -> LifeLock:
        lock = acquire(cls, segment, row)
        task = None if sim_world.world is None else sim_world.world.task
        if task is not None:
            task.node.life_locks.append(weakref.ref(lock))
        return lock

    LifeLock.acquire = classmethod(acquired)  # type: ignore[assignment, method-assign]


def token(seed: int, kept: Sequence[int]) -> str:
    return f"{seed}:{','.join(map(str, kept))}"


def replayed(text: str) -> tuple[int, list[Step]]:
    """The schedule that a token names: SEED, or SEED:POSITION,POSITION,… of its plan."""
    seed, _, positions = text.partition(":")
    plan = plan_of(int(seed))
    return int(seed), [plan[int(position)] for position in positions.split(",")] if positions else plan


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share them (default: %(default)s)")
    parser.add_argument("--replay", metavar="SCHEDULE")
    parser.add_argument("--plant", choices=sorted(sim_faults.PLANTED), help="break something first: it must be found")
    parser.add_argument("--without", default="", metavar="KINDS", help="operations and faults to leave out")
    parser.add_argument("--trace", action="store_true", help="say what happens, step by step")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    if options.jobs > 1 and not options.replay:
        return _shared_out(options.first, options.schedules, options.jobs)
    began_s = sim_world.real_monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # clears keep their epochs there, with fsync
        Path(folder).chmod(0o711)  # the group that is let in has to get there
        runner = Runner(Path(folder))
        if not options.replay:
            logging.disable(logging.CRITICAL)
        if options.plant:
            sim_faults.PLANTED[options.plant]()
        if options.replay:
            seed, plan = replayed(options.replay)
            schedule = runner.run(seed, plan)
            return _report(schedule, seed, range(len(plan)) if ":" not in options.replay else [], options.trace)
        steps = reads = writes = 0
        digest = hashlib.sha256()
        seeds = list(range(options.first, options.first + options.schedules))
        if options.plant in sim_faults.SCENES:  # first those that lead to it: what is looked for is found sooner
            seeds.sort(key=lambda seed: scene_of(seed) != sim_faults.SCENES[options.plant])
        for number, seed in enumerate(seeds, 1):
            plan = plan_of(seed)
            chosen = [at for at, step in enumerate(plan) if step.kind not in options.without.split(",")]
            schedule = runner.run(seed, [plan[at] for at in chosen])
            steps, reads, writes = (
                steps + schedule.world.steps,
                reads + schedule.shadow.reads,
                writes + schedule.shadow.writes,
            )
            digest.update("\n".join(schedule.world.trace).encode())
            if schedule.world.failure is not None:
                print(f"schedule {seed}, the {number}th: {_words(schedule.world.failure)}")
                if not options.no_shrink:
                    kept = runner.shrink(seed, plan, chosen, _kind(schedule.world.failure))
                    plan = [plan[position] for position in kept]
                    schedule = runner.run(seed, plan)
                    print(f"shrunk; again: python tests/simulation/run.py --trace --replay {token(seed, kept)}")
                return _report(schedule, seed, [], options.trace)
    took_s = sim_world.real_monotonic() - began_s
    print(
        f"{options.schedules} schedules from {options.first} on, {steps:,} steps, {writes:,} objects written and "
        f"{reads:,} read: nothing was broken; {took_s:.1f} s; digest {digest.hexdigest()[:16]}"
    )
    return 0


def _shared_out(first: int, schedules: int, jobs: int) -> int:
    """The same, by so many processes: 1 if any of them found something. Each prints what it found."""
    ends = [first + schedules * job // jobs for job in range(jobs + 1)]
    parts = [f"--first {ends[job]} --schedules {ends[job + 1] - ends[job]} --jobs 1".split() for job in range(jobs)]
    # What was said last of an option counts.
    processes = [subprocess.Popen([sys.executable, *sys.argv, *part]) for part in parts]
    return max(process.wait() for process in processes)


def _kind(failure: BaseException) -> str:
    """What is the same of two findings, whoever made them and with what numbers."""
    said = re.sub(r"client\d(\.\w+)?|a lane|\d[\d.]*", "_", str(failure))
    return f"{type(failure).__name__} {said}"


def _words(failure: BaseException | None) -> str:
    return f"{type(failure).__name__}: {failure}"


def _report(schedule: Schedule, seed: int, kept: Sequence[int], trace: bool) -> int:
    if trace:
        print("\n".join(schedule.world.trace))
    for step in schedule.plan:
        print(f"    {step}")
    failure = schedule.world.failure
    if failure is None:
        print(f"schedule {seed}: nothing was broken")
        return 0
    print(f"schedule {seed}: {_words(failure)}")
    if not isinstance(failure, Broken):
        import traceback

        traceback.print_exception(failure, file=sys.stdout)
    return 1


if __name__ == "__main__":
    sys.exit(main())
