"""How soon a restarted server serves hits from its predecessor's pool.

A first process fills a pool with objects of 4 KiB, each with its slot, its entry in the index and its bytes, and is
killed. Then a second one, with all imports done, is told to start. The clock runs from that process's call of
`Server(…)` (locks, header, validation of tables and index in C, kernel, sockets) until a new client in a third process,
which connects and maps the pool once the server says that it serves, has the bytes of an object. It does not include
starting Python and its imports, or the pause before a client that lost its server reconnects.

While the objects are made in the background, another client sends requests all the time: its longest call is the most
that a turn of the loop costs others, including the noise of a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from lmcache_core import Client
from lmcache_core.cli.bench.harness import Bench
from lmcache_core.clock import Clock
from lmcache_core.errors import CacheError
from lmcache_core.pool.backing import Access, segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.settings.compose import make_settings
from lmcache_core.settings.model import Settings
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.processes import temporary_directory

OBJECTS, OBJECTS_QUICK = 1_000_000, 100_000
NAMESPACE = Namespace("bench-restart", Layout("uint8", (4096,)))
TARGET_S = 1.5
PAGE_KEYS = 512
WAIT_S = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--objects", type=int, default=0, help=f"objects in the pool (default: {OBJECTS:,})")


def run(options: argparse.Namespace, bench: Bench) -> None:
    """Fill, kill, adopt, and measure."""
    objects = options.objects or (OBJECTS_QUICK if bench.quick else OBJECTS)
    bench.steps(2)
    name = f"bench-{uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(temporary_directory()))
        stack.callback(segment_path(name).unlink, missing_ok=True)
        bench.step(f"filling a pool with {objects:,} objects")
        with _child("fill", name, directory, objects) as filler:
            _line_from(filler, "filled")
        bench.step("adopting it")
        with _child("serve", name, directory, objects) as server:
            _line_from(server, "imported")
            first_s, longest_s, report = _measure(server, name, directory, objects)
    adopted = f"{objects:,} objects adopted"
    bench.record(f"{adopted}, first hit", first_s, "s", target=TARGET_S)
    bench.record("of that, tables and index read and checked", report["read_s"], "s")
    bench.record("until all objects are made in the background", report["made_s"], "s")
    bench.record("longest step of that on the loop (CPU time)", report["longest_step_s"] * 1e3, "ms")
    bench.record("longest call of another client meanwhile", longest_s * 1e3, "ms")


def _measure(server: subprocess.Popen[str], name: str, directory: Path, objects: int) -> tuple[float, float, Any]:
    with Client.connect(name, runtime_dir=directory) as client, Client.connect(name, runtime_dir=directory) as other:
        key, into = _key(objects // 2), bytearray(4096)
        assert server.stdin is not None
        print("go", file=server.stdin, flush=True)
        began_s = float(_line_from(server, "began").split()[1])
        _line_from(server, "ready")
        _until(lambda: client.retrieve([key], [into], namespace=NAMESPACE).hits)
        first_s = time.monotonic() - began_s
        if bytes(into) != _content(key):
            raise AssertionError("the first hit has the wrong bytes")
        longest_s, report = 0.0, _adopted(other)
        while report["made_s"] is None:
            for _ in range(20):
                sent_s = time.monotonic()
                other.ping()
                longest_s = max(longest_s, time.monotonic() - sent_s)
            report = _adopted(other)
        if report["objects"] != objects or any(report["dropped"].values()):
            raise AssertionError(f"not all was adopted: {report}")
        return first_s, longest_s, report


def _adopted(client: Client) -> dict[str, Any]:
    report = client.status()["pool"]["adopted"]
    if report is None:
        raise AssertionError("the server began cold: is the C extension there?")
    return dict(report)


def _until(condition: Any) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise CacheError("the server did not come")
        time.sleep(0.0005)


@contextlib.contextmanager
def _child(what: str, name: str, directory: Path, objects: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", __name__, what, name, str(directory), str(objects)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def _line_from(child: subprocess.Popen[str], start: str) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line.startswith(start):
        raise CacheError(f"a process of the bench ended early: it said {line!r}")
    return line


# --- in the children ----------------------------------------------------------------------------------------


def _key(number: int) -> bytes:
    # Digests, like real keys. Counters fill the kernel's 256 dictionaries so evenly that all grow in the same step.
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def _content(key: bytes) -> bytes:
    return key * (4096 // len(key))


def _settings(name: str, directory: Path, objects: int) -> Settings:
    size_bytes = objects * 4096 * 5 // 4 >> 21 << 21  # below the watermark: otherwise the trimmer would be measured too
    entries = 1 << max(12, (2 * objects - 1).bit_length())
    l1 = {"size_bytes": size_bytes, "index_entries": entries, "watermark": 0.9}
    return make_settings(name=name, runtime_dir=str(directory), state_dir=str(directory / "state"), l1=l1)


def _fill(settings: Settings, objects: int) -> None:
    """What a server and a worker do for each object, without the calls between them."""
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.pool.populate import populate
    from lmcache_core.protocol.address import make_server_directory
    from lmcache_core.server.pool.l1 import L1
    from lmcache_core.server.pool.opening import build_kernel, open_pool

    directory = make_server_directory(settings.name, settings.runtime_dir, Access.OWNER, ())
    segment = open_pool(settings, directory)
    populate(segment.mapping, segment.header.data_offset, segment.header.data_bytes)
    kernel = build_kernel(settings, load_plugins(), segment)
    kernel.add_memory(segment.header.data_bytes)
    l1 = L1(kernel, segment, Clock(), lambda effect: None)
    layout_id = l1.layout_id(NAMESPACE.layout, frozenset)
    l1.add_layout(layout_id, NAMESPACE.layout)
    kernel.open_session(1, 0)
    kernel.attach_session(1, 0)
    for first in range(0, objects, PAGE_KEYS):
        keys = [_key(number) for number in range(first, min(objects, first + PAGE_KEYS))]
        grants = kernel.prepare_store(1, NAMESPACE.id, layout_id, keys, 0.0)
        l1.apply()
        for key, offset in zip(keys, grants.offsets, strict=True):
            segment.view(offset, 4096)[:] = _content(key)
        checksums = [xxhash.xxh3_64_intdigest(_content(key)) for key in keys]
        kernel.commit_store(1, grants.lease_id, 0.0, checksums=checksums)
        l1.apply()
    segment.serve(kernel.epoch)
    print("filled", flush=True)
    sys.stdin.read()  # until it is killed


def _serve(settings: Settings) -> None:
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.server.server import Server

    registry = load_plugins()
    print("imported", flush=True)
    sys.stdin.readline()
    print("began", time.monotonic(), flush=True)
    Server(settings, registry).run(on_ready=lambda address: print("ready", address, flush=True))


def _main() -> None:
    what, name, directory, objects = sys.argv[1:]
    settings = _settings(name, Path(directory), int(objects))
    if what == "fill":
        _fill(settings, int(objects))
    else:
        _serve(settings)


if __name__ == "__main__":
    _main()
