"""`lmcache-core bench backing`: a pool in memory, a pool on a disk's file, and a disk tier behind a pool in memory.

The same objects are stored, read while they are warm, and read after a restart of the server for which the files' part
of the page cache was dropped (`POSIX_FADV_DONTNEED`), which is as near to a reboot as a bench gets. A tier's objects
are loaded by a lookup that waits, and then copied out; both count. The floor is a read of the same bytes from a file
with the cache dropped (cold), and a copy between two buffers (all else). Figures are medians of the rounds.

Everything lies in `--folder`: name one on the disk that is to be measured.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lmcache_bench.copy import fresh_keys
from lmcache_bench.workers import ending_cleanly
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.embedded import embedded_server

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench
    from lmcache_core.server.server import Server

MIB = 1 << 20
OBJECT_BYTES = MIB
NAMES = Names("bench backing", Layout("uint8", (OBJECT_BYTES,)))
WAIT_S = 120.0
KINDS = ("memory", "file", "tier")


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured (default: temporary)")
    parser.add_argument("--objects", type=int, default=0, help="objects of 1 MiB (default: 256)")


def run(options: Namespace, bench: Bench) -> None:
    """Each kind of pool, in turns."""
    objects = options.objects or (64 if bench.quick else 256)
    rounds = 1 if bench.quick else 5
    bench.steps(rounds * len(KINDS))
    rows: dict[str, list[float]] = {}
    with ending_cleanly(), TemporaryDirectory(dir=options.folder) as folder:
        for number in range(rounds):
            for kind in KINDS:
                bench.step(f"round {number + 1}: {kind}")
                for name, seconds in _round(Path(folder) / f"{number}{kind}", kind, objects).items():
                    rows.setdefault(name, []).append(seconds)
    gb = objects * OBJECT_BYTES / 1e9
    floors = {"cold": gb / median(rows["floor: read"]), "copy": gb / median(rows["floor: copy"])}
    for name, of_rounds in rows.items():
        if not name.startswith("floor"):
            floor = floors["cold" if name.endswith("cold") else "copy"]
            bench.record(name, gb / median(of_rounds), "GB/s", floor=floor, lower_is_better=False)


def _round(folder: Path, kind: str, objects: int) -> dict[str, float]:
    """Seconds of each thing that was done."""
    folder.mkdir()
    keys, source = fresh_keys(objects), [bytearray(os.urandom(OBJECT_BYTES)) for _ in range(objects)]
    into = [bytearray(OBJECT_BYTES) for _ in range(objects)]
    name, took = f"bench-{uuid4().hex[:8]}", {}
    with _server(folder, name, kind, objects) as server, server.connect() as client:
        took[f"{kind}, store"] = _seconds(lambda: client.store(keys, source, namespace=NAMES))
        took[f"{kind}, retrieve warm"] = _seconds(lambda: _read(client, keys, into))
    _drop_cache(folder)
    if kind != "memory":
        with _server(folder, name, kind, objects) as server, server.connect() as client:
            took[f"{kind}, retrieve cold"] = _seconds(lambda: _load(client, keys, into, kind))
        if into != source:
            raise AssertionError("other bytes came back than were stored")
    took |= _floors(folder, source, into)
    return took


@contextmanager
def _server(folder: Path, name: str, kind: str, objects: int) -> Iterator[Server]:
    l1: dict[str, Any] = {"size_bytes": 2 * objects * OBJECT_BYTES, "watermark": 1.0}
    l1 |= {"backing": "file", "path": str(folder / "pool")} if kind == "file" else {"backing": "memfd"}
    tables: dict[str, Any] = {"name": name, "l1": l1}
    if kind == "tier":
        tables["l2"] = {"disk": {"type": "fs", "path": str(folder / "tier"), "capacity_bytes": "8GiB"}}
    with embedded_server(folder, **tables) as server:
        yield server


def _read(client: Client, keys: list[bytes], into: list[bytearray]) -> None:
    if client.retrieve(keys, into, namespace=NAMES).hits != len(keys):
        raise AssertionError("not everything is there")


def _load(client: Client, keys: list[bytes], into: list[bytearray], kind: str) -> None:
    if kind == "tier":
        client.lookup(keys, namespace=NAMES, wait_s=WAIT_S)
    _read(client, keys, into)


def _drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _floors(folder: Path, source: list[bytearray], into: list[bytearray]) -> dict[str, float]:
    path = folder / "plain"
    with path.open("wb") as file:
        for each in source:
            file.write(each)
    _drop_cache(folder)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            for each in into:
                file.readinto(each)

    def copy() -> None:
        for each, other in zip(into, source, strict=True):
            each[:] = other

    found = {"floor: read": _seconds(read), "floor: copy": _seconds(copy)}
    path.unlink()
    return found


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
