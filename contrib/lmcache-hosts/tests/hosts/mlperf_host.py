"""The files of MLPerf Storage's KV-cache benchmark, unmodified. LMCACHE_CORE_MLPERF names its folder."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache_core.errors import UsageError
from lmcache_hosts.mlperf_kv import VARIABLE, find

REASON = f"{VARIABLE} names no folder with the kv_cache package of MLPerf Storage's benchmark"


def found() -> bool:
    """Whether the benchmark is here; then it can be imported."""
    try:
        find(Path(os.environ.get(VARIABLE, "/nowhere")))
    except UsageError:
        return False
    return True
