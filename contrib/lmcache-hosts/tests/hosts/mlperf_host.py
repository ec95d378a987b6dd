"""The files of MLPerf Storage's KV-cache benchmark, unmodified. LMCACHE_CORE_MLPERF names its folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REASON = "LMCACHE_CORE_MLPERF names no folder with the kv_cache package of MLPerf Storage's benchmark"


def found() -> bool:
    """Whether the benchmark is here; then it can be imported."""
    folder = Path(os.environ.get("LMCACHE_CORE_MLPERF", "/nowhere"))
    if not (folder / "kv_cache" / "cache.py").is_file():
        return False
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return True
