"""What `lmcache-core check` looks at for each tier of this type."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from lmcache_core import Finding
from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, Result, StoreItem
from lmcache_lmdb.adapter import LmdbAdapter
from lmcache_lmdb.settings import LmdbSettings

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

_CURE = "make the folder of l2.NAME.path one that we may write to, with room for the file"
_SECONDS_MAX = 5.0  # the command waits ten


def check_tiers(settings: Settings) -> list[Finding]:
    """One finding for each tier whose settings are ours."""
    return [
        check_tier(name, tier.settings) for name, tier in settings.l2.items() if isinstance(tier.settings, LmdbSettings)
    ]


def check_tier(name: str, settings: LmdbSettings) -> Finding:
    """Does the medium take an object, and let it go again?"""
    subject, deadline = f"tier {name!r} ({settings.path})", time.monotonic() + _SECONDS_MAX
    key = b"lmcache-check-" + os.urandom(16)
    with LmdbAdapter(settings, AdapterContext(tier=name)) as adapter:
        try:
            (stored,) = adapter.store([StoreItem(key, [memoryview(b"check")])], deadline)
            (deleted,) = adapter.delete([key], deadline)
        except TierError as error:
            return Finding(False, subject, str(error), _CURE)
    for outcome in (stored, deleted):
        if outcome.result is not Result.DONE:
            return Finding(False, subject, outcome.error, _CURE)
    return Finding(True, subject, "an object was stored and deleted")
