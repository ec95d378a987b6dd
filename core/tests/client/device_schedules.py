"""Schedules of copies by a device, each from its seed: what the device, the engine, the pool and the caller do, in any
order that is allowed.

    python core/tests/client/device_schedules.py [--schedules 1000] [--first SEED]

One thread copies; it stops at each of its calls, and between them the schedule lands copies, ends the engine's work,
has a call fail, replaces what is in the pool, or cancels the job. In the end everything is compared through a second
client. Prints the first schedule that breaks something. Exit status 0, or 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lmcache_core import Client, PageGroup, Region
from lmcache_core.client import StoreJob
from lmcache_core.client.move import regions as regions_room
from lmcache_core.client.results import Status
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.device import ILLEGAL_ADDRESS, OUT_OF_MEMORY, FakeDevice, FakeMemory
from lmcache_testing.processes import ServerProcess

LAYERS, BLOCKS, PAGE = 2, 8, 3000
STRIDE = 4096
OBJECT = 2 * LAYERS * PAGE
SPACE = Namespace("device schedules", Layout("uint8", (OBJECT,)))
ACTIONS_MAX = 60
HANG_S = 20.0


class Broken(AssertionError):
    """What a schedule has broken."""


def need(holds: object, words: str) -> None:
    if not holds:
        raise Broken(words)


class Stage:
    """The clients, the device and its memory."""

    def __init__(self, server: ServerProcess, device: FakeDevice, stack: ExitStack) -> None:
        self.device = device
        self.memory = FakeMemory(LAYERS * BLOCKS * STRIDE)
        self.other = stack.enter_context(server.client(use_index=False))
        self.pages = []
        for use_index in (True, False):
            client: Client = stack.enter_context(server.client(use_index=use_index, copy_threads=1))
            layers = [Region(self.memory, at * BLOCKS * STRIDE, PAGE, STRIDE, BLOCKS, "cuda") for at in range(LAYERS)]
            self.pages.append(client.register_pages([PageGroup(SPACE, layers, 2)]))

    def page(self, layer: int, block: int) -> memoryview:
        start = (layer * BLOCKS + block) * STRIDE
        return self.memory.view[start : start + PAGE]

    def object_at(self, blocks: list[int]) -> bytes:
        return b"".join(bytes(self.page(layer, block)) for layer in range(LAYERS) for block in blocks)

    def fill(self, rng: random.Random) -> None:
        self.memory.view[:] = rng.randbytes(self.memory.view.nbytes)

    def put(self, contents: dict[bytes, bytes]) -> None:
        stored = self.other.store(list(contents), [bytearray(each) for each in contents.values()], namespace=SPACE)
        need(stored.stored == len(contents), "the pool has no room")

    def get(self, key: bytes) -> bytes | None:
        into = bytearray(OBJECT)
        found = self.other.retrieve([key], [into], namespace=SPACE, verify="always")
        return bytes(into) if found.hits else None


@contextmanager
def staged() -> Iterator[Stage]:
    """A stage with a server of its own. Meanwhile all memory of devices is the fake one's."""
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(16 << 20))
        asked, device = (regions_room.device_at, regions_room.allocation_at), FakeDevice(pin_step_bytes=STRIDE)
        regions_room.device_at = lambda address: device  # type: ignore[assignment, return-value]
        regions_room.allocation_at = lambda address: 1
        try:
            yield Stage(server, device, stack)
        finally:
            regions_room.device_at, regions_room.allocation_at = asked


class Schedule:
    """One job, and what happens beside it."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.rng = random.Random(seed)
        self.stage, self.device = stage, stage.device
        self.keys = [os.urandom(32) for _ in range(2)]
        self.blocks = [[1, 2], [5, 3]]
        self.trace: list[str] = []
        self.replaced: dict[bytes, bytes] = {}
        self.job: Any = None
        self.hung = False
        self.disturbed = False  # cancelled, or refused

    def run(self) -> None:
        self.device.run_free(False)
        try:
            self.rng.choice([self._store, self._retrieve])()
        finally:
            self.device.run_free()
            if self.job is not None:
                self.job.cancel()
            for stream in range(len(self.device.streams)):
                self.device.land(stream, self.device.queued)

    # --- what may happen ----------------------------------------------------------------------------------------

    def _act(self, *more: Callable[[], None]) -> None:
        """Until the job is over: one thing after another."""
        chances: list[Callable[[], object]] = [self._advance] * 6 + [self._land, self._engine, self._engine, *more]
        if self.rng.random() < 0.3:
            chances.append(self._fail)
        if self.rng.random() < 0.3:
            chances.append(self._cancel)
        for _ in range(ACTIONS_MAX):
            action = self.rng.choice(chances)
            self.trace.append(action.__name__)
            action()
            with self._watched():
                if self.job.done():
                    return
                self._look()
        self.device.run_free()
        need(self.job.wait(60.0), "the job does not end")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """What only looks may not wait for the device. If it does, the device goes on, after so long that no machine is
        that slow."""
        over = threading.Event()

        def watch() -> None:
            if not over.wait(HANG_S):
                self.hung = True
                self.device.run_free()

        watchdog = threading.Thread(target=watch)
        watchdog.start()
        try:
            yield
        finally:
            over.set()
            watchdog.join()
        need(not self.hung, "a look at the job waited for the device")

    def _advance(self) -> None:
        if self.device.wait_gate(lambda: self._over):
            self.device.advance()
            self.device.wait_gate(lambda: self._over)

    @property
    def _over(self) -> bool:
        return bool(self.job.has_read if isinstance(self.job, StoreJob) else self.job.done())

    def _land(self) -> None:
        self.device.land(self.rng.randrange(len(self.device.streams)))

    def _engine(self) -> None:
        self.device.engine_advances()

    def _fail(self) -> None:
        self.disturbed = True
        self.device.fail_next(self.rng.choice([ILLEGAL_ADDRESS, OUT_OF_MEMORY]))

    def _cancel(self) -> None:
        self.device.run_free()
        self.disturbed = True
        self.job.cancel()

    def _replace(self) -> None:
        """Other objects take the place of those in the pool, in the same slots where those are free."""
        self.stage.other.clear(SPACE)
        self.replaced = {os.urandom(32): self.rng.randbytes(OBJECT) for _ in range(4)}
        self.stage.put(self.replaced)

    def _look(self) -> None:
        if isinstance(self.job, StoreJob) and self.job.has_read:
            need(not self.device.queued, "pages count as read, and a copy of them is still queued")

    # --- jobs ---------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        stage = self.stage
        stage.fill(self.rng)  # not what is to be stored
        self.device.engine_begins(lambda: stage.fill(self.rng))
        computed: list[bytes] = []
        self.device.engine_begins(lambda: computed.extend(map(stage.object_at, self.blocks)))
        self.job = self.rng.choice(stage.pages).store_start([(0, self.keys, [1, 2, 5, 3])])
        self._act()
        need(not self.device.queued, "the job is over, and a copy is still queued")
        stage.fill(self.rng)  # the engine uses its pages anew
        taken = {os.urandom(32): self.rng.randbytes(OBJECT) for _ in range(2)}
        stage.put(taken)  # and others the slots
        statuses = self.job.result.statuses[0]
        for key, status, content in zip(self.keys, statuses, computed or [b""] * 2, strict=True):
            found = stage.get(key)
            need(found in (None, content), f"{status}, and the pool has other bytes than were computed")
            need(status is not Status.STORED or found is not None, "stored, and the pool does not have it")
            need(self.disturbed or status is Status.STORED, f"{status}, though nothing was in the way")
        self._still_there(taken)

    def _retrieve(self) -> None:
        stage, rng = self.stage, self.rng
        contents = {key: rng.randbytes(OBJECT) for key in self.keys}
        stage.put(contents)
        stage.fill(rng)
        self.device.engine_begins(lambda: stage.fill(rng))  # what still runs may write to the pages
        pages = rng.choice(stage.pages)
        order, verify = rng.choice(["region", "object"]), rng.choice(["never", "always"])
        self.job = pages.retrieve_start([(0, self.keys, [1, 2, 5, 3])], order=order, verify=verify)
        while self.device.engine_is_busy and rng.random() < 0.5:
            self.device.engine_advances()
        self._act(self._replace)
        need(not self.device.queued, "the job is over, and a copy is still queued")
        self._replace()
        result = self.job.result
        for key, blocks, status in zip(self.keys, self.blocks, result.statuses[0], strict=True):
            if status is Status.HIT:
                need(stage.object_at(blocks) == contents[key], "a hit, and the pages have other bytes")
            undisturbed = not self.disturbed and "_replace" not in self.trace
            need(status is Status.HIT or not undisturbed, f"{status}, though nothing was in the way")
        self._still_there(self.replaced)

    def _still_there(self, contents: dict[bytes, bytes]) -> None:
        """In slots that were free: nothing of the job may write to them."""
        for stream in range(len(self.device.streams)):
            self.device.land(stream, self.device.queued)
        for key, content in contents.items():
            need(self.stage.get(key) in (None, content), "a copy of the job has written to another object")


def explore(stage: Stage, seeds: range) -> str:
    """The first schedule that breaks something, in words; empty: none does."""
    for seed in seeds:
        schedule = Schedule(stage, seed)
        try:
            schedule.run()
        except Broken as broken:
            return f"schedule {seed}: {broken}; {' '.join(each.lstrip('_') for each in schedule.trace)}"
        stage.other.clear(SPACE)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # devices refuse on purpose
    with staged() as stage:
        broken = explore(stage, range(arguments.first, arguments.first + arguments.schedules))
    print(broken or f"{arguments.schedules} schedules, and none broke anything")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
