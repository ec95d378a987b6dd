"""`lmcache-core bench lookup`: the cost of finding hits, in a small index and in a very large one.

One call of the index for 512 keys is compared with 512 lookups in a Python dict of the same keys. In a large index each
key costs a cache miss or two in any implementation; there the floor is the bare loop in C over consecutive keys,
without Python objects. All variants take turns, and the median round counts.

Last comes the client: `lookup` through the index, and through a call to a server process.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from statistics import median
from typing import TYPE_CHECKING, Any

from lmcache_bench.workers import ending_cleanly
from lmcache_core import Client
from lmcache_core.errors import NotEnoughMemoryError, PoolError
from lmcache_core.limits import INDEX_ENTRY_BYTES, KEY_BYTES, PAGE_BYTES
from lmcache_core.native import native, why_not
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.room import check_room, room
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core._native import Index
    from lmcache_core.cli.bench.harness import Bench

BATCH_KEYS = 512
SMALL_ENTRIES = 1 << 14
LARGE_ENTRIES, QUICK_ENTRIES = 1 << 24, 1 << 20
TARGET_US = 8.0  # 512 hits, one call
TARGET_OF_DICT = 0.5
TARGET_OF_LOOP = 1.3  # for the large index
SAMPLE_KEYS = 1 << 20  # looked up in the large index: their cache lines exceed the caches
SLICES = 16
FILL_KEYS = 1 << 16  # published by one call
EPOCH, NAMESPACE, LAYOUT, SERVING = 1, 1, 1, 8
POOL_BYTES = 64 << 20
OBJECT = Layout("uint8", (PAGE_BYTES,))

Way = Callable[[], object]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--entries", type=int, default=0, help=f"of the large index (default: {LARGE_ENTRIES:,})")
    parser.add_argument("--seed", type=int, default=1, help="of the keys")


def run(options: argparse.Namespace, bench: Bench) -> None:
    """Record every row."""
    chance = random.Random(options.seed)
    bench.steps(3)
    bench.step("512 keys")
    if why_not:
        _record_dict_alone(bench, chance)
    else:
        _small(bench, chance)
        entries = options.entries or (QUICK_ENTRIES if bench.quick else LARGE_ENTRIES)
        bench.step(f"{entries:,} entries")
        _large(bench, chance, entries)
    bench.step("the client")
    _client(bench)


def _record_dict_alone(bench: Bench, chance: random.Random) -> None:
    keys = _split(chance.randbytes(BATCH_KEYS * KEY_BYTES))
    table = dict.fromkeys(keys, 1)
    seconds = _turns({"dict": lambda: [table.get(key) for key in keys]}, 200)["dict"]
    bench.record(f"512 lookups in a dict ({why_not})", seconds * 1e6, "us")


# --- the index alone ----------------------------------------------------------------------------------------


def _index(entries: int) -> tuple[Index, int]:
    """An empty index in shared memory of its own, and the offset of the one slot that all its objects share."""
    marks = -(-2 * entries // PAGE_BYTES) * PAGE_BYTES
    data_offset = -(-(PAGE_BYTES + marks + entries * INDEX_ENTRY_BYTES) // PAGE_BYTES) * PAGE_BYTES
    check_room(data_offset + PAGE_BYTES, room(Backing.MEMFD), what=f"an index of {entries:,} entries")
    memory = mmap.mmap(-1, data_offset + PAGE_BYTES)
    struct.pack_into("<Q", memory, SERVING, EPOCH)
    index = native.Index(
        memory,
        index_offset=PAGE_BYTES,
        entries=entries,
        data_offset=data_offset,
        segment_bytes=len(memory),
        serving_offset=SERVING,
    )
    return index, data_offset


def _publish(index: Index, offset: int, row: bytes) -> None:
    index._publish_row(NAMESPACE, LAYOUT, PAGE_BYTES, offset, 1, row)


def _split(row: bytes) -> list[bytes]:
    return [row[at : at + KEY_BYTES] for at in range(0, len(row), KEY_BYTES)]


def _small(bench: Bench, chance: random.Random) -> None:
    """Everything in the caches: the cost of the code itself."""
    index, offset = _index(SMALL_ENTRIES)
    with closing(index):
        row = chance.randbytes(BATCH_KEYS * KEY_BYTES)
        _publish(index, offset, row)
        others = chance.randbytes((SMALL_ENTRIES // 2 - BATCH_KEYS) * KEY_BYTES)
        _publish(index, offset, others)
        keys = _split(row)
        table = dict.fromkeys(keys + _split(others), 1)
        if index.find(EPOCH, NAMESPACE, LAYOUT, keys, True) != b"\1" * BATCH_KEYS:
            raise PoolError("not every key was found: measured nothing")
        ways: dict[str, Way] = {
            "list": lambda: index.find(EPOCH, NAMESPACE, LAYOUT, keys, True),
            "row": lambda: index.find(EPOCH, NAMESPACE, LAYOUT, row, True),
            "marks": lambda: index.find(EPOCH, NAMESPACE, LAYOUT, keys, True, True),
            "dict": lambda: [table.get(key) for key in keys],
        }
        times = _turns(ways, 200 if bench.quick else 2000)
        times["loop"] = median(index._find_row(NAMESPACE, LAYOUT, BATCH_KEYS, row)[1] for _ in range(200))
    us = {name: seconds * 1e6 for name, seconds in times.items()}
    bench.record("512 hits, one call", us["list"], "us", target=TARGET_US)
    bench.record("512 hits, one call: against a dict", us["list"], "us", floor=us["dict"], target=TARGET_OF_DICT)
    bench.record("512 hits, one call: against the loop in C", us["list"], "us", floor=us["loop"])
    bench.record("512 hits, one call: keys in a row", us["row"], "us", floor=us["dict"])
    bench.record("512 hits, one call: with marks", us["marks"], "us", floor=us["dict"])


def _large(bench: Bench, chance: random.Random, entries: int) -> None:
    """Half full, and every key of the sample is a cache miss."""
    try:
        index, offset = _index(entries)
    except NotEnoughMemoryError as error:
        bench.step(f"left out: {error}")
        return
    with closing(index):
        sample = bytearray()
        for first in range(0, entries // 2, FILL_KEYS):
            row = chance.randbytes(min(FILL_KEYS, entries // 2 - first) * KEY_BYTES)
            _publish(index, offset, row)
            sample += row[: max(1, SAMPLE_KEYS * len(row) // KEY_BYTES // (entries // 2)) * KEY_BYTES]
        loop_s, call_s = _through_the_sample(index, bytes(sample), 2 if bench.quick else 6)
    name = f"512 hits of {entries:,} entries, one call"
    bench.record(name, call_s * 1e6, "us", floor=loop_s * 1e6, target=TARGET_OF_LOOP)


def _through_the_sample(index: Index, row: bytes, passes: int) -> tuple[float, float]:
    """Seconds for 512 keys, by the loop in C and by calls. The two are always half a sample apart, so that neither
    finds in the caches what the other fetched. The keys of a call are new objects, as when they have just been derived
    from a prompt."""
    count = len(row) // KEY_BYTES // SLICES // BATCH_KEYS * BATCH_KEYS
    step = BATCH_KEYS * KEY_BYTES
    slices = [row[at * count * KEY_BYTES : (at + 1) * count * KEY_BYTES] for at in range(SLICES)]
    loop, calls = [], []
    for turn in range(passes * SLICES):
        hits, seconds = index._find_row(NAMESPACE, LAYOUT, BATCH_KEYS, slices[turn % SLICES])
        if hits < 0.999 * count:  # at half load one key in a million has no entry
            raise PoolError("not every key was found: measured nothing")
        loop.append(seconds * BATCH_KEYS / count)
        part, spent = slices[(turn + SLICES // 2) % SLICES], 0.0
        for at in range(0, len(part), step):
            keys = _split(part[at : at + step])
            began = time.perf_counter()
            index.find(EPOCH, NAMESPACE, LAYOUT, keys, False)
            spent += time.perf_counter() - began
        calls.append(spent * BATCH_KEYS / count)
    return median(loop[1:]), median(calls[1:])


# --- the client ---------------------------------------------------------------------------------------------


def _client(bench: Bench) -> None:
    namespace = Namespace("bench", OBJECT)
    keys = [os.urandom(KEY_BYTES) for _ in range(BATCH_KEYS)]
    objects = [bytes(PAGE_BYTES)] * BATCH_KEYS
    with ending_cleanly(), ExitStack() as stack:
        server = stack.enter_context(ServerProcess(POOL_BYTES))
        clients: dict[str, Any] = {
            way: stack.enter_context(
                Client.connect(server.name, runtime_dir=server.runtime_dir, use_index=way == "the index")
            )
            for way in (("a call",) if why_not else ("the index", "a call"))
        }
        clients["a call"].store(keys, objects, namespace=namespace)
        ways: dict[str, Way] = {}
        for way, client in clients.items():
            if client.lookup(keys, namespace=namespace).hits < BATCH_KEYS:
                raise PoolError("not every key was found: measured nothing")
            ways[way] = lambda client=client: client.lookup(keys, namespace=namespace)  # type: ignore[misc]
        times = _turns(ways, 50 if bench.quick else 500)
    for way, seconds in times.items():
        floor = times["a call"] * 1e6 if way != "a call" else None
        bench.record(f"client.lookup of 512 keys by {way}", seconds * 1e6, "us", floor=floor)


def _turns(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Median seconds of each variant; they take turns."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if turn >= 2:  # memory is warm
                spent[name].append(time.perf_counter() - began)
    return {name: median(each) for name, each in spent.items()}
