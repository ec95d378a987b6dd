"""What `lmcache-core check` looks at for each disk tier."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

_PROBE_BYTES = 1 << 20
_FREE_FRACTION_MIN = 0.05
_SECONDS_MAX = 5.0


def check_tiers(settings: Settings) -> list[Finding]:
    """Findings for every tier of type fs."""
    findings: list[Finding] = []
    for name, tier in settings.l2.items():
        if isinstance(tier.settings, FsSettings):
            findings += check_tier(name, tier.settings)
    return findings


def check_tier(name: str, settings: FsSettings) -> list[Finding]:
    """Is the directory writable, does it return what was stored, and is there space?"""
    subject = f"tier {name!r} ({settings.path})"
    try:
        with FsAdapter(settings, AdapterContext(tier=name)) as adapter:
            error = _round_trip(adapter)
            free = adapter.usage().bytes_free
    except TierError as failure:
        error, free = str(failure), None
    if error:
        said, _, cure = error.rpartition(": ")  # an adapter's messages end so if a person can help
        if not said or not os.access(settings.path, os.R_OK | os.W_OK | os.X_OK):
            cure = f"make {settings.path} a directory that user {os.getuid()} may read and write"
        return [Finding(False, subject, said or error, cure)]
    findings = [Finding(True, subject, "an object was stored, loaded and deleted")]
    total = _total_bytes(settings.path)
    if free is not None and total:
        enough = free >= _FREE_FRACTION_MIN * total
        cure = "" if enough else f"free some space, or move l2.{name}.path"
        findings.append(Finding(enough, subject, f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free", cure))
    return findings


def _round_trip(adapter: FsAdapter) -> str:
    deadline = time.monotonic() + _SECONDS_MAX
    key, content = b"lmcache-check" + os.urandom(16), os.urandom(_PROBE_BYTES)
    stored = adapter.store([StoreItem(key, [memoryview(content)])], deadline)[0]
    if stored.result is not Result.DONE:
        return stored.error
    back = bytearray(_PROBE_BYTES)
    loaded = adapter.load([LoadItem(key, [memoryview(back)])], deadline)[0]
    adapter.delete([key], deadline)
    if loaded.result is not Result.DONE:
        return loaded.error or f"an object that was just stored came back as {loaded.result}"
    return "" if back == content else "an object came back with different bytes: do not use this medium"


def _total_bytes(path: Path) -> int:
    try:
        room = os.statvfs(path)
    except OSError:
        return 0
    return room.f_blocks * room.f_frsize
