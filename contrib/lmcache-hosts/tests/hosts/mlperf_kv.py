"""The KV-cache benchmark of MLPerf Storage over our disk tier, and over its own, in one run.

    LMCACHE_CORE_MLPERF=/path/to/storage/kv_cache_benchmark python mlperf_kv.py FOLDER [--requests 100] [--rounds 3]

Each round runs the benchmark's own load over each side, forth and back, with the same seed, all KV on disk.
Theirs syncs each file and drops it from the page cache before a read; so ours is run with `fsync` and direct I/O, with
`fsync` and the page cache, and without `fsync`. Theirs may use all cores for its writes, and so may ours. Prints the
medians as JSON.

Three things in the benchmark are not as its report says, and none is patched here:

- A prefix hit is counted, and its tokens are left out of the request; but nothing ever writes the prefix, so no byte is
  read for it. The three prefixes are written before the load here, for both; `--prefixes as-is` leaves them out.
- A read that fails is counted as a hit, with its bytes, in 0 s. `reads_failed` counts them, and must be 0.
- The number of entries that a run reads depends on how fast it is: throughput here is bytes by seconds in the backend.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlperf_host
import numpy as np

if not mlperf_host.found():
    sys.exit(mlperf_host.REASON)

from kv_cache import cache as kv_cache
from kv_cache.benchmark import IntegratedBenchmark
from kv_cache.config import ConfigLoader, set_config
from kv_cache.models import MODEL_CONFIGS
from kv_cache.prefix_cache import PrefixMatcher

from lmcache_hosts.mlperf import in_place_of_nvme

CORES = {"store_cpu_share": float(os.cpu_count() or 1)}
SIDES = {
    "ours, direct": {"fsync": True, "io_mode": "direct", **CORES},
    "ours, page cache": {"fsync": True, **CORES},
    "ours, no fsync": CORES,
    "theirs": None,
}


class Load(NamedTuple):
    """`tokens`: the least and the most of a context; 24 KiB each with this model."""

    requests: int
    users: int = 4
    tokens: tuple[int, int] = (64, 512)
    seconds_max: int = 300


def one_run(
    load: Load, path: Path, settings: Mapping[str, Any] | None, *, prefixes_written: bool = True
) -> dict[str, float]:
    """One run of the benchmark. `settings` None: over its own disk tier, in `path`."""
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
        if settings is not None:
            stack.enter_context(in_place_of_nvme(settings))
        with contextlib.redirect_stdout(io.StringIO()):
            run = IntegratedBenchmark(
                MODEL_CONFIGS["tiny-1b"], load.users, 0, 0, load.seconds_max, cache_dir=str(path), seed=1,
                max_requests=load.requests, storage_capacity_gb=8, performance_profile="throughput",
            )  # fmt: skip
            if prefixes_written:
                write_prefixes(run.cache)
            used = time.process_time()
            run.run()
            for each in threading.enumerate():
                if "process_requests" in each.name:  # it waits 2 s for each, and a read may be under way
                    each.join()
            used = time.process_time() - used
        seen = figures(run, used)
        if settings is None:
            run.cache.backends["nvme"].clear()
    del run
    gc.collect()  # the benchmark's noise is 256 MiB
    return seen


def write_prefixes(cache: kv_cache.MultiTierCache) -> None:
    """The system prompts that the benchmark draws, under the keys that it reads."""
    matcher = PrefixMatcher()
    for text in matcher.COMMON_SYSTEM_PROMPTS:
        tokens = len(text.split())
        cache.allocate_cache(f"kv_system_{matcher.hash_prefix(text, tokens)}", tokens)
    cache.reset_stats()


def figures(run: IntegratedBenchmark, cpu_s: float) -> dict[str, float]:
    stats, mib = run.cache.stats, 1 << 20
    reads, writes = stats["storage_read_latencies"], stats["storage_write_latencies"]
    read_mib, written_mib = (stats[f"tier_storage_kv_bytes_{what}"] / mib for what in ("read", "written"))
    return {
        "requests": run.results["requests_completed"],
        "read_mib": read_mib,
        "written_mib": written_mib,
        "read_mib_s": read_mib / sum(reads),
        "write_mib_s": written_mib / sum(writes),
        "read_p50_ms": statistics.median(reads) * 1000,
        "read_p95_ms": float(np.percentile(reads, 95)) * 1000,
        "write_p50_ms": statistics.median(writes) * 1000,
        "write_p95_ms": float(np.percentile(writes, 95)) * 1000,
        "cpu_s_gib": cpu_s * 1024 / (read_mib + written_mib),
        "reads_failed": stats["read_operations"] - len(reads) - len(stats["cpu_read_latencies"]),
        "prefix_hits": run.prefix_cache_manager.stats["prefix_hits"],
        "prefix_reads": sum(
            each["access_count"] - 1 for key, each in run.cache.cache_entries.items() if key.startswith("kv_system_")
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Our disk tier and the benchmark's own under its load.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--prefixes", choices=("written", "as-is"), default="written")
    arguments = parser.parse_args()
    load = Load(arguments.requests, arguments.users)
    seen: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for at, side in enumerate([*SIDES, *reversed(SIDES)]):
            path, more = arguments.folder / f"{number}-{at}", SIDES[side]
            settings = None if more is None else {"tier": {"type": "fs", "path": str(path), **more}}
            seen[side].append(one_run(load, path, settings, prefixes_written=arguments.prefixes == "written"))
            shutil.rmtree(path, ignore_errors=True)
    for side, runs in seen.items():
        print(side, json.dumps({name: round(statistics.median(each[name] for each in runs), 2) for name in runs[0]}))


if __name__ == "__main__":
    main()
