"""`lmcache-core bench copy`: `store` and `retrieve` end to end, against the best plain copy of the same bytes.

The floor is one thread that copies the same objects, one by one, between the same buffers and the same slots of the
pool, with known addresses: by `memmove`, by numpy and by torch if they are installed; the best counts. Ours also pays
for keys, checks, leases and calls, and a store computes its checksums. `alone` is only our copy, the one call into C:
plain, with checksums, and with two threads against one. `inplace` fills slots itself and commits them; the cost of
checksums there is compared with that of one more bare read of the bytes. Batches are larger than the caches, buffers
are written before anything is timed, and the two sides take turns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.rounds import Rounds
from lmcache_bench.workers import ending_cleanly
from lmcache_core import Status
from lmcache_core.buffers import address_of
from lmcache_core.client import CopyThreads, tensor_of
from lmcache_core.errors import PoolError
from lmcache_core.limits import KEY_BYTES
from lmcache_core.native import native
from lmcache_core.pool.cores import usable_cores
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

GROUPS = ("store", "retrieve", "alone", "tensors", "first", "single", "inplace")
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "4 MiB": 4 * MIB, "16 MiB": 16 * MIB}
RATIO_MIN = {
    "store": {"64 KiB": 0.55, "1 MiB": 0.9, "4 MiB": 0.9, "16 MiB": 0.9},
    "retrieve": {"64 KiB": 0.85, "1 MiB": 0.95, "4 MiB": 0.95, "16 MiB": 0.95},
}
CHECKSUM_RATIO_MIN = 0.9
TWO_THREADS_RATIO_MIN = 1.5  # times one thread, if cores are free
FIRST_RATIO_MIN = 0.8
IN_PLACE_RATIO_MIN = 0.9  # with checksums ÷ without
BATCH_BYTES = 64 * MIB  # twice the last-level cache of the machines that this was written on
SETS = 2  # batches of sources and targets that alternate, so that none is still in a cache
REST_S = 0.005  # before each copy: torch's threads spin for some ms after one, and a time slice may be used up
SINGLE_OBJECTS = 4  # stored and retrieved alone in one round


class Pass(NamedTuple):
    """One batch: its keys and its buffers."""

    keys: list[bytes]
    buffers: Sequence[Any]  # what the client gets: memoryviews or tensors


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="only these groups of records")
    parser.add_argument("--copy-threads", type=threads_given, default="auto", help="of the client: auto, or a number")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="only objects of these sizes")


def threads_given(text: str) -> CopyThreads:
    """An option of `Client.connect`."""
    return "auto" if text == "auto" else int(text)


def run(options: Namespace, bench: Bench) -> None:
    """Whole batches, then the first store into a fresh pool, then single objects."""
    rounds, count = Rounds(quick=bench.quick), 4 if bench.quick else 21
    sizes = [size for size in SIZES if size in options.sizes]
    batched = [group for group in ("store", "retrieve", "alone") if group in options.only]
    tensors = "tensors" in options.only and find_spec("torch") is not None
    each_size = bool(batched) + tensors + ("single" in options.only) + ("inplace" in options.only)
    bench.steps(len(sizes) * each_size + ("first" in options.only))
    with ending_cleanly(), closing(_Buffers()) as buffers:
        with ServerProcess(2 * BATCH_BYTES) as server, server.client(copy_threads=options.copy_threads) as client:
            for size in sizes:
                if batched:
                    bench.step(f"batches of {size}")
                    _Batches(client, buffers, size).record(bench, batched, rounds.of(count))
            for size in sizes:
                if tensors:
                    bench.step(f"batches of {size}, tensors")
                    _Batches(client, buffers, size, tensors=True).record(bench, ("store", "retrieve"), rounds.of(count))
            for size in sizes:
                if "single" in options.only:
                    bench.step(f"single objects of {size}")
                    _single(client, buffers, size, bench, rounds.of(count * SINGLE_OBJECTS))
            for size in sizes:
                if "inplace" in options.only:
                    bench.step(f"slots of {size}, filled in place")
                    _in_place(client, buffers, size, bench, rounds.of(count))
        if "first" in options.only:
            bench.step("first store into a fresh pool")
            _first(buffers, bench, pools=rounds.of(1 if bench.quick else 7))


class _Buffers:
    """The caller's memory: written once, so that every page is populated."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SETS * BATCH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = (ctypes.c_char * (SETS * BATCH_BYTES)).from_buffer(self._memory)
        ctypes.memset(whole, 0xA5, SETS * BATCH_BYTES)
        del whole
        self._view = memoryview(self._memory)

    def batch(self, number: int, nbytes: int) -> list[memoryview]:
        """Buffers of objects of `nbytes`, a batch of them."""
        first = (number % SETS) * BATCH_BYTES
        return [self._view[at : at + nbytes] for at in range(first, first + BATCH_BYTES, nbytes)]

    def close(self) -> None:
        """Drop our own view; the memory is freed with the last one."""
        self._view.release()


class _Batches:
    """Batches of one size, stored and retrieved by the client and by bare copies."""

    def __init__(self, client: Client, buffers: _Buffers, size: str, *, tensors: bool = False) -> None:
        self.client = client
        self.size = size
        self.suffix = ", tensors" if tensors else ""
        self.layout = Layout("uint8", (SIZES[size],))
        self.namespace = Names(f"bench {size}", self.layout)
        batches = [buffers.batch(number, self.layout.nbytes) for number in range(SETS)]
        self.views = batches
        given: list[Sequence[Any]] = list(batches)
        if (
            tensors
        ):  # in torch's own memory, as an engine's are: memory that torch was lent is looked at before each copy
            import torch

            given = [[torch.full(self.layout.shape, 0xA5, dtype=torch.uint8) for _ in batch] for batch in batches]
        self._given = cycle(given)
        self.plain = _copies(self.layout)
        self.alone = _alone(self.layout.nbytes) if native is not None and not tensors else {}

    def record(self, bench: Bench, groups: Sequence[str], rounds: Iterable[bool]) -> None:
        """`store SIZE`, `retrieve SIZE` and `alone SIZE`, in GB/s."""
        ours: dict[str, list[float]] = {"store": [], "retrieve": []}
        alone = self.alone if "alone" in groups else {}
        names = [*self.plain, *alone]
        bare: dict[str, dict[str, list[float]]] = {group: {name: [] for name in names} for group in ours}
        for number, counts in enumerate(rounds):
            for name in names:
                for group, took_s in self._bare((self.plain | alone)[name], number).items():
                    if counts:
                        bare[group][name].append(took_s)
            keys = fresh_keys(BATCH_BYTES // self.layout.nbytes)
            times = {"store": self.store(keys), "retrieve": self.retrieve(keys)}
            if counts:
                for group, took_s in times.items():
                    ours[group].append(took_s)
            self.client.clear(self.namespace)
        best = {group: max(_rate(bare[group][name]) for name in self.plain) for group in ours}
        for group in (group for group in ours if group in groups):
            self._say(bench, f"{group} {self.size}{self.suffix}", ours[group], best[group], RATIO_MIN[group][self.size])
        if alone:
            size, one = f"alone {self.size}", bare["retrieve"]["one thread"]
            self._say(bench, size, one, best["retrieve"], RATIO_MIN["retrieve"][self.size])
            self._say(bench, f"{size}, checksums", bare["store"]["checksums"], best["store"], CHECKSUM_RATIO_MIN)
            if usable_cores() > 1:
                two = bare["retrieve"]["two threads"]
                self._say(bench, f"{size}, two threads of one", two, _rate(one), TWO_THREADS_RATIO_MIN)

    @staticmethod
    def _say(bench: Bench, name: str, times_s: Sequence[float], floor: float, target: float) -> None:
        bench.record(name, _rate(times_s), "GB/s", floor=floor, target=target, lower_is_better=False)

    def store(self, keys: Sequence[bytes]) -> float:
        """Seconds of one store; every key was stored."""
        sources = next(self._given)
        time.sleep(REST_S)
        began = time.perf_counter()
        result = self.client.store(keys, sources, namespace=self.namespace)
        took_s = time.perf_counter() - began
        _expect(result.statuses, Status.STORED)
        return took_s

    def retrieve(self, keys: Sequence[bytes]) -> float:
        """Seconds of one retrieve; every key was a hit."""
        into = next(self._given)
        time.sleep(REST_S)
        began = time.perf_counter()
        result = self.client.retrieve(keys, into, namespace=self.namespace)
        took_s = time.perf_counter() - began
        _expect(result.statuses, Status.HIT)
        return took_s

    def _bare(self, prepare: Copies, number: int) -> dict[str, float]:
        """Seconds of the same copies into slots of the pool, and out of them."""
        keys = fresh_keys(BATCH_BYTES // self.layout.nbytes)
        with self.client.prepare_store(keys, namespace=self.namespace) as lease:
            _expect(lease.statuses, Status.GRANTED)
            slots = [lease.view(position) for position in range(len(keys))]
            took_s = {
                "store": _rested(prepare(slots, self.views[number % SETS])),
                "retrieve": _rested(prepare(self.views[(number + 1) % SETS], slots)),
            }
            del slots
        return took_s


Copies = Callable[[Sequence[memoryview], Sequence[memoryview]], Callable[[], object]]


def _copies(layout: Layout) -> dict[str, Copies]:
    """Every plain copy that this interpreter has: each prepares targets and sources, and returns the function to
    time."""
    found: dict[str, Copies] = {"memmove": lambda targets, sources: _memmoves(targets, sources, layout.nbytes)}
    if find_spec("numpy") is not None:
        found["numpy"] = _numpy_copies
    if find_spec("torch") is not None:
        found["torch"] = lambda targets, sources: _torch_copies(targets, sources, layout)
    return found


def _memmoves(targets: Sequence[memoryview], sources: Sequence[memoryview], nbytes: int) -> Callable[[], None]:
    pairs = [(address_of(target), address_of(source)) for target, source in zip(targets, sources, strict=True)]
    memmove = ctypes.memmove

    def copy() -> None:
        for target, source in pairs:
            memmove(target, source, nbytes)

    return copy


def _numpy_copies(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> Callable[[], None]:
    import numpy as np

    arrays = [
        (np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        for target, source in zip(targets, sources, strict=True)
    ]
    copyto = np.copyto

    def copy() -> None:
        for target, source in arrays:
            copyto(target, source)

    return copy


def _torch_copies(targets: Sequence[memoryview], sources: Sequence[memoryview], layout: Layout) -> Callable[[], None]:
    tensors = [
        (tensor_of(target, layout), tensor_of(source, layout)) for target, source in zip(targets, sources, strict=True)
    ]

    def copy() -> None:
        for target, source in tensors:
            target.copy_(source)

    return copy


def _alone(nbytes: int) -> dict[str, Copies]:
    """Our own copy, in three variants."""

    def way(threads: int, checksums: bool) -> Copies:
        def prepare(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> Callable[[], object]:
            into, out_of = (array("Q", map(address_of, views)) for views in (targets, sources))
            return partial(native.copy_many, into, out_of, nbytes, threads, checksums)

        return prepare

    return {"one thread": way(1, False), "checksums": way(1, True), "two threads": way(2, False)}


# --- the first store, and single objects -----------------------------------------------------------------------


def _first(buffers: _Buffers, bench: Bench, pools: Iterable[bool]) -> None:
    """The speed of a worker's very first store, beside later ones into the same pool."""
    size = "1 MiB"
    first: list[float] = []
    warm: list[float] = []
    for _ in pools:
        with ServerProcess(2 * BATCH_BYTES) as server, server.client() as client:
            batches = _Batches(client, buffers, size)
            client.register_layout(batches.namespace)
            for number in range(4):
                keys = fresh_keys(BATCH_BYTES // batches.layout.nbytes)
                (warm if number else first).append(batches.store(keys))
                client.clear(batches.namespace)
    bench.record(
        f"first store {size}",
        _rate(first),
        "GB/s",
        floor=_rate(warm),
        target=FIRST_RATIO_MIN,
        lower_is_better=False,
    )


def _single(client: Client, buffers: _Buffers, size: str, bench: Bench, rounds: Iterable[bool]) -> None:
    """One object per call: two round trips for one copy. No target."""
    layout = Layout("uint8", (SIZES[size],))
    namespace = Names(f"bench {size}", layout)
    times_s: dict[str, list[float]] = {"store": [], "retrieve": [], "bare store": [], "bare retrieve": []}
    place = cycle([view for number in range(SETS) for view in buffers.batch(number, layout.nbytes)])
    for _ in rounds:
        keys = fresh_keys(2)
        with client.prepare_store(keys[1:], namespace=namespace) as lease:
            slot = lease.view(0)
            times_s["bare store"].append(_timed(_memmoves([slot], [next(place)], layout.nbytes)))
            times_s["bare retrieve"].append(_timed(_memmoves([next(place)], [slot], layout.nbytes)))
            del slot
        source, target = next(place), next(place)
        times_s["store"].append(_timed(lambda: client.store(keys[:1], [source], namespace=namespace)))  # noqa: B023
        times_s["retrieve"].append(_timed(lambda: client.retrieve(keys[:1], [target], namespace=namespace)))  # noqa: B023
        client.clear(namespace)
    for group in ("store", "retrieve"):
        rates = [layout.nbytes / median(times_s[name]) / 1e9 for name in (group, f"bare {group}")]
        bench.record(f"{group} one {size}", rates[0], "GB/s", floor=rates[1], lower_is_better=False)


# --- slots that the caller fills --------------------------------------------------------------------------------


def _in_place(client: Client, buffers: _Buffers, size: str, bench: Bench, rounds: Iterable[bool]) -> None:
    """`prepare_store`, plain copies into the slots and `commit`: without checksums, with those that `commit` computes,
    and with one bare read of all bytes instead."""
    layout = Layout("uint8", (SIZES[size],))
    namespace = Names(f"bench {size}", layout)
    batches = cycle([buffers.batch(number, layout.nbytes) for number in range(SETS)])
    ways: dict[str, list[float]] = {"": [], ", checksums": [], ", one more read": []}
    cpu: dict[str, list[float]] = {way: [] for way in ways}

    def fill(way: str, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        with client.prepare_store(keys, namespace=namespace) as lease:
            slots = [address_of(lease.view(position)) for position in range(len(keys))]
            for slot, source in zip(slots, sources, strict=True):
                ctypes.memmove(slot, address_of(source), layout.nbytes)
            if way == ", one more read":
                for slot in slots:
                    _read_pass(slot, layout.nbytes)
            _expect(lease.commit(checksums=way == ", checksums"), Status.STORED)

    for counts in rounds:
        for way, times_s in ways.items():
            time.sleep(REST_S)
            keys, sources, cpu_s = fresh_keys(BATCH_BYTES // layout.nbytes), next(batches), time.process_time()
            took_s = _timed(partial(fill, way, keys, sources))
            if counts:
                times_s.append(took_s)
                cpu[way].append(time.process_time() - cpu_s)
            client.clear(namespace)
    for way, times_s in ways.items():
        bench.record(
            f"in place {size}{way}",
            _rate(times_s),
            "GB/s",
            floor=_rate(ways[""]) if way else None,
            target=IN_PLACE_RATIO_MIN if way == ", checksums" else None,
            lower_is_better=False,
        )
    for way, times_s in cpu.items():
        floor = median(cpu[""]) / BATCH_BYTES * 1e9 if way else None
        bench.record(f"in place {size}{way}, CPU", median(times_s) / BATCH_BYTES * 1e9, "s/GB", floor=floor)


_memchr = ctypes.CDLL(None).memchr
_memchr.restype, _memchr.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def _read_pass(address: int, nbytes: int) -> None:
    """Read all these bytes at the speed of libc: none of them is 0."""
    if _memchr(address, 0, nbytes) is not None:
        raise PoolError("the bench has read something else than what it wrote")


def _rested(call: Callable[[], object]) -> float:
    time.sleep(REST_S)
    return _timed(call)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _rate(times_s: Sequence[float]) -> float:
    """GB/s of a batch."""
    return BATCH_BYTES / median(times_s) / 1e9


def _expect(statuses: Sequence[Status], wanted: Status) -> None:
    if statuses.count(wanted) != len(statuses):
        other = next(status for status in statuses if status is not wanted)
        raise PoolError(f"{len(statuses) - statuses.count(wanted)} of {len(statuses)} keys were not {wanted}: {other}")


def fresh_keys(count: int) -> list[bytes]:
    """Keys that no run has used before."""
    blob = os.urandom(count * KEY_BYTES)
    return [blob[at : at + KEY_BYTES] for at in range(0, len(blob), KEY_BYTES)]
