"""`lmcache-core bench l2`: a tier against plain files of the same sizes, in the same run.

Stores go through the object format and its checksum into the adapter; the floor is `open` and `write` of the same
bytes, without either. Loads come back into the pool and are verified; the floor is `readinto` with the same checksum,
and the bare read is shown beside it. Objects go in batches, as lanes send them; both sides take turns batch by batch,
and medians are compared. Stored objects are deleted before the medium begins its write-back, which would slow whichever
side runs at the time.

With `--tier mock` it measures what a tier that is slow, hung or busy costs everyone else.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from threading import Event
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import SettingsError, TierError, UsageError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from lmcache_core.cli.bench.harness import Bench
    from lmcache_core.tiers.contract import L2Adapter

SUMMARY = "a tier against plain files of the same sizes"

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "8 MiB": 8 << 20, "32 MiB": 32 << 20}
TARGET_BYTES_MIN = 1 << 20  # below it calls cost more than bytes
STORE_TARGET = 0.7
LOAD_TARGET = 0.8
BATCH_BYTES = 32 << 20  # larger than the processor's caches
BATCH_MAX = 64
ROUNDS = 21
ROUNDS_QUICK = 7
DEADLINE_S = 120.0


@dataclass
class _Times:
    """Seconds of each object."""

    store: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    read_and_sum: list[float] = field(default_factory=list)


def add_options(parser: ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--tier", default="fs", metavar="TYPE", help="the adapter (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the adapter; repeatable"
    )
    parser.add_argument(
        "--dir", type=Path, help="where the files go (default: the system's directory for temporary files)"
    )


def run(options: Namespace, bench: Bench) -> None:
    """Record every size; for the mock tier, its cost for others. Raises `SettingsError` if the adapter lacks a
    setting."""
    from pydantic import ValidationError

    try:
        _run(options, bench)
    except ValidationError as error:  # of this package's bench, or of the tier's own
        raise SettingsError(_refused(options.tier, error)) from error


def _run(options: Namespace, bench: Bench) -> None:
    if options.tier == "mock":
        from lmcache_bench import trouble

        trouble.check_installed("mock")
        trouble.run(bench)
        return
    if (own := _bench_of_package(options.tier)) is not None:
        own.run(options, bench)  # against the floor that its users know
        return
    folder = Path(tempfile.mkdtemp(prefix="lmcache-bench-", dir=options.dir))
    try:
        with _adapter(options, folder / "tier") as adapter:
            bench.steps(len(SIZES))
            for name, nbytes in SIZES.items():
                bench.step(f"objects of {name}")
                _record(bench, name, nbytes, _measure(adapter, folder, nbytes, bench.quick))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bench_of_package(adapter: str) -> Any:
    """The module `bench` next to an adapter's factory, if there is one: `run(options, bench)`, options as here."""
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins

    package = load_plugins().spec(Kind.L2_ADAPTER, adapter).factory.partition(":")[0].rpartition(".")[0]
    if not package or find_spec(f"{package}.bench") is None:
        return None
    return import_module(f"{package}.bench")


def _adapter(options: Namespace, folder: Path) -> L2Adapter:
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.tiers.contract import L2Adapter
    from lmcache_core.tiers.tier.parallel import adapter_context

    given: dict[str, Any] = {}
    for pair in options.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair!r} has no value: write NAME=VALUE")
        given[name] = value
    if options.tier == "fs":
        given.setdefault("path", folder)
    adapter = load_plugins().build(Kind.L2_ADAPTER, options.tier, given, adapter_context(options.tier, 4))
    assert isinstance(adapter, L2Adapter)
    return adapter


def _refused(tier: str, error: ValidationError) -> str:
    """What is missing or wrong, and how to set it. Values are not repeated: they may be secrets."""
    wrong = [
        (".".join(map(str, each["loc"])) or "its settings", each["type"], each["msg"])
        for each in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    why = "; ".join(f"{name} is missing" if kind == "missing" else f"{name}: {text}" for name, kind, text in wrong)
    cure = " ".join(f"--set {name}=VALUE" for name, _, _ in wrong)
    return f"no tier of type {tier!r} can be made: {why}: say {cure}; lmcache-core plugins show {tier} lists them all"


class _Sides:
    """The two sides of the comparison, each on a batch of objects: a tier's lane, and plain files."""

    def __init__(self, adapter: L2Adapter, folder: Path, nbytes: int) -> None:
        from lmcache_core.pool.layout import Layout
        from lmcache_core.serde.chain import CodecChain
        from lmcache_core.tiers.object.format import object_kind, payload_checksum
        from lmcache_core.tiers.object.transfer import Carrier, Transfer

        chain = CodecChain()
        self._adapter = adapter
        self._carrier = Carrier(adapter, chain, Event())
        self._checksum = payload_checksum
        self.count = max(1, min(BATCH_MAX, BATCH_BYTES // nbytes))
        self._source, self._target = _pool(self.count * nbytes), _pool(self.count * nbytes)
        self._source[:] = os.urandom(self._source.nbytes)
        kind = object_kind(Layout("uint8", (nbytes,)), chain)
        keys = [os.urandom(32) for _ in range(self.count)]
        cuts = [slice(at, at + nbytes) for at in range(0, self._source.nbytes, nbytes)]
        self._paths = [folder / key.hex() for key in keys]
        self._from = [self._source[cut] for cut in cuts]
        self._into = [self._target[cut] for cut in cuts]
        self._stores = [Transfer(key, 1, 0, kind, view) for key, view in zip(keys, self._from, strict=True)]
        self._loads = [Transfer(key, 1, 0, kind, view) for key, view in zip(keys, self._into, strict=True)]

    def store(self) -> None:
        for outcome in self._carrier.store(self._stores, time.monotonic() + DEADLINE_S):
            if outcome.result != "done":
                raise TierError(f"the tier did not store an object: {outcome.error or outcome.result}")

    def load(self) -> None:
        for loaded in self._carrier.load(self._loads, time.monotonic() + DEADLINE_S):
            if loaded.reason is not None:
                raise TierError(f"the tier did not load an object: {loaded.error or loaded.reason}")

    def write(self) -> None:
        for path, view in zip(self._paths, self._from, strict=True):
            with open(path, "wb", buffering=0) as file:
                file.write(view)

    def read(self) -> None:
        for path, view in zip(self._paths, self._into, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.readinto(view)

    def read_and_sum(self) -> None:
        for path, view in zip(self._paths, self._into, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.readinto(view)
            self._checksum([view])

    def check(self) -> None:
        if self._target != self._source:
            raise TierError("the bytes that came back are not those that were stored: do not use this tier")

    def delete(self) -> None:
        keys = [transfer.tier_key for transfer in self._stores]
        self._adapter.delete(keys, time.monotonic() + DEADLINE_S)
        for path in self._paths:
            path.unlink(missing_ok=True)


def _measure(adapter: L2Adapter, folder: Path, nbytes: int, quick: bool) -> _Times:
    sides, times = _Sides(adapter, folder, nbytes), _Times()
    sides.store()  # the first run creates folders, connections and scratch
    sides.delete()
    for turn in range(ROUNDS_QUICK if quick else ROUNDS):
        # The sides also alternate in who goes first: the second finds different free pages.
        pairs = [(sides.store, times.store), (sides.write, times.write)]
        for call, seconds in pairs if turn % 2 else reversed(pairs):
            seconds.append(_seconds(call) / sides.count)
        pairs = [(sides.load, times.load), (sides.read_and_sum, times.read_and_sum), (sides.read, times.read)]
        for call, seconds in pairs if turn % 2 else reversed(pairs):
            seconds.append(_seconds(call) / sides.count)
            if call == sides.load:
                sides.check()
        sides.delete()
    return times


def _record(bench: Bench, name: str, nbytes: int, times: _Times) -> None:
    def rate(seconds: list[float]) -> float:
        return nbytes / median(seconds) / 1e9

    aimed = nbytes >= TARGET_BYTES_MIN
    bench.record(
        f"store {name}",
        rate(times.store),
        "GB/s",
        floor=rate(times.write),
        target=STORE_TARGET if aimed else None,
        lower_is_better=False,
    )
    bench.record(
        f"load {name}",
        rate(times.load),
        "GB/s",
        floor=rate(times.read_and_sum),
        target=LOAD_TARGET if aimed else None,
        lower_is_better=False,
    )
    bench.record(f"bare read {name}", rate(times.read), "GB/s", lower_is_better=False)


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _pool(nbytes: int) -> memoryview:
    """Memory like a slot's: page-aligned, and populated."""
    region = memoryview(mmap.mmap(-1, nbytes))
    region[:] = bytes(nbytes)
    return region
