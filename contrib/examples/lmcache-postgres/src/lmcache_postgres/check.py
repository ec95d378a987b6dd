"""What `lmcache-core check` looks at for each tier of this type."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from lmcache_core import Finding
from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, Result, StoreItem
from lmcache_postgres.adapter import PostgresAdapter
from lmcache_postgres.settings import PostgresSettings

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

_CURE = "say in l2.NAME.dsn where the database is, and as whom its table may be made and written"
_SECONDS_MAX = 5.0  # the command waits ten


def check_tiers(settings: Settings) -> list[Finding]:
    """One finding for each tier whose settings are ours."""
    return [
        check_tier(name, tier.settings)
        for name, tier in settings.l2.items()
        if isinstance(tier.settings, PostgresSettings)
    ]


def check_tier(name: str, settings: PostgresSettings) -> Finding:
    """Does the medium take an object, and let it go again?"""
    subject, deadline = f"tier {name!r} (table {settings.table})", time.monotonic() + _SECONDS_MAX
    key = b"lmcache-check-" + os.urandom(16)
    with PostgresAdapter(settings, AdapterContext(tier=name)) as adapter:
        try:
            (stored,) = adapter.store([StoreItem(key, [memoryview(b"check")])], deadline)
            (deleted,) = adapter.delete([key], deadline)
        except TierError as error:
            return Finding(False, subject, str(error), _CURE)
    for outcome in (stored, deleted):
        if outcome.result is not Result.DONE:
            return Finding(False, subject, outcome.error, _CURE)
    return Finding(True, subject, "an object was stored and deleted")
