"""The ledger of the server's memory against the process: what it says is kept is what Python has allocated.

Measured by `tracemalloc`, and only what code of ours has allocated: the resident set has the allocator's slack and
grows by pages, so it would hide an error of half. 20 % is for tables, which grow in steps.
"""

from __future__ import annotations

import gc
import hashlib
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_core.kernel.memory import MemorySort
from lmcache_core.kernel.recount import recount
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode
from lmcache_core.protocol.unread import Backlog

from .desk import LAYOUT, NAMESPACE, Desk, Mouth

OURS = [tracemalloc.Filter(True, "*/lmcache_core/*"), tracemalloc.Filter(True, __file__)]
SLACK = 0.2
FRACTIONS = [
    f"{sort}_fraction{of}_max"
    for sort in ("promised", "read", "pinned")
    for of in ("", "_per_holder", "_per_session")
    if (sort, of) not in {("promised", "_per_holder"), ("read", "_per_holder")}
]
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(600)]
SPARE = [hashlib.sha256(b"spare %d" % number).digest() for number in range(2000)]  # more than the pool has room for
QUICK, LONG = 4_000, 1_000_000


class Deaf(Backlog):
    """A peer that reads nothing, as the lifeline keeps its frames."""

    def __init__(self, desk: Desk, holder: str) -> None:
        self._desk = desk
        self.unread = desk.server.parts.unread.open(holder)
        self.waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def ask(self, nbytes: int) -> None:
        frame = encode(m.Pong(1, bytes(nbytes)))
        if self._desk.server.parts.unread.keep(self, len(frame)):
            self.waiting.append((frame, ()))

    def read(self) -> None:
        if self.waiting:
            self._desk.server.parts.unread.sent(self, len(self.waiting.popleft()[0]))

    def drop(self) -> None:
        self.waiting.clear()


class Books:
    """A server with a full pool, and the two figures."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.worker = self.peer("worker", attached=True)
        for first in range(0, len(SPARE), 100):  # why these are not there is remembered then
            self.store(SPARE[first : first + 100])
        for first in range(0, len(KEYS), 100):
            self.store(KEYS[first : first + 100])
        self.deaf: list[Deaf] = []
        self._before = 0, 0
        self.begin()

    def say(self, peer: Mouth, request: m.Message) -> m.Message | None:
        server = self.desk.server
        server.parts.clock.now += 0.001
        server._tick()
        peer.replies.clear()
        server.dispatch.on_frame(peer, memoryview(encode(request)))
        reply = peer.replies[-1] if peer.replies else None
        peer.replies.clear()
        return reply

    def peer(self, origin: str, *, attached: bool = False) -> Mouth:
        peer = self.desk.peer(attached=attached)
        peer.replies.clear()
        return peer

    def store(self, keys: list[bytes]) -> None:
        granted = self.say(self.worker, m.PrepareStore(1, NAMESPACE, b"".join(keys)))
        self.say(self.worker, m.CommitStore(2, granted.lease, 0, len(keys)))

    def promise(self, peer: Mouth, keys: list[bytes]) -> int:
        reply = self.say(peer, m.LookupRequest(1, NAMESPACE, b"".join(keys), m.LookupOptions(hold=True, prefix=False)))
        return int(getattr(reply, "promise", 0))

    def read(self, keys: list[bytes]) -> int:
        return int(getattr(self.say(self.worker, m.PrepareRetrieve(1, NAMESPACE, b"".join(keys))), "lease", 0))

    def figures(self) -> tuple[int, int]:
        for _ in range(100):  # what ends is let go of in steps
            self.desk.server.parts.clock.now += 0.001
            self.desk.server._tick()
        gc.collect()
        found = tracemalloc.take_snapshot().filter_traces(OURS).statistics("filename")
        return sum(each.size for each in found), self.desk.server.parts.kernel.kept_memory_bytes

    def begin(self) -> None:
        self._before = self.figures()

    def grown(self) -> tuple[int, int]:
        """Since `begin`: of the process, and according to the ledger."""
        real, ledger = self.figures()
        return real - self._before[0], ledger - self._before[1]


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    tracemalloc.start(1)
    try:
        with ExitStack() as stack:
            yield Books(Desk(tmp_path, stack, holding=dict.fromkeys(FRACTIONS, 1.0)))
    finally:
        tracemalloc.stop()


def sessions(books: Books) -> None:
    books.peers = [books.peer("many") for _ in range(100)]  # type: ignore[attr-defined]


def namespaces(books: Books) -> None:
    books.peers = [books.peer("many") for _ in range(2)]  # type: ignore[attr-defined]
    books.begin()
    for peer in books.peers:  # type: ignore[attr-defined]
        for number in range(500):
            layout = LAYOUT.dtype, list(LAYOUT.shape), "", LAYOUT.fingerprint
            books.say(peer, m.RegisterLayout(3, 1000 + number, *layout))


def labels(books: Books) -> None:
    peer = books.peer("many")
    books.begin()
    for number in range(500):
        layout = LAYOUT.dtype, list(LAYOUT.shape), "", LAYOUT.fingerprint
        books.say(peer, m.RegisterLayout(3, 1000 + number, *layout, f"{number:080}"))


def narrow_promises(books: Books) -> None:
    peer = books.peer("one")
    for number in range(500):
        assert books.promise(peer, [KEYS[number]])


def wide_promises(books: Books) -> None:
    peer = books.peer("one")
    for _ in range(50):
        assert books.promise(peer, KEYS)


def promises_of_two(books: Books) -> None:
    for peer in (books.peer("one"), books.peer("two")):
        assert books.promise(peer, KEYS)


def promises_of_many(books: Books) -> None:
    peers = [books.peer("one") for _ in range(40)]
    books.begin()
    for peer in peers:
        assert books.promise(peer, KEYS)


def reads(books: Books) -> None:
    for number in range(500):
        assert books.read(KEYS[number : number + 16])


def settled(books: Books) -> None:
    for number in range(1000):
        lease = books.read(KEYS[number % 500 : number % 500 + 16])
        books.say(books.worker, m.FinishRead(2, lease, 0, 16))


def pins(books: Books) -> None:
    reply = books.say(books.worker, m.Pin(1, NAMESPACE, b"".join(KEYS), 3000.0))
    assert reply.statuses.count(0) > 200, reply


def unread(books: Books) -> None:
    deaf = Deaf(books.desk, "uid 5")
    books.deaf.append(deaf)
    for _ in range(1000):
        deaf.ask(200)


KINDS = [sessions, namespaces, labels, narrow_promises, wide_promises, promises_of_two, promises_of_many, reads,
         settled, pins, unread]  # fmt: skip


def assert_equal(real: int, ledger: int) -> None:
    assert abs(real - ledger) <= SLACK * max(real, ledger), f"the process has {real:,} bytes, the ledger {ledger:,}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_ledger_charges_what_each_kind_costs(books: Books, kind: Callable[[Books], None]) -> None:
    kind(books)
    real, ledger = books.grown()
    print(f"{kind.__name__}: {real:,} {ledger:,}")
    assert real > 10_000
    assert_equal(real, ledger)


class Dice:
    """Random operations of every kind, which leave much open when they end."""

    def __init__(self, books: Books, seed: int) -> None:
        self.books = books
        self.rng = random.Random(seed)
        self.peers: list[Mouth] = []
        self.promises: list[tuple[Mouth, int]] = []
        self.leases: list[tuple[str, int, int]] = []  # kind, id, keys
        self.number = 0
        books.deaf += [Deaf(books.desk, f"uid {number % 3}") for number in range(6)]
        self.steps = [
            self.open, self.goodbye, self.register, self.promise, self.promise, self.free, self.read, self.page,
            self.write, self.finish, self.finish, self.pin, self.unpin, self.ask, self.ask, self.listen,
            self.recount,
        ]  # fmt: skip

    def step(self) -> None:
        self.rng.choice(self.steps)()

    def keys(self, most: int) -> list[bytes]:
        first, count = self.rng.randrange(len(KEYS)), self.rng.randint(1, most)
        return KEYS[first : first + count]

    def some(self) -> Mouth:
        return self.rng.choice(self.peers) if self.peers else self.books.worker

    def open(self) -> None:
        if len(self.peers) < 60:
            self.peers.append(self.books.peer("many"))

    def goodbye(self) -> None:
        if len(self.peers) > 40:
            peer = self.peers.pop(self.rng.randrange(len(self.peers)))
            self.promises = [each for each in self.promises if each[0] is not peer]
            self.books.say(peer, m.EndSession(1, goodbye=True))

    def register(self) -> None:
        layout = LAYOUT.dtype, list(LAYOUT.shape), "", LAYOUT.fingerprint
        self.books.say(self.some(), m.RegisterLayout(3, self.rng.randrange(1000, 1200), *layout))

    def promise(self) -> None:
        peer = self.some()
        if len(self.promises) < 1000 and (found := self.books.promise(peer, self.keys(60))):
            self.promises.append((peer, found))

    def free(self) -> None:
        if len(self.promises) > 500:
            peer, promise = self.promises.pop(self.rng.randrange(len(self.promises)))
            self.books.say(peer, m.FreeLookupLocks(1, [promise]))

    def read(self) -> None:
        keys = self.keys(200)
        if len(self.leases) < 600 and (lease := self.books.read(keys)):
            self.leases.append(("read", lease, len(keys)))

    def page(self) -> None:
        """Another page of an open lease."""
        if self.leases and self.leases[-1][0] == "read":
            kind, lease, count = self.leases.pop()
            keys = self.keys(100)
            self.books.say(self.books.worker, m.PrepareRetrieve(1, NAMESPACE, b"".join(keys), lease))
            self.leases.append((kind, lease, count + len(keys)))

    def write(self) -> None:
        self.number += 1
        first = self.number * 4 % len(SPARE)
        keys = SPARE[first : first + 4]
        reply = self.books.say(self.books.worker, m.PrepareStore(1, NAMESPACE, b"".join(keys)))
        if lease := getattr(reply, "lease", 0):
            end = self.rng.choice([m.CommitStore, m.AbortStore])
            self.books.say(self.books.worker, end(2, lease, 0, 4))

    def finish(self) -> None:
        if len(self.leases) > 300:
            _, lease, count = self.leases.pop(self.rng.randrange(len(self.leases)))
            for first in range(0, count, BATCH_KEYS_MAX):
                most = min(count - first, BATCH_KEYS_MAX)
                self.books.say(self.books.worker, m.FinishRead(2, lease, first, most))

    def pin(self) -> None:
        self.books.say(self.some(), m.Pin(1, NAMESPACE, b"".join(self.keys(50)), self.rng.uniform(1000.0, 3000.0)))

    def unpin(self) -> None:
        self.books.say(self.some(), m.Unpin(1, NAMESPACE, b"".join(self.keys(100))))

    def ask(self) -> None:
        self.rng.choice(self.books.deaf).ask(self.rng.choice([10, 100, 1000]))

    def recount(self) -> None:
        if not self.rng.randrange(100):  # it takes a while
            recount(self.books.desk.server.parts.kernel)

    def listen(self) -> None:
        self.rng.choice(self.books.deaf).read()


@pytest.mark.parametrize("operations", [QUICK, pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_after_random_operations_the_ledger_is_what_the_process_holds(books: Books, operations: int) -> None:
    dice = Dice(books, seed=operations)
    for _ in range(operations):
        dice.step()
    real, ledger = books.grown()
    print(f"{operations:,} operations: {real:,} {ledger:,}")
    assert ledger > 1 << 20
    assert_equal(real, ledger)


def test_counting_anew_charges_nothing_twice_and_what_ends_is_free(books: Books) -> None:
    kernel = books.desk.server.parts.kernel
    peers = [books.peer("one"), books.peer("two")]
    for peer in peers:
        assert books.promise(peer, KEYS)
    pins(books)
    charged = [account.nbytes for account in kernel.memory.all]
    assert charged[MemorySort.HOLDS] > 10_000
    for _ in range(3):
        recount(kernel)
        assert [account.nbytes for account in kernel.memory.all] == charged
    for peer in peers:
        books.say(peer, m.EndSession(1, goodbye=True))
    books.say(books.worker, m.Unpin(1, NAMESPACE, b"".join(KEYS)))
    books.figures()
    assert kernel.memory.all[MemorySort.HOLDS].nbytes == 0
