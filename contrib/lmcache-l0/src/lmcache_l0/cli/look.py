"""The commands themselves. They attach read-only, so looking never disturbs."""

from __future__ import annotations

import heapq
import json
import sys
import time

from lmcache_core.cli.table import print_table
from lmcache_core.errors import CacheError
from lmcache_l0.cache import SharedCache, Stats


def stats(path: str, *, as_json: bool) -> int:
    """Print the figures of the table at `path`."""
    cache = _attach(path)
    if cache is None:
        return 1
    with cache:
        found = cache.stats
        created_unix_s = cache.created_unix_s
    if as_json:
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
        ("values up to", f"{found.max_value_size:,} bytes, views outlive {found.versions} writes"),
        ("reads found, sampled", f"{found.counted_hits:,}"),
        ("writers alive", f"{found.writers}"),
        ("slots recovered", f"{found.recovered:,} (from writers that died)"),
        ("switched", "on" if found.enabled else "off"),
        ("created", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_unix_s))),
    ]
    print_table(("figure", "value"), rows, title=path)
    _warn_of_load(found)
    return 0


def top(path: str, count: int, *, as_json: bool) -> int:
    """Print the `count` keys that were read most since they were inserted (or cooled)."""
    cache = _attach(path)
    if cache is None:
        return 1
    with cache:
        hottest = heapq.nlargest(count, cache.residents(), key=lambda row: (row[2], row[0]))
    if as_json:
        found = [{"key": _shown(key), "value_bytes": size, "reads": reads} for key, size, reads in hottest]
        print(json.dumps(found))
        return 0
    rows = [(_shown(key), f"{size:,}", f"{reads:,}") for key, size, reads in hottest]
    print_table(("key", "bytes", "reads"), rows, title=path, right=(1, 2))
    return 0


def _attach(path: str) -> SharedCache | None:
    try:
        return SharedCache(path, read_only=True)
    except (CacheError, OSError) as error:
        print(f"lmcache-core l0: {error}", file=sys.stderr)
        return None


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
