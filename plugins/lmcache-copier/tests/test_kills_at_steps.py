"""Death and stop at every message and every copy of a registration, a store, a load, their cancels, and an
unregistering: in engine, copier or server, of engine, copier or server.

A library between each process and libc (steps.c) stops one thread before it sends or copies, and after it has received
or copied. There the test has the job cancelled if that is the case, kills or stops a process, lets the thread go on,
and looks: the engine is answered, every byte that anybody reads says whose it is, nothing writes to pages of a load
that is over, and no slot or lease is left.

A sample by default; LMCACHE_COPIER_KILLS=all is every step (a quarter of an hour), a number so many at random.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_copier.pages import ServerPages
from lmcache_core import Client, Status
from lmcache_core.errors import CacheError
from lmcache_core.native import native
from lmcache_core.pool.backing import segment_path
from lmcache_testing.processes import temporary_directory
from lmcache_testing.waiting import WAIT_S, until

from .stepped import CANCEL, IDS, OBJECTS, PAGE_BYTES, PAGES, PER_OBJECT, REGIONS, ROLES, group_on, keys_of, payload

COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
    pytest.mark.skipif(native is None, reason="adoption needs the C extension"),
]
HOW_MANY = os.environ.get("LMCACHE_COPIER_KILLS", "12")
OPERATIONS = ("register", "store", "retrieve", "cancel_store", "cancel_retrieve", "unregister")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
CASES = [(each, at, of, number) for each in OPERATIONS for at in ROLES for of in ROLES for number in SIGNALS]
STOPPED_S = 0.5  # what a job may take while the server is stopped


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    built = tmp_path_factory.mktemp("steps") / "steps.so"
    source = Path(__file__).with_name("steps.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", built, source], check=True)
    return built


def objects_in(buffer: bytearray) -> list[bytes]:
    """As they lie in an engine's pages."""
    starts = [
        [(region * PAGES + page) * PAGE_BYTES for region in range(REGIONS) for page in IDS[at : at + PER_OBJECT]]
        for at in range(0, PAGES, PER_OBJECT)
    ]
    return [b"".join(buffer[start : start + PAGE_BYTES] for start in each) for each in starts]


class EngineProcess:
    """An engine, asked over FIFOs."""

    def __init__(self, node: SteppedNode) -> None:
        stem = node.folder / f"engine-{uuid4().hex[:8]}"
        paths = [stem.with_suffix(each) for each in (".hears", ".says")]
        for path in paths:
            os.mkfifo(path)
        self._asks, self.fd = (os.open(path, os.O_RDWR) for path in paths)
        self.pid = node.fork("engine", node.name, node.folder, *paths)

    def ask(self, wish: str, number: int, deadline_s: float | None = None) -> None:
        os.write(self._asks, f"{json.dumps([wish, number, deadline_s])}\n".encode())

    def cancel(self) -> None:
        """What it was asked."""
        os.write(self._asks, CANCEL.encode())

    def answer(self) -> tuple[str, list[str]]:
        """Waits for it."""
        assert select.select([self.fd], [], [], WAIT_S)[0], "the engine got no answer"
        done, faults = json.loads(os.read(self.fd, 65536))
        return done, faults

    def close(self) -> None:
        os.close(self._asks)
        os.close(self.fd)


class SteppedNode:
    """A server, its copier and an engine, each of whose steps can be stopped; and another engine, in this process."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.name = folder, f"s{uuid4().hex[:10]}"
        (folder / "state").mkdir()
        page = folder / "steps"
        page.write_bytes(bytes(4096))
        paths = [Path(f"{page}.{each}") for each in ("reached", "release")]
        for path in paths:
            os.mkfifo(path)
        self._reached, self._release = (os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in paths)
        self._steps = ctypes.CDLL(str(library))
        self._steps.steps_attach(str(page).encode(), 0)
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("stepped.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "LD_PRELOAD": str(library), "STEPS": str(page)},
        )  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.numbers = 0
        self.server = self.fork("server", self.name, folder)
        self.client = Client.connect(self.name, runtime_dir=folder)
        self.copier = self._served()
        self._source, self._target = (bytearray(REGIONS * PAGES * PAGE_BYTES) for _ in range(2))
        self._bystander = [self._pages(each) for each in (self._source, self._target)]
        self._own = self.client.register_pages([group_on(self._target)])
        self.engine = self._new_engine()

    def fork(self, *words: object) -> int:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        print(*words, file=self._zygote.stdin, flush=True)
        return int(self._zygote.stdout.readline())

    def close(self) -> None:
        self.engine.close()
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.server, signal.SIGKILL)
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait(WAIT_S)
        self._zygote.stdout.close()
        os.close(self._reached)
        os.close(self._release)
        segment_path(self.name).unlink(missing_ok=True)

    def _pages(self, buffer: bytearray) -> ServerPages:
        return ServerPages(self.client, self.client.register_pages([group_on(buffer)]))

    def _new_engine(self) -> EngineProcess:
        return EngineProcess(self)

    def _status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.client.status()
        except CacheError:
            return {}
        return found

    def _served(self) -> int:
        """The copier's pid, once it serves."""

        def there() -> int:
            status = self._status()
            pid = status["helpers"]["copier"]["pid"] if status else None
            return pid if pid and (self.folder / self.name / "copier").exists() else 0

        return until(there, "a server with a copier")

    # --- one case -----------------------------------------------------------------------------------------------

    def do(self, wish: str, number: int) -> str:
        """Have the engine do it, and nobody stops."""
        self.engine.ask(wish, number)
        return self._heard(wish)

    def _heard(self, wish: str) -> str:
        done, faults = self.engine.answer()
        assert not faults, f"{wish}: {faults}"
        return done

    def run(self, wish: str, at: str, step: int, of: str, number: signal.Signals) -> bool:
        """Stop `at` at this step of the operation, kill or stop `of`, and look. False: there are not so many."""
        self.numbers += 1
        count = self.numbers
        if wish.endswith("retrieve"):
            self._until_served(count)
        elif wish == "unregister":
            until(lambda: self.do("register", 0) == "registered", "memory to unregister")
        self._drain()
        stops_server = of == "server" and number == signal.SIGSTOP
        self._steps.steps_arm(ROLES[at], step)
        self.engine.ask(wish, count, STOPPED_S if stops_server and wish not in ("register", "unregister") else None)
        answer = ""
        if self.engine.fd in select.select([self._reached, self.engine.fd], [], [], WAIT_S)[0]:
            answer = self._heard(wish)
            if not self._steps.steps_disarm():
                return False
        assert select.select([self._reached], [], [], WAIT_S)[0], "neither an answer nor that step"
        what = os.read(self._reached, 64).decode().strip()
        print(f"{wish}: {number.name} of the {of} when the {at} {what}, step {step}", flush=True)  # if it fails
        victim = {"engine": self.engine.pid, "copier": self.copier, "server": self.server}[of]
        if wish.startswith("cancel"):
            self.engine.cancel()
        os.kill(victim, number)
        if at != of or number == signal.SIGSTOP:
            os.write(self._release, b".")
        if of != "engine":
            answer = answer or self._heard(wish)
        elif number == signal.SIGSTOP:
            self._serve_bystander()
        if number == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):  # a silent copier was killed
                os.kill(victim, signal.SIGCONT)
            answer = answer or self._heard(wish)
        elif of == "engine":
            self.engine.close()
            self.engine = self._new_engine()
        else:
            self.server = self.fork("server", self.name, self.folder) if of == "server" else self.server
        self._look(count)
        self.counts[f"{wish}: {number.name} of the {of} when the {at} {what}"] += 1
        return True

    def _drain(self) -> None:
        for fd in (self._reached, self._release):
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)

    def _until_served(self, count: int) -> None:
        """The engine stores under the keys of this number, and finds it."""

        def stored() -> bool:
            done = set(self.do("store", count).split())
            return done <= {Status.STORED, Status.EXISTS} and set(self.do("retrieve", count).split()) == {Status.HIT}

        until(stored, "stores and loads")

    def _serve_bystander(self) -> None:
        """Another engine is served while one is stopped."""
        out, into = self._bystander
        self.numbers += 1
        names = keys_of(self.numbers)
        assert until(lambda: out.store([(0, names, IDS)]).stored == OBJECTS, "stores of a bystander")
        assert into.retrieve([(0, names, IDS)]).hits == OBJECTS

    def _look(self, count: int) -> None:
        """All of it, once everybody is there again."""
        self._served()
        until(self._holds_nothing, lambda: f"free slots: {self._status().get('l1')}")
        assert self.do("check", 0) == "checked"
        self.numbers += 1
        self._until_served(self.numbers)
        self.copier = self._served()  # whose death the server has noticed by now
        for each in (count, self.numbers):
            names = keys_of(each)
            found = self._own.retrieve([(0, names, IDS)], verify="always")
            for name, status, seen in zip(names, found.statuses[0], objects_in(self._target), strict=True):
                assert status is not Status.HIT or seen == payload(name), f"wrong bytes under key {name.hex()}"

    def _holds_nothing(self) -> bool:
        usage = self._status().get("l1")
        if usage is None:
            return False
        held = sum(usage["leases_by_kind"].values())
        states = usage["objects_by_state"]
        return held == 0 and sum(states.values()) == states["ready"]


@pytest.fixture
def node(library: Path) -> Iterator[SteppedNode]:
    with temporary_directory() as folder:
        made = SteppedNode(Path(folder), library)
        try:
            yield made
        finally:
            made.close()


def sampled(count: int) -> Iterator[tuple[str, str, int, str, signal.Signals]]:
    """Any of them, so often."""
    chance = random.Random(35)
    for wish, at, of, number in chance.choices(CASES, k=count):
        yield wish, at, chance.randint(1, 6), of, number


@pytest.mark.timeout(7200 if HOW_MANY == "all" else 300 + 10 * int(HOW_MANY))
def test_no_death_and_no_stop_at_any_step_costs_a_byte_a_slot_or_an_answer(node: SteppedNode) -> None:
    if HOW_MANY == "all":
        for wish, at, of, number in CASES:
            step, missed = 1, 0
            while missed < 2:  # which steps there are depends on the threads, too
                missed = 0 if node.run(wish, at, step, of, number) else missed + 1
                step += 1
    else:
        for case in sampled(int(HOW_MANY)):
            node.run(*case)
    assert node.counts
    for what, count in sorted(node.counts.items()):
        print(f"{count:4} {what}")
    print(f"{node.counts.total():4} in all")
