"""`lmcache-core bench l2 --tier block`: the tier against a plain loop with O_DIRECT and the same depth, in one run.

The floor writes the same batches to a preallocated file beside, from the same buffers, as many calls at once, and syncs
once a batch as the tier does; it has no header, no key and no index. Where `lmcache-fs` is installed, it is measured in
the same turns. All objects are deleted between two turns, so that slots and blocks are written again.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lmcache_block.adapter import BlockAdapter
from lmcache_block.medium.format import BLOCK_BYTES
from lmcache_block.settings import BlockSettings
from lmcache_core.errors import TierError, UsageError
from lmcache_core.tiers.contract import AdapterContext, L2Adapter, LoadItem, Result, StoreItem
from lmcache_core.tiers.tier.parallel import adapter_context

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
TARGET = 0.9
DEPTH = 4
BATCH_BYTES, BATCH_MAX = 64 << 20, 64
ROUNDS, ROUNDS_QUICK = 15, 5
MEDIUM = {"size_bytes": 1 << 30, "extent_bytes": 65 << 20}
DEADLINE_S = 120.0


class _Objects:
    """A batch in page-aligned memory, as slots are."""

    def __init__(self, nbytes: int) -> None:
        self.count = max(1, min(BATCH_MAX, BATCH_BYTES // nbytes))
        self.keys = [os.urandom(44) for _ in range(self.count)]
        self.stored = self._memory(nbytes)
        for page, payload in self.stored:
            page[:], payload[:] = os.urandom(page.nbytes), os.urandom(payload.nbytes)
        self.loaded = self._memory(nbytes)

    def _memory(self, nbytes: int) -> list[tuple[memoryview, memoryview]]:
        return [(memoryview(mmap.mmap(-1, BLOCK_BYTES)), memoryview(mmap.mmap(-1, nbytes))) for _ in range(self.count)]


class _Tier:
    """An adapter as a side of the comparison."""

    def __init__(self, adapter: L2Adapter, objects: _Objects) -> None:
        self._adapter = adapter
        self._objects = objects

    def store(self) -> None:
        items = [StoreItem(key, parts) for key, parts in zip(self._objects.keys, self._objects.stored, strict=True)]
        self._expect(self._adapter.store(items, time.monotonic() + DEADLINE_S))

    def load(self) -> None:
        items = [LoadItem(key, parts) for key, parts in zip(self._objects.keys, self._objects.loaded, strict=True)]
        self._expect(self._adapter.load(items, time.monotonic() + DEADLINE_S))

    def delete(self) -> None:
        self._expect(self._adapter.delete(self._objects.keys, time.monotonic() + DEADLINE_S))

    @staticmethod
    def _expect(outcomes: Sequence[Any]) -> None:
        for outcome in outcomes:
            if outcome.result is not Result.DONE:
                raise TierError(f"the tier answered {outcome.result}: {outcome.error}")


class _Plain:
    """A loop over a file with O_DIRECT."""

    def __init__(self, handle: int, context: AdapterContext, objects: _Objects, fsync: bool) -> None:
        self._handle = handle
        self._context = context
        self._objects = objects
        self._fsync = fsync
        self._step = sum(part.nbytes for part in objects.stored[0])

    def store(self) -> None:
        self._all(os.pwritev, self._objects.stored)
        if self._fsync:
            os.fdatasync(self._handle)

    def load(self) -> None:
        self._all(os.preadv, self._objects.loaded)

    def delete(self) -> None:
        """The same bytes are written again."""

    def _all(self, call: Callable[..., int], objects: Sequence[Sequence[memoryview]]) -> None:
        moved = self._context.parallel(
            [partial(call, self._handle, parts, number * self._step) for number, parts in enumerate(objects)]
        )
        if any(nbytes != self._step for nbytes in moved):
            raise OSError("the disk moved a part of an object only")


def run(options: Namespace, bench: Bench) -> None:
    """Record every size. Raises `UsageError` where there is no O_DIRECT."""
    given: dict[str, Any] = {}
    for pair in options.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair!r} has no value: write NAME=VALUE")
        given[name] = value
    folder = Path(tempfile.mkdtemp(prefix="lmcache-bench-", dir=options.dir))
    try:
        settings = BlockSettings.model_validate({"path": folder / "medium", **MEDIUM, **given})
        try:
            handle = os.open(folder / "plain", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        except OSError as error:
            raise UsageError(f"{folder} takes no O_DIRECT: name a folder on a disk with --dir") from error
        try:
            os.posix_fallocate(handle, 0, BATCH_BYTES + BATCH_MAX * BLOCK_BYTES)
            bench.steps(len(SIZES))
            for name, nbytes in SIZES.items():
                bench.step(f"objects of {name}")
                _measure(bench, name, nbytes, settings, handle, folder)
        finally:
            os.close(handle)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(bench: Bench, name: str, nbytes: int, settings: BlockSettings, handle: int, folder: Path) -> None:
    objects, context = _Objects(nbytes), adapter_context("bench", DEPTH)
    sides: dict[str, Any] = {"plain": _Plain(handle, context, objects, settings.fsync)}
    with BlockAdapter(settings, context) as block:
        sides["block"] = _Tier(block, objects)
        if find_spec("lmcache_fs") is not None:
            sides["fs"] = _Tier(_fs(folder / "fs", context, settings.fsync), objects)
        times: dict[tuple[str, str], list[float]] = {}
        for turn in range(1 + (ROUNDS_QUICK if bench.quick else ROUNDS)):
            order = list(sides.items())
            for side, each in order if turn % 2 else reversed(order):
                for what in ("store", "load"):
                    began = time.perf_counter()
                    getattr(each, what)()
                    if turn:  # the first one makes folders, extents and threads
                        times.setdefault((side, what), []).append(time.perf_counter() - began)
                if objects.loaded != objects.stored:
                    raise TierError("the bytes that came back are not those that were stored: do not use this tier")
                each.delete()
    moved = objects.count * (nbytes + BLOCK_BYTES)
    for what in ("store", "load"):
        rates = {side: moved / median(times[side, what]) / 1e9 for side in sides}
        bench.record(
            f"{what} {name}", rates["block"], "GB/s", floor=rates["plain"], target=TARGET, lower_is_better=False
        )
        if "fs" in rates:
            bench.record(f"{what} {name}, fs", rates["fs"], "GB/s", floor=rates["plain"], lower_is_better=False)


def _fs(folder: Path, context: AdapterContext, fsync: bool) -> L2Adapter:
    """The disk tier, past the page cache, too."""
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins

    given = {"path": str(folder), "io_mode": "direct", "fsync": fsync}
    adapter = load_plugins().build(Kind.L2_ADAPTER, "fs", given, context)
    assert isinstance(adapter, L2Adapter)
    return adapter
