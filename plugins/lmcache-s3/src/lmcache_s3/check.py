"""What `lmcache-core check` checks for each S3 tier."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Outcome, Result, StoreItem
from lmcache_s3.adapter import S3Adapter
from lmcache_s3.client import Place, S3Client
from lmcache_s3.errors import Errors, LinkError, skew_s
from lmcache_s3.names import Names
from lmcache_s3.settings import S3Settings

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

_PROBE_BYTES = 1 << 20
_SECONDS_MAX = 8.0
_SKEW_S_MAX = 60.0  # S3 refuses signatures from 900 s on; a clock that is a minute off will get there


def check_tiers(settings: Settings) -> list[Finding]:
    """Findings for every tier of type s3."""
    findings: list[Finding] = []
    for name, tier in settings.l2.items():
        if isinstance(tier.settings, S3Settings):
            findings += check_tier(name, tier.settings)
    return findings


def check_tier(name: str, settings: S3Settings) -> list[Finding]:
    """Can the bucket be reached and listed, may objects be stored, loaded and deleted, and is the clock right?"""
    subject = f"tier {name!r} (bucket {settings.bucket!r})"
    deadline = time.monotonic() + _SECONDS_MAX
    client = S3Client(settings, 1, name)
    try:
        _, answer = client.list(Names(settings.prefix).prefix, Place(), 1, deadline)
        # A client with the payloads' transport, so that proxies and TLS are tried too.
        client.head("lmcache-check", deadline)
        transport = client.transport
    except LinkError as error:
        cure = f"check l2.{name}.endpoint_url, the credentials, and the network"
        return [Finding(False, subject, str(error), cure)]
    finally:
        client.close()
    if not answer.ok:
        words = Errors(name, settings.bucket).refused("list", answer)
        return [Finding(False, subject, *_parted(words)), *_clock(subject, skew_s(answer.headers))]
    findings = [Finding(True, subject, f"the bucket answers; payloads move by the {transport} transport")]
    findings += _clock(subject, skew_s(answer.headers))
    try:
        with S3Adapter(settings, AdapterContext(tier=name)) as adapter:
            wrong = _round_trip(adapter, deadline)
    except TierError as failure:
        wrong = str(failure)
    if wrong:
        return [*findings, Finding(False, subject, *_parted(wrong))]
    return [*findings, Finding(True, subject, "an object was stored, loaded and deleted")]


def _clock(subject: str, skew: float | None) -> list[Finding]:
    if skew is None:
        return []
    well = abs(skew) <= _SKEW_S_MAX
    cure = "" if well else "correct this machine's clock (chrony, systemd-timesyncd)"
    return [Finding(well, subject, f"the clocks differ by {skew:+.0f} s", cure)]


def _round_trip(adapter: S3Adapter, deadline: float) -> str:
    key, content = b"lmcache-check" + os.urandom(16), os.urandom(_PROBE_BYTES)
    stored = adapter.store([StoreItem(key, [memoryview(content)])], deadline)[0]
    if stored.result is not Result.DONE:
        return _error(stored)
    back = bytearray(_PROBE_BYTES)
    loaded = adapter.load([LoadItem(key, [memoryview(back)])], deadline)[0]
    deleted = adapter.delete([key], deadline)[0]
    if loaded.result is not Result.DONE:
        return _error(loaded)
    if back != content:
        return "an object came back with different bytes: do not use this service"
    return "" if deleted.result is Result.DONE else _error(deleted)


def _error(outcome: Outcome) -> str:
    return outcome.error or f"an object that was just stored came back as {outcome.result}"


def _parted(words: str) -> tuple[str, str]:
    """What happened, and the cure after the last colon."""
    message, _, cure = words.rpartition(": ")
    return (message, cure) if message else (cure, "look at the service's log")
