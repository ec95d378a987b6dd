"""An interrupt at every place where the interpreter may raise one: nothing is sent twice, and nothing is left behind.

The interpreter looks for interrupts where a function begins, a loop goes back, and a call into C has ended.
"""

from __future__ import annotations

import dis
import gc
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link.channel import Channel
from lmcache_core.client.link.connection import Connection, LifelineConnection, ZmqConnection
from lmcache_core.limits import HUGE_PAGE_BYTES
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.mapping import Mapping
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import read_request
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_core.trust import Trust
from lmcache_testing.waiting import WAIT_S, until

NBYTES = 4096
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]
BUDGET_S = 4.0  # for each test: a machine that is not busy comes to every place


class AtChecks:
    """Raises at the n-th check of these files of the library in this thread; 0: never."""

    def __init__(self, at: int, *files: str) -> None:
        self.checks = 0
        self.where = ""
        self._at = at
        self._files = tuple(f"{os.sep}lmcache_core{os.sep}{file.replace('/', os.sep)}.py" for file in files)
        self._names: dict[CodeType, dict[int, str]] = {}
        self._before = ""  # the instruction before this one, if it is of the same function, and nothing else ran since

    def __enter__(self) -> AtChecks:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> object:
        self._before = ""
        # What is raised in a finalizer goes nowhere, and `__exit__` is entered without a look in between.
        if not frame.f_code.co_filename.endswith(self._files) or frame.f_code.co_name in ("__del__", "_unmap"):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "opcode":
            code = frame.f_code
            if code not in self._names:
                self._names[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
            now, before = self._names[code][frame.f_lasti], self._before
            self._before = now
            if now == "RESUME" or before.startswith(("CALL", "JUMP_BACKWARD")):
                self.checks += 1
                if self.checks == self._at:
                    self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        else:  # a return: of Python code, after which nobody looks
            self._before = ""
        return self._opcode


def at_every_check(do: Callable[[AtChecks], None], *files: str) -> Iterator[AtChecks]:
    """Do it once for each check, interrupted there; all of them, as far as the budget goes, in some order."""
    with AtChecks(0, *files) as all_of_it:
        do(all_of_it)
    assert all_of_it.checks > 1
    order = list(range(1, all_of_it.checks + 1))
    random.Random(1).shuffle(order)
    until_s = time.monotonic() + BUDGET_S
    for at in order:
        if time.monotonic() > until_s:
            break
        checks = AtChecks(at, *files)
        with suppress(KeyboardInterrupt), checks:
            do(checks)
        yield checks


@pytest.fixture
def server(start: Callable[..., Server], tmp_path: Path) -> Server:
    pytest.importorskip("lmcache_fs")
    return start(l1={"size_bytes": 4 << 20}, drain_s=0.1, l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}})


# --- what was to be sent later ----------------------------------------------------------------------------------


def lifeline_pair(folder: Path) -> tuple[Connection, Callable[[], bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(WAIT_S)
    return LifelineConnection(ours), lambda: theirs.recv(1 << 16)


def zmq_pair(folder: Path) -> tuple[Connection, Callable[[], bytes]]:
    zmq = pytest.importorskip("zmq")
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    router.bind(f"ipc://{folder}/zmq")
    (folder / "zmq").chmod(0o600)
    connection = ZmqConnection(f"ipc://{folder}/zmq", None, Trust.of_client())
    return connection, lambda: router.recv_multipart()[-1]


@pytest.mark.parametrize("pair", [lifeline_pair, zmq_pair], ids=["lifeline", "zmq"])
def test_a_frame_that_waited_is_sent_once_wherever_an_interrupt_comes(
    tmp_path: Path, pair: Callable[[Path], tuple[Connection, Callable[[], bytes]]]
) -> None:
    """A held lookup that is sent twice is answered twice, and nobody hears of the second promise."""
    connection, received = pair(tmp_path)
    channel = Channel(connection, lambda notice: None)
    interrupted = 0
    for checks in at_every_check(lambda _: channel.post(m.Noop(0)), "client/link/channel", "client/link/connection"):
        interrupted += bool(checks.where)
        channel.post(m.Ping(0, b"last"))  # whatever was left goes before it
        rids: list[int] = []
        while not isinstance(request := read_request(memoryview(received())), m.Ping):
            rids.append(request.rid)
        assert len(set(rids)) == len(rids), f"sent twice, as it was interrupted at {checks.where}"
    assert interrupted
    channel.close()


# --- promises of queries ----------------------------------------------------------------------------------------


def promises(watcher: Client) -> int:
    return int(watcher.status()["l1"]["leases_by_kind"]["promise"])


def test_wherever_an_interrupt_comes_a_query_of_loads_tells_of_its_promise_or_leaves_none(server: Server) -> None:
    """The lookup found nothing at first, so the first query after its loads makes the promise."""
    with server.connect(maps_pool=False) as watcher, server.connect(use_index=False) as client:
        assert client.store(KEYS, [bytes(NBYTES)] * len(KEYS), namespace=SPACE).stored == len(KEYS)
        until(lambda: watcher.status()["tiers"]["tiers"][0]["objects"] == len(KEYS), "the objects on the disk")
        told: list[int] = []

        def loaded() -> int:
            client.clear(SPACE)
            job = client.lookup(KEYS, namespace=SPACE, hold=True).job
            until(lambda: client.lookup(KEYS, namespace=SPACE, tiers=[]).hits == len(KEYS), "the loads")
            until(lambda: not watcher.status()["lookups_waiting"], "the end of the lookup")
            return job

        def query(checks: AtChecks) -> None:
            told.append(client.query_prefetch_status(jobs[-1]).promise)

        jobs, interrupted = [loaded()], 0
        for checks in at_every_check(query, "client/client", "client/find/lookups", "client/link/channel"):
            client.free_lookup_locks(told)  # of the one before
            interrupted += bool(checks.where)
            client.noop()
            told.clear()
            assert promises(watcher) == 0, f"nobody was told of a promise: interrupted at {checks.where}"
            query(checks)  # again: it is as if it had not been asked
            assert promises(watcher) == 1
            client.free_lookup_locks(told)
            told.clear()
            jobs.append(loaded())
        assert interrupted


# --- what is checked, and what is mapped ------------------------------------------------------------------------


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_wherever_an_interrupt_comes_the_walk_to_a_directory_leaves_no_descriptor(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (tmp_path / "a" / "near").symlink_to("b")
    (tmp_path / "far").symlink_to(tmp_path / "a")
    trust = Trust.of_client()

    def walk(checks: AtChecks) -> None:
        trust.open_directory(tmp_path / "far" / "near" / "c").close()

    walk(AtChecks(0))
    before = descriptors()
    for checks in at_every_check(walk, "trust", "descriptors"):
        assert descriptors() == before, f"a descriptor is left of a walk interrupted at {checks.where}"


def address_space() -> int:
    """Bytes that this process has asked for."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_wherever_an_interrupt_comes_the_mapping_of_a_pool_leaves_no_addresses() -> None:
    nbytes = 256 << 20
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, nbytes)

    def map_it(checks: AtChecks) -> None:
        mapping = Mapping(fd, nbytes)
        assert mapping.address % HUGE_PAGE_BYTES == 0
        mapping.array[nbytes - 1] = 1

    map_it(AtChecks(0))
    before = address_space()
    for checks in at_every_check(map_it, "pool/mapping"):
        assert "mapped" not in Path("/proc/self/maps").read_text(), f"mapped still: interrupted at {checks.where}"
        assert address_space() < before + nbytes // 2, f"reserved still: interrupted at {checks.where}"
    os.close(fd)


# --- descriptors ------------------------------------------------------------------------------------------------


def open_pools(server: Server) -> int:
    """How many descriptors of this process lead to the server's pool."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += server.parts.settings.name in str(entry.readlink())
    return found


def test_wherever_an_interrupt_comes_a_link_in_the_making_leaves_no_descriptor_of_the_pool(
    server: Server, tmp_path: Path
) -> None:
    with server.connect(maps_pool=False) as watcher:
        before = open_pools(server)

        def connect(checks: AtChecks) -> None:
            with Client.connect(server.parts.settings.name, runtime_dir=tmp_path / "run") as client:
                client.noop()
                sys.settrace(None)

        files = ("client/link/connection", "client/link/handshake", "client/link/link", "pool/segment", "pool/lifelock",
                 "pool/backing", "pool/atfork", "pool/making")  # fmt: skip
        for checks in at_every_check(connect, *files):
            until_s = time.monotonic() + WAIT_S
            while open_pools(server) != before:
                watcher.noop()  # the server has sent, and closed, what it had opened for it
                gc.collect()  # frames of the interrupted call may hold one another
                assert time.monotonic() < until_s, f"a descriptor is left of a link interrupted at {checks.where}"
