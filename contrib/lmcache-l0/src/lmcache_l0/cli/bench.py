"""`lmcache-core bench l0`: the table's speed, and its peers, in one run.

Every figure is the minimum of several repeats (noise only adds), and figures that are divided by each other are taken
in turns. Read the ratios: each has its floor beside it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, process_time, process_time_ns
from typing import TYPE_CHECKING, Any

from lmcache_l0.cache import SharedCache
from lmcache_l0.cli import SUMMARY
from lmcache_l0.cli.peers import MissingPeerError, lmdb_get, manager_get, redis_get
from lmcache_l0.making import room_at
from lmcache_l0.sizing import GIB, plan_table

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

__all__ = ["SUMMARY", "add_options", "run"]

KEYS = 10_000
BATCH = 512
VALUE_BYTES = 64
ARRAY_FLOATS = 128
CHURNED_SLOTS = 50_000
SLICES = 20
SLOTS_LARGE = 10_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the table is, and how large the large one may be."""
    parser.add_argument("--folder", help="where the tables are made; without it /dev/shm, else a temporary folder")
    parser.add_argument("--hugetlbfs", help="a folder on one, with pages reserved: the large table once more, there")
    parser.add_argument("--server", action="store_true", help="only the feature server: requests a second and p99")
    parser.add_argument("--slots", type=int, default=SLOTS_LARGE, help="slots of the large table, if memory allows")


def run(options: argparse.Namespace, bench: Bench) -> None:
    """Measure everything, in a folder that is removed at the end."""
    parent = options.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    with tempfile.TemporaryDirectory(prefix="l0-bench-", dir=parent) as name:
        folder = Path(name)
        if options.server:
            from lmcache_l0.cli.bench_server import measure

            measure(bench, folder)
            return
        bench.steps(7)
        values = {f"feature:{i}": os.urandom(VALUE_BYTES) for i in range(KEYS)}
        with SharedCache(folder / "t.l0", hash_slots=KEYS * 2, max_value_size=1024, max_key_size=64) as cache:
            cache.set_many(values)
            bench.step("one key")
            _one_key(bench, cache, values, folder)
            bench.step("batches")
            _batches(bench, cache, values)
            bench.step("arrays")
            _arrays(bench, cache)
            bench.step("two processes")
            _two_readers(bench, cache)
            bench.step("peers across processes")
            _peers(bench, values, folder)
        bench.step("churn")
        _churn(bench, folder)
        bench.step("a large table")
        _large(bench, folder, 200_000 if bench.quick else options.slots, options.hugetlbfs)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _repeats(bench: Bench) -> int:
    return 5 if bench.quick else 15


def _loop_ns(body: str, names: dict[str, Any], number: int, repeats: int) -> float:
    """Nanoseconds for one run of `body`, without the loop around it."""
    return min(timeit.repeat(body, globals=names, number=number, repeat=repeats)) / number * 1e9


def _in_turns(bodies: dict[str, str], names: dict[str, Any], number: int, repeats: int) -> dict[str, float]:
    """`_loop_ns` for each body, in turns, so that a slow second of the machine affects all of them."""
    best = dict.fromkeys(bodies, float("inf"))
    timers = {label: timeit.Timer(body, globals=names) for label, body in bodies.items()}
    number = max(1, number // SLICES)  # short slices: some of them run undisturbed even on a busy machine
    for _ in range(repeats * SLICES):
        for label, timer in timers.items():
            best[label] = min(best[label], timer.timeit(number) / number * 1e9)
    return best


def _one_key(bench: Bench, cache: SharedCache, values: dict[str, bytes], folder: Path) -> None:
    key = random.choice(list(values))
    names: dict[str, Any] = {"c": cache.get, "s": cache.set, "d": values, "k": key, "v": values[key], "b": key.encode()}
    bodies = {"get": "c(k)", "dict": "d[k]", "set": "s(k, v)"}
    try:
        with lmdb_get(folder, values) as get:
            names["l"] = get
            found = _in_turns({**bodies, "lmdb": "l(b)"}, names, 100_000, _repeats(bench))
    except MissingPeerError as missing:
        print(f"bench l0: left out LMDB: there is no {missing}", file=sys.stderr)
        found = _in_turns(bodies, names, 100_000, _repeats(bench))
    bench.record("get, 64 bytes ÷ dict", found["get"], "ns", floor=found["dict"], target=5.0)
    if "lmdb" in found:
        bench.record("get, 64 bytes ÷ LMDB, open transaction", found["get"], "ns", floor=found["lmdb"], target=0.6)
    bench.record("set, 64 bytes", found["set"], "ns")


def _where_they_lie(cache: SharedCache, keys: list[str]) -> tuple[Any, Any]:
    """The table's memory as rows of one cache line, and the row of each key's value: a batch without the search is
    `lines.take(rows, 0, out)`."""
    import ctypes

    import numpy as np

    views = [np.asarray(cache.get_numpy(key, VALUE_BYTES, "u1")) for key in keys]
    addresses = np.array([view.ctypes.data for view in views])
    first = int(addresses.min())
    memory = (ctypes.c_uint8 * (int(addresses.max()) - first + VALUE_BYTES)).from_address(first)
    return np.frombuffer(memoryview(memory), np.uint8).reshape(-1, VALUE_BYTES), (addresses - first) // VALUE_BYTES


def _batches(bench: Bench, cache: SharedCache, values: dict[str, bytes]) -> None:
    import numpy as np

    keys = list(values)[:BATCH]
    out = np.empty((BATCH, VALUE_BYTES), np.uint8)
    lying, rows = _where_they_lie(cache, keys)
    names = {
        "many": cache.get_many,
        "into": cache.get_many_into,
        "keys": tuple(keys),
        "out": out,
        "d": values,
        "lying": lying,
        "rows": rows,
    }
    bodies = {
        "into": "into(keys, out)",
        "copy": "lying.take(rows, 0, out)",
        "list": "many(keys)",
        "dict": "[d[k] for k in keys]",
    }
    found = _in_turns(bodies, names, 300, _repeats(bench) * 3)
    assert b"".join(values[key] for key in keys) == out.tobytes()
    each = {label: ns / BATCH for label, ns in found.items()}
    bench.record("get_many_into, 512 keys, less the copy, a key", each["into"] - each["copy"], "ns", target=15.0)
    bench.record("get_many_into, 512 keys, a key", each["into"], "ns", floor=each["copy"])
    bench.record("get_many, 512 keys, as new bytes, a key", each["list"], "ns", floor=each["dict"])


def _arrays(bench: Bench, cache: SharedCache) -> None:
    import numpy as np

    array = np.random.default_rng(1).random(ARRAY_FLOATS, dtype=np.float32)
    cache.set_numpy("array", array)
    names = {
        "get": cache.get_numpy,
        "put": cache.set_numpy,
        "a": array,
        "f": np.float32,
        "n": ARRAY_FLOATS,
        "raw": array.tobytes(),
        "bare": np.frombuffer,
        "shape": (ARRAY_FLOATS,),
    }
    bodies = {
        "view": "get('array', shape, f)",
        "bare": "bare(raw, f)",
        "copy": "get('array', shape, f, snapshot=True)",
        "set": "put('array', a)",
    }
    found = _in_turns(bodies, names, 50_000, _repeats(bench))
    bench.record("get_numpy, 128 floats ÷ np.frombuffer", found["view"], "ns", floor=found["bare"], target=1.5)
    bench.record("get_numpy, snapshot", found["copy"], "ns", floor=found["bare"])
    bench.record("set_numpy, 128 floats", found["set"], "ns", target=150.0)


def _read(cache: SharedCache, keys: list[str], start: Any, results: Any, seconds: float) -> None:
    get, reads = cache.get, 0
    start.wait()
    begun, until = process_time(), perf_counter_ns() + int(seconds * 1e9)
    while perf_counter_ns() < until:
        for key in keys:
            get(key)
        reads += len(keys)
    # By CPU time: other processes take cores away, but the effect of the two readers on each other (lines that bounce
    # between caches) stays in the figure.
    results.put(reads / (process_time() - begun))


def _two_readers(bench: Bench, cache: SharedCache) -> None:
    context = multiprocessing.get_context("fork")
    keys = [key.decode() for key in list(cache)[:1000]]
    best = {1: 0.0, 2: 0.0}
    for _ in range(3 if bench.quick else 6):
        for count in (1, 2):
            start, results = context.Barrier(count), context.SimpleQueue()
            readers = [context.Process(target=_read, args=(cache, keys, start, results, 0.5)) for _ in range(count)]
            for reader in readers:
                reader.start()
            total = sum(results.get() for _ in readers)
            for reader in readers:
                reader.join()
            best[count] = max(best[count], total)
    target = 1.8 if _cores() >= 2 else None
    name = "two processes reading ÷ one, by core time"
    bench.record(name, best[2] / 1e6, "M gets/s", floor=best[1] / 1e6, target=target, lower_is_better=False)


def _peers(bench: Bench, values: dict[str, bytes], folder: Path) -> None:
    key = next(iter(values))
    for label, peer in (
        ("Redis, Unix socket, get", redis_get(folder, values)),
        ("Manager().dict(), get", manager_get(values)),
    ):
        try:
            with peer as get:
                found = _loop_ns("get(k)", {"get": get, "k": key}, 500, _repeats(bench))
        except MissingPeerError as missing:
            print(f"bench l0: left out {label}: there is no {missing}", file=sys.stderr)
            continue
        bench.record(label, found, "ns")


def _churn(bench: Bench, folder: Path) -> None:
    """A table at 60 %: new, after keys were replaced ten times over, and rehashed."""
    chance = random.Random(4)
    with SharedCache(folder / "churn.l0", hash_slots=CHURNED_SLOTS, max_value_size=8, max_key_size=16) as cache:
        keys = [b"%d" % i for i in range(CHURNED_SLOTS * 6 // 10)]
        cache.set_many([(key, b"") for key in keys])
        new = cache.stats.found_probes_mean
        for i in range(10 * len(keys)):
            at = chance.randrange(len(keys))
            cache.delete(keys[at])
            keys[at] = b"n%d" % i
            cache.set(keys[at], b"")
        churned = cache.stats.found_probes_mean
        begun = process_time_ns()
        moved = cache.rehash()
        took_ns = process_time_ns() - begun
        bench.record("slots looked at, 60%, after churn", churned, "slots", floor=new)
        rehashed = cache.stats.found_probes_mean
    bench.record("slots looked at, 60%, after churn and a rehash", rehashed, "slots", floor=new, target=1.15 * new)
    bench.record("rehash, a key moved", took_ns / max(moved, 1), "ns")


def _large(bench: Bench, folder: Path, slots: int, hugetlbfs: str | None) -> None:
    """As many slots as requested, or as memory allows; filled to 70 %; read in random order, then again."""
    available_bytes, _ = room_at(folder / "large.l0")
    sizes: dict[str, Any] = {"max_value_size": VALUE_BYTES, "max_key_size": 16}
    plan = plan_table(hash_slots=slots, **sizes)
    if plan.file_bytes > available_bytes // 2:
        plan = plan_table(size_gb=available_bytes / 2 / GIB, **sizes)
    keys = int(plan.hash_slots * 0.69)
    with SharedCache(folder / "large.l0", hash_slots=plan.hash_slots, **sizes) as cache:
        filled_ns = _filled_ns(cache, keys)
        dice = random.Random(3)
        gc.collect()
        cold, cold_rows = _cold_ns(cache, keys, dice)
        batches = [tuple(b"%d" % dice.randrange(keys) for _ in range(BATCH))]
        hot = min(_pass_ns(cache.get_many, batches) for _ in range(50))
        single = list(batches[0][:40])
        singles = min(_each_ns(cache.get, single) for _ in range(20))
        found = cache.stats
        with SharedCache(folder / "large.l0", huge_pages=True) as huge:
            _, rows_huge = _cold_ns(huge, keys, dice)
            on_huge = _huge_bytes(folder / "large.l0")
        cache.unlink()
    rows_reserved = 0.0
    if hugetlbfs is not None:
        with tempfile.TemporaryDirectory(prefix="l0-bench-", dir=hugetlbfs) as name:
            with SharedCache(Path(name) / "large.l0", hash_slots=plan.hash_slots, **sizes) as reserved:
                _filled_ns(reserved, keys)
                _, rows_reserved = _cold_ns(reserved, keys, dice)
    size = f"{found.hash_slots / 1e6:.3g} M slots at {found.load:.0%}"
    bench.record(f"{size}: set_many into fresh memory, a key", filled_ns / keys, "ns")
    bench.record(f"{size}: get_many_into, random keys, cold, a key", cold_rows, "ns", target=250.0)
    share = f"{on_huge / plan.file_bytes:.0%} of it on huge pages"
    bench.record(f"{size}: the same, {share}, a key", rows_huge, "ns", floor=cold_rows)
    if rows_reserved:
        bench.record(f"{size}: the same, on a hugetlbfs, a key", rows_reserved, "ns", floor=cold_rows)
    bench.record(f"{size}: get_many, random keys, cold, a key", cold, "ns", floor=hot)
    bench.record(f"{size}: get_many, the same 512 again, a key", hot, "ns")
    bench.record(f"{size}: get, a few keys again", singles, "ns")
    bench.record(f"{size}: slots looked at, found", found.found_probes_mean, "slots")
    bench.record(f"{size}: slots looked at, missed", found.miss_probes_mean, "slots")


def _filled_ns(cache: SharedCache, keys: int) -> int:
    """Store so many keys. This can be done only once, without a best of several, so CPU time is measured."""
    value = os.urandom(VALUE_BYTES)
    filled_ns = 0
    for start in range(0, keys, 100_000):
        items = [(b"%d" % i, value) for i in range(start, min(start + 100_000, keys))]
        begun = process_time_ns()
        cache.set_many(items)
        filled_ns += process_time_ns() - begun
    return filled_ns


def _cold_ns(cache: SharedCache, keys: int, dice: random.Random) -> tuple[float, float]:
    """The time of a key in a batch of cold keys, as new bytes and into rows; CPU time, the best of several turns. The
    first turn maps what a new handle has not touched yet."""
    import numpy as np

    out: Any = np.empty((BATCH, VALUE_BYTES), np.uint8)
    reads: list[Callable[[Any], Any]] = [cache.get_many, lambda batch: cache.get_many_into(batch, out)]
    best = [float("inf")] * 2
    for _ in range(6):
        for i, read in enumerate(reads):
            batches = [tuple(b"%d" % dice.randrange(keys) for _ in range(BATCH)) for _ in range(40)]
            begun = process_time_ns()
            for batch in batches:
                read(batch)
            best[i] = min(best[i], (process_time_ns() - begun) / len(batches) / BATCH)
    return best[0], best[1]


def _huge_bytes(path: Path) -> int:
    """How much of the file this process has mapped with huge pages, after touching it."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return 0
    kib, inside = 0, False
    for line in smaps.read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            inside = fields[-1] == str(path)
        elif inside and fields[0] == "ShmemPmdMapped:":
            kib += int(fields[1])
    return kib << 10


def _pass_ns(get_many: Callable[[Any], Any], batches: list[tuple[bytes, ...]]) -> float:
    begun = perf_counter_ns()
    for batch in batches:
        get_many(batch)
    return (perf_counter_ns() - begun) / len(batches) / BATCH


def _each_ns(get: Callable[[bytes], Any], keys: list[bytes]) -> float:
    begun = perf_counter_ns()
    for key in keys:
        get(key)
    return (perf_counter_ns() - begun) / len(keys)
