"""How many processors this process may keep busy: its affinity mask, and the quota of every control group above it."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache_core.pool.room import group_directories, read_lines


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. A quota of one and a half processors counts as one: a second thread would be stopped half the time.

    `root` is where /proc and /sys are looked up. What cannot be read does not limit.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for version, directory in group_directories("cpu", root):
        quota = (_quota_v2 if version == 2 else _quota_v1)(root / directory.relative_to("/"))
        if quota is not None:
            cores = min(cores, quota)
    return max(int(cores), 1)


def _quota_v2(directory: Path) -> float | None:
    fields = " ".join(read_lines(directory / "cpu.max")).split()
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0].isdigit() else None


def _quota_v1(directory: Path) -> float | None:
    quota, period = (read_lines(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    # -1 means no limit
    return int(quota[0]) / int(period[0]) if quota and period and quota[0].isdigit() else None
