"""`lmcache-core bench mlperf-kv`: the KV-cache benchmark of MLPerf Storage over our disk tier, and over its own.

Each round runs its own load over each side, forth and back, with the same seed, all KV on disk. Theirs syncs
each file, and drops it from the page cache before a read. What is compared makes the same promise: ours with `fsync`
beside theirs when it syncs the folder, too, and ours without it beside theirs without.

Three things in the benchmark are not as its report says, and none is patched here:

- A prefix hit is counted, and its tokens are left out of the request; but nothing ever writes the prefix, so no byte is
  read for it. The three prefixes are written before the load here, for both; `--prefixes as-is` leaves them out.
- A read that fails is counted as a hit, with its bytes, in 0 s. `failed reads` counts them, and must be 0.
- The number of entries that a run reads depends on how fast it is: throughput here is bytes by seconds in the backend.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import statistics
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lmcache_core.cli.bench.harness import Bench
from lmcache_core.errors import UsageError

__all__ = ["Load", "Side", "add_options", "find", "one_run", "run"]

VARIABLE = "LMCACHE_CORE_MLPERF"
_WARM_BYTES = 512 << 20


class Side(NamedTuple):
    """One of those compared. `tier`: the settings of ours; None: their own backend, which syncs `synced` of a file."""

    tier: Mapping[str, Any] | None
    synced: str = "file"  # "file", "file and folder", or "nothing"
    beside: str = ""  # the one that makes the same promise


SIDES = {
    "theirs, folder synced": Side(None, "file and folder"),
    "theirs": Side(None),
    "theirs, no fsync": Side(None, "nothing"),
    "ours, fsync, direct": Side({"fsync": True, "io_mode": "direct"}, beside="theirs, folder synced"),
    "ours, fsync": Side({"fsync": True}, beside="theirs, folder synced"),
    "ours, no fsync": Side({}, beside="theirs, no fsync"),
}


class Load(NamedTuple):
    """`tokens`: the least and the most of a context; 24 KiB each with this model."""

    requests: int
    users: int = 4
    tokens: tuple[int, int] = (64, 512)
    seconds_max: int = 300


def add_options(parser: ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--benchmark",
        type=Path,
        default=os.environ.get(VARIABLE),
        metavar="FOLDER",
        help=f"where the benchmark's package kv_cache lies (default: ${VARIABLE})",
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (default: this one)")
    parser.add_argument("--requests", type=int, default=60, help="of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="two runs of each side (default: %(default)s)")
    parser.add_argument("--users", type=int, default=4, help="of the benchmark, at once (default: %(default)s)")
    parser.add_argument(
        "--prefixes",
        choices=("written", "as-is"),
        default="written",
        help="write the prefixes that the benchmark reads and never writes (default: %(default)s)",
    )


def find(folder: Path | None) -> None:
    """Make the benchmark importable. Raises `UsageError` if it is not in this folder."""
    if folder is None or not (folder / "kv_cache" / "cache.py").is_file():
        raise UsageError(
            f"{folder or 'no folder'} holds no package kv_cache: give --benchmark the folder kv_cache_benchmark of a "
            "checkout of MLPerf Storage"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def run(options: Namespace, bench: Bench) -> None:
    """Both sides in turn, and the ratio of ours to what makes the same promise of theirs."""
    find(options.benchmark)
    load = Load(12 if bench.quick else options.requests, options.users)
    rounds = 1 if bench.quick else options.rounds
    orders = [list(SIDES)] if bench.quick else [list(SIDES), list(reversed(SIDES))] * rounds
    bench.steps(sum(map(len, orders)))
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for order in orders:
        for name in order:
            bench.step(name)
            with TemporaryDirectory(dir=options.folder) as path:
                whole = options.prefixes == "written"
                seen[name].append(one_run(load, Path(path), SIDES[name], prefixes_written=whole))
    middle = {
        name: {what: statistics.median(each[what] for each in runs) for what in runs[0]} for name, runs in seen.items()
    }
    for name, found in middle.items():
        theirs = middle.get(SIDES[name].beside)
        for what, unit, target in (("read", "MiB/s", 1.0), ("write", "MiB/s", 1.0), ("processor", "s/GiB", None)):
            floor = None if theirs is None else theirs[what]
            better = unit == "s/GiB"
            goal = None if theirs is None else target
            bench.record(f"{name}: {what}", found[what], unit, floor=floor, target=goal, lower_is_better=better)
        for what in ("read", "write"):
            bench.record(f"{name}: {what}, 50th percentile", found[f"{what}_p50_ms"], "ms")
            bench.record(f"{name}: {what}, 95th percentile", found[f"{what}_p95_ms"], "ms")
        bench.record(f"{name}: failed reads", found["reads_failed"], "", target=0, target_on="value")


def one_run(load: Load, path: Path, side: Side, *, prefixes_written: bool = True) -> dict[str, float]:
    """One run of the benchmark in this folder."""
    import numpy as np
    from kv_cache.benchmark import IntegratedBenchmark
    from kv_cache.config import ConfigLoader, set_config
    from kv_cache.models import MODEL_CONFIGS

    from lmcache_hosts.mlperf import in_place_of_nvme

    config = ConfigLoader()
    config.config = {
        "user_templates": {
            user: {"context_range": list(load.tokens), "generation_range": [32, 96], "think_time_range": [0.0, 0.01]}
            for user in ("chatbot", "coding", "document")
        }
    }
    set_config(config)
    random.seed(1)
    np.random.seed(1)  # the benchmark draws from here
    with contextlib.ExitStack() as stack:
        if side.tier is None:
            stack.enter_context(_syncs(side.synced, path))
        else:
            stack.enter_context(in_place_of_nvme({"tier": {"type": "fs", "path": str(path / "tier"), **side.tier}}))
        _warm(path)
        with contextlib.redirect_stdout(io.StringIO()):
            run = IntegratedBenchmark(
                MODEL_CONFIGS["tiny-1b"], load.users, 0, 0, load.seconds_max, cache_dir=str(path), seed=1,
                max_requests=load.requests, storage_capacity_gb=8, performance_profile="throughput",
            )  # fmt: skip
            if prefixes_written:
                _write_prefixes(run.cache)
            used = time.process_time()
            run.run()
            for each in threading.enumerate():
                if "process_requests" in each.name:  # it waits 2 s for each, and a read may be under way
                    each.join()
            used = time.process_time() - used
        seen = _figures(run, used)
        if side.tier is None:
            run.cache.backends["nvme"].clear()
    del run
    gc.collect()  # the benchmark's noise is 256 MiB
    return seen


def _write_prefixes(cache: Any) -> None:
    """The system prompts that the benchmark draws, under the keys that it reads."""
    from kv_cache.prefix_cache import PrefixMatcher

    matcher = PrefixMatcher()
    for text in matcher.COMMON_SYSTEM_PROMPTS:
        tokens = len(text.split())
        cache.allocate_cache(f"kv_system_{matcher.hash_prefix(text, tokens)}", tokens)
    cache.reset_stats()


def _figures(run: Any, cpu_s: float) -> dict[str, float]:
    stats, mib = run.cache.stats, 1 << 20
    reads, writes = stats["storage_read_latencies"], stats["storage_write_latencies"]
    read_mib, written_mib = (stats[f"tier_storage_kv_bytes_{what}"] / mib for what in ("read", "written"))
    return {
        "requests": run.results["requests_completed"],
        "read_mib": read_mib,
        "written_mib": written_mib,
        "read": read_mib / sum(reads),
        "write": written_mib / sum(writes),
        "read_p50_ms": statistics.median(reads) * 1000,
        "read_p95_ms": _percentile(reads, 95) * 1000,
        "write_p50_ms": statistics.median(writes) * 1000,
        "write_p95_ms": _percentile(writes, 95) * 1000,
        "processor": cpu_s * 1024 / (read_mib + written_mib),
        "reads_failed": stats["read_operations"] - len(reads) - len(stats["cpu_read_latencies"]),
        "prefix_hits": run.prefix_cache_manager.stats["prefix_hits"],
        "prefix_reads": sum(
            each["access_count"] - 1 for key, each in run.cache.cache_entries.items() if key.startswith("kv_system_")
        ),
    }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@contextlib.contextmanager
def _syncs(what: str, folder: Path) -> Iterator[None]:
    """Their backend syncs each file that it writes: here, for so long, also its folder, or nothing."""
    former = os.fsync

    def both(handle: Any) -> None:
        former(handle)
        above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            former(above)
        finally:
            os.close(above)

    def nothing(handle: Any) -> None:
        """As if it were synced."""

    ways: dict[str, Any] = {"file": former, "file and folder": both, "nothing": nothing}
    os.fsync = ways[what]
    try:
        yield
    finally:
        os.fsync = former


def _warm(folder: Path) -> None:
    """A virtual machine gives back memory that nobody used for some seconds, and whoever touches it next pays for it,
    ten times the price of the write: so that this is nobody here, a file is written and deleted before each run."""
    path, piece = folder / "warm", bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(_WARM_BYTES // len(piece)):
            file.write(piece)
    path.unlink()
