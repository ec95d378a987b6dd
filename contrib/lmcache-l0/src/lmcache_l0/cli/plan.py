"""`lmcache-core l0 plan`: the size of a table for so many keys, and how its load affects its probes."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from lmcache_core.cli.table import print_table
from lmcache_core.errors import UsageError
from lmcache_l0.cache import SharedCache
from lmcache_l0.cli.attaching import says_what_failed
from lmcache_l0.errors import TableLoadWarning
from lmcache_l0.sizing import GIB, plan_table

LOADS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
SAMPLE_SLOTS = 1 << 16
_BAR = 40


@says_what_failed
def plan_command(options: argparse.Namespace) -> int:
    """Print sizes, the call that makes the table, and load against probe length."""
    if not 0 < options.load < 1:
        raise UsageError(f"--load {options.load} must be between 0 and 1")
    figures = {name: getattr(options, name) for name in ("max_key_size", "versions", "spares")}
    given = {name: figure for name, figure in figures.items() if figure is not None}
    plan = plan_table(hash_slots=int(options.keys / options.load) + 1, max_value_size=options.value, **given)
    measured = list(probes_by_load())
    if options.json:
        probes = [dict(zip(("load", "mean", "p99", "missed"), row, strict=True)) for row in measured]
        print(json.dumps({**vars(plan), "keys": options.keys, "load": options.load, "probes": probes}))
        return 0
    rest = "".join(f", {name}={figure}" for name, figure in given.items())
    rows = [
        ("keys", f"{options.keys:,} at a load of {options.load:.0%}"),
        ("slots", f"{plan.hash_slots:,}"),
        ("a slot", f"{plan.slot_bytes:,} bytes, for values up to {plan.max_value_size:,}"),
        ("in all", f"{plan.file_bytes / GIB:.3f} GiB"),
        ("make it", f"SharedCache(path, hash_slots={plan.hash_slots}, max_value_size={plan.max_value_size}{rest})"),
    ]
    print_table(("figure", "value"), rows, title="plan")
    print(f"\nslots looked at for a key that is there, in a new table of {SAMPLE_SLOTS:,} slots (measured now)\n")
    for load, mean, p99, missed in measured:
        bar = "#" * min(_BAR, max(1, round(mean * 2)))
        print(f"  {load:4.0%}  mean {mean:6.2f}  99 % within {p99:4d}  for a missing key {missed:5.2f}  {bar}")
    print("\nDeletes and inserts that go on for long make probes longer, until `lmcache-core l0 rehash PATH`.")
    return 0


def probes_by_load() -> Iterator[tuple[float, float, int, float]]:
    """Load, and slots probed: mean and 99 % for existing keys, mean for missing ones."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="l0-plan-", dir=memory if memory.is_dir() else None) as folder:
        sample = SharedCache(
            Path(folder) / "t", hash_slots=SAMPLE_SLOTS, max_value_size=1, max_key_size=8, reserve=False
        )
        with sample as cache, warnings.catch_warnings():
            warnings.simplefilter("ignore", TableLoadWarning)
            filled = 0
            for load in LOADS:
                wanted = int(SAMPLE_SLOTS * load)
                cache.set_many([(b"%d" % i, b"") for i in range(filled, wanted)])
                filled = wanted
                found = cache.stats
                yield load, found.found_probes_mean, found.found_probes_p99, found.miss_probes_mean
