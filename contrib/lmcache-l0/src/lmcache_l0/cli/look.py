"""The commands that only read. They attach read-only, so they never disturb others."""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
import time

from lmcache_core.cli.table import print_table
from lmcache_l0.cache import Stats
from lmcache_l0.cli.attaching import attach, says_what_failed, warn_if_off


@says_what_failed
def stats_command(options: argparse.Namespace) -> int:
    """Print the figures of a table."""
    with attach(options.path) as cache:
        found = cache.stats
        created_unix_s = cache.created_unix_s
    if options.json:
        print(json.dumps(found.as_dict()))
        return 0
    rows = [
        ("load", f"{found.load:.1%}  ({found.keys:,} of {found.hash_slots:,} slots)"),
        ("plan for", f"{int(found.hash_slots * 0.7):,} keys (70 %)"),
        ("probes, found", _probes(found.found_probes_mean, found.found_probes_p99, found.found_probes_max)),
        ("probes, missed", f"mean {found.miss_probes_mean:.2f}, max {found.miss_probes_max:,}"),
        ("bytes of keys", f"{found.key_bytes:,}"),
        ("bytes of values", f"{found.value_bytes:,}"),
        ("bytes of file", f"{found.file_bytes:,}  ({found.slot_bytes:,} a slot)"),
        ("values up to", f"{found.max_value_size:,} bytes"),
        ("a view outlives", _promise(found)),
        ("reads found, sampled", f"{found.counted_hits:,}"),
        ("writers alive", f"{found.writers}"),
        ("slots recovered", f"{found.recovered:,} (from writers that died)"),
        ("switched", "on" if found.enabled else "off"),
        ("created", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_unix_s))),
    ]
    print_table(("figure", "value"), rows, title=options.path)
    _warn_of_load(found)
    return 0


@says_what_failed
def top_command(options: argparse.Namespace) -> int:
    """Print the keys that were read most since they were inserted (or cooled)."""
    with attach(options.path) as cache:
        hottest = heapq.nlargest(options.count, cache.residents(), key=lambda row: (row[2], row[0]))
    if options.json:
        found = [{"key": _shown(key), "value_bytes": size, "reads": reads} for key, size, reads in hottest]
        print(json.dumps(found))
        return 0
    rows = [(_shown(key), f"{size:,}", f"{reads:,}") for key, size, reads in hottest]
    print_table(("key", "bytes", "reads"), rows, title=options.path, right=(1, 2))
    return 0


@says_what_failed
def keys_command(options: argparse.Namespace) -> int:
    """Print keys, one a line."""
    prefix = options.prefix.encode()
    with attach(options.path) as cache:
        chosen = itertools.islice((key for key in cache if key.startswith(prefix)), options.count)
        if options.json:
            print(json.dumps([_shown(key) for key in chosen]))
            return 0
        for key in chosen:
            print(_shown(key))
    return 0


@says_what_failed
def get_command(options: argparse.Namespace) -> int:
    """Write a value as it is."""
    with attach(options.path) as cache:
        value = cache.get(options.key)
        if value is None:
            warn_if_off(cache)
            print(f"lmcache-core l0: {options.key} is not there", file=sys.stderr)
            return 1
    sys.stdout.buffer.write(value)
    if sys.stdout.isatty():
        print()
    return 0


def _promise(found: Stats) -> str:
    if found.versions:
        return f"{found.versions} more writes of its key"
    return f"the next write of its key, and then {found.spares - 1} more in its stripe of 64 slots"


def _probes(mean: float, p99: int, most: int) -> str:
    return f"mean {mean:.2f}, 99 % within {p99:,}, max {most:,}"


def _warn_of_load(found: Stats) -> None:
    if found.load >= 0.7:
        more = int(found.keys / 0.7) + 1
        print(
            f"warning: {found.path} is {found.load:.0%} full, and planned for 70 %: make it anew with "
            f"hash_slots={more:,} or more",
            file=sys.stderr,
        )


def _shown(key: bytes) -> str:
    """A key for people: its text where it is printable UTF-8, its bytes as hex elsewhere."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return f"0x{key.hex()}"
    return text if text.isprintable() else f"0x{key.hex()}"
