"""A zygote: forks servers and engines whose every message and copy can be stopped (steps.c), for tests that kill them
there by the hundred.

Run as a script with `steps.c` preloaded. `server NAME RUN` and `engine NAME RUN SAYS HEARS` fork a child and answer its
pid. An engine takes one operation a line from a FIFO, and answers with one into another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from array import array
from pathlib import Path
from typing import Any

from lmcache_copier.pages import ServerPages
from lmcache_core import Client, Layout, Namespace, PageGroup, Region, Status, limits
from lmcache_core.errors import CacheError, DisconnectedError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.extensions import helper_processes
from lmcache_core.settings.compose import make_settings

ENGINE, COPIER, SERVER = 1, 2, 3
ROLES = {"engine": ENGINE, "copier": COPIER, "server": SERVER}
PAGE_BYTES, PER_OBJECT, REGIONS, OBJECTS = 128 << 10, 2, 2, 3
OBJECT_BYTES = PAGE_BYTES * PER_OBJECT * REGIONS  # one system call each
PAGES = PER_OBJECT * OBJECTS
IDS = array("q", [5, 0, 3, 1, 2, 4])
POOL_BYTES = 48 << 20
NAMESPACE = Namespace("stepped", Layout("uint8", (OBJECT_BYTES,)))
CANCEL = "cancel\n"
_LOOK_S = 0.01
AFTER_STORE, BEFORE_LOAD, AFTER_LOAD = b"\xee", b"\xa5", b"\x5a"


def keys_of(number: int) -> list[bytes]:
    """Of one store."""
    return [(number * OBJECTS + at).to_bytes(32, "big") for at in range(OBJECTS)]


def payload(name: bytes) -> bytes:
    """Says of every 32 bytes whose they are."""
    return name * (OBJECT_BYTES // len(name))


def group_on(buffer: Any) -> PageGroup:
    """The pages of an engine."""
    span = PAGES * PAGE_BYTES
    return PageGroup(NAMESPACE, [Region(buffer, at * span, PAGE_BYTES, PAGE_BYTES, PAGES) for at in range(REGIONS)], 2)


class Engine:
    """Stores and loads, and looks at its memory before and after."""

    def __init__(self, client: Client, questions: int) -> None:
        """`questions`: where a test asks for operations, and for the end of the one under way."""
        self._client = client
        self._questions = questions
        self.source, self.target = (bytearray(REGIONS * PAGES * PAGE_BYTES) for _ in range(2))
        self._out, self._into, self._extra = (self._pages(each) for each in (self.source, self.target, self.source))
        self.faults: list[str] = []
        self._give_target(AFTER_LOAD)

    def _pages(self, buffer: bytearray) -> ServerPages:
        return ServerPages(self._client, self._client.register_pages([group_on(buffer)]))

    def _places(self, at: int) -> list[slice]:
        """Of one object's pages, in the order in which they are in it."""
        ids = IDS[at * PER_OBJECT : (at + 1) * PER_OBJECT]
        starts = [(region * PAGES + page) * PAGE_BYTES for region in range(REGIONS) for page in ids]
        return [slice(start, start + PAGE_BYTES) for start in starts]

    def _give_target(self, content: bytes) -> None:
        self.target[:] = content * len(self.target)

    def check(self, number: int, deadline_s: float | None) -> str:
        """Nobody writes to pages of a load that is over."""
        del number, deadline_s
        if self.target.count(AFTER_LOAD) != len(self.target):
            self.faults.append("pages were written after their load was over")
        return "checked"

    # --- what a test asks for -----------------------------------------------------------------------------------

    def register(self, number: int, deadline_s: float | None) -> str:
        """Memory, anew."""
        del number, deadline_s
        self._extra = self._pages(self.source)
        self._extra.registration()
        return "registered"

    def unregister(self, number: int, deadline_s: float | None) -> str:
        """What `register` has registered, which is there otherwise."""
        del number, deadline_s
        self._extra.close()
        return "unregistered"

    def store(self, number: int, deadline_s: float | None) -> str:
        """Under the keys of that number."""
        self._fill(keys_of(number))
        result = self._out.store([(0, keys_of(number), IDS)], deadline_s=deadline_s)
        self.source[:] = AFTER_STORE * len(self.source)
        return " ".join(result.statuses[0])

    def cancel_store(self, number: int, deadline_s: float | None) -> str:
        """The same, and cancels when asked to."""
        self._fill(keys_of(number))
        job = self._out.store_start([(0, keys_of(number), IDS)], deadline_s=deadline_s, reads=False)
        result = self._ended(job)
        self.source[:] = AFTER_STORE * len(self.source)
        return " ".join(result.statuses[0])

    def retrieve(self, number: int, deadline_s: float | None) -> str:
        """What is stored under the keys of that number."""
        self._give_target(BEFORE_LOAD)
        return self._loaded(number, self._into.retrieve([(0, keys_of(number), IDS)], deadline_s=deadline_s))

    def cancel_retrieve(self, number: int, deadline_s: float | None) -> str:
        """The same, and cancels when asked to."""
        self._give_target(BEFORE_LOAD)
        return self._loaded(
            number, self._ended(self._into.retrieve_start([(0, keys_of(number), IDS)], deadline_s=deadline_s))
        )

    def _ended(self, job: Any) -> Any:
        while not job.wait(_LOOK_S):
            if select.select([self._questions], [], [], 0)[0]:
                assert os.read(self._questions, 4096).decode() == CANCEL
                job.cancel()
        return job.result

    def _fill(self, names: list[bytes]) -> None:
        for at, name in enumerate(names):
            content = payload(name)
            for piece, place in enumerate(self._places(at)):
                self.source[place] = content[piece * PAGE_BYTES : (piece + 1) * PAGE_BYTES]

    def _loaded(self, number: int, result: Any) -> str:
        untrusted = set(result.untrusted[0])
        for at, (name, status) in enumerate(zip(keys_of(number), result.statuses[0], strict=True)):
            seen = b"".join(self.target[place] for place in self._places(at))
            if status is Status.HIT and seen != payload(name):
                self.faults.append(f"wrong bytes under key {name.hex()}")
            pages = set(IDS[at * PER_OBJECT : (at + 1) * PER_OBJECT])
            if status is not Status.HIT and not untrusted & pages and seen.count(BEFORE_LOAD) != len(seen):
                self.faults.append(f"a page of a {status} was written, and is trusted")
        self._give_target(AFTER_LOAD)
        return " ".join(result.statuses[0])

    def answer(self, line: str) -> str:
        """One line for one line."""
        wish, number, deadline_s = json.loads(line)
        try:
            done = getattr(self, wish)(number, deadline_s)
        except DisconnectedError:
            done = "no copier"  # of a registration
        except CacheError as error:
            done = f"{type(error).__name__}: {error}"
            self.faults.append(f"{wish}: {done}")
        faults, self.faults = self.faults, []
        return json.dumps([done, faults])


def serve(name: str, run: Path) -> None:
    """A server whose copier can be stopped, too, and comes again at once however often it is killed."""
    from lmcache_core.server.server import Server

    helper_processes.PASSED_ON |= {"LD_PRELOAD", "STEPS", "STEPS_ROLE"}
    limits.HELPER_PAUSE_S = limits.HELPER_PAUSE_S_MAX = 0.01
    os.environ["STEPS_ROLE"] = str(COPIER)
    tables: dict[str, Any] = {"l1": {"size_bytes": POOL_BYTES}, "copier": {}}
    settings = make_settings(load_plugins(), name=name, runtime_dir=str(run), state_dir=str(run / "state"), **tables)
    Server(settings, load_plugins()).run()


def engine(name: str, run: Path, hears: str, says: str) -> None:
    """Until nobody asks any more."""
    questions, answers = os.open(hears, os.O_RDONLY), os.open(says, os.O_WRONLY)
    made = Engine(Client.connect(name, runtime_dir=run, client_name="engine"), questions)
    while lines := os.read(questions, 4096):
        line = lines.decode().removeprefix(CANCEL)  # of a job that had ended
        if line:
            os.write(answers, made.answer(line).encode())


def main() -> None:
    """Fork until the input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    with contextlib.suppress(CacheError):  # what is imported late is imported now
        Client.connect("nobody", runtime_dir="/nonexistent").status()
    for line in sys.stdin:
        wish, *arguments = line.split()
        child = os.fork()
        if child == 0:
            libc.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            os.dup2(2, 1)
            libc.steps_attach(os.environ["STEPS"].encode(), ROLES[wish])
            {"server": serve, "engine": engine}[wish](arguments[0], Path(arguments[1]), *arguments[2:])
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
