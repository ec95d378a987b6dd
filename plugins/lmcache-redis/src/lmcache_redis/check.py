"""What `lmcache-core check` checks for each Redis tier."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem
from lmcache_redis.adapter import RedisAdapter
from lmcache_redis.errors import parted
from lmcache_redis.settings import RedisSettings

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

_PROBE_BYTES = 1 << 20
_SECONDS_MAX = 4.0  # for each of two steps: the command has ten
_POLICY_ADVICE = "CONFIG SET maxmemory-policy allkeys-lru (or allkeys-lfu), and in the server's configuration file"


def check_tiers(settings: Settings) -> list[Finding]:
    """Findings for every tier of type redis."""
    findings: list[Finding] = []
    for name, tier in settings.l2.items():
        if isinstance(tier.settings, RedisSettings):
            findings += check_tier(name, tier.settings)
    return findings


def check_tier(name: str, settings: RedisSettings) -> list[Finding]:
    """Can it be reached, has our user the rights that the adapter needs, and what happens when it is full?"""
    subject = f"tier {name!r} ({_place(settings)})"
    otherwise = f"check l2.{name}, which says where the server is, and the server and the network"
    with RedisAdapter(settings, AdapterContext(tier=name)) as adapter:
        try:
            error = _round_trip(adapter)
            if error:
                return [Finding(False, subject, *parted(error, otherwise))]
            findings = [Finding(True, subject, "an object was stored, looked up, loaded and deleted")]
            figures = adapter.memory(time.monotonic() + _SECONDS_MAX)
        except TierError as failure:
            return [Finding(False, subject, *parted(str(failure), otherwise))]
    for address, memory in figures.items():
        findings.append(_memory_finding(f"{subject} at {address}", settings, memory))
    return findings


def _place(settings: RedisSettings) -> str:
    """Where the tier is, without its secrets."""
    if settings.nodes:
        return f"{settings.mode} {', '.join(settings.nodes)}"
    return settings.socket_path or f"{settings.mode} {':'.join(map(str, settings.server))}"


def _round_trip(adapter: RedisAdapter) -> str:
    deadline = time.monotonic() + _SECONDS_MAX
    key, content = b"lmcache-check" + os.urandom(16), os.urandom(_PROBE_BYTES)
    stored = adapter.store([StoreItem(key, [memoryview(content)])], deadline)[0]
    if stored.result is not Result.DONE:
        return stored.error
    back = bytearray(_PROBE_BYTES)
    there = adapter.exists([key], deadline)[0]
    loaded = adapter.load([LoadItem(key, [memoryview(back)])], deadline)[0]
    deleted = adapter.delete([key], deadline)[0]
    adapter.scan(None, deadline)
    if loaded.result is not Result.DONE or not there:
        return loaded.error or f"an object that was just stored came back as {loaded.result}"
    if deleted.result is not Result.DONE:
        return deleted.error
    return "" if back == content else "an object came back with different bytes: do not use this server"


def _memory_finding(subject: str, settings: RedisSettings, memory: dict[str, str]) -> Finding:
    limit, policy = int(memory.get("maxmemory", "0")), memory.get("maxmemory_policy", "unknown")
    if not limit:
        cure = "set maxmemory to what the machine can spare, and a policy that evicts"
        return Finding(False, subject, "maxmemory is not set: the server grows until the machine has no memory", cure)
    about = f"maxmemory is {limit / 2**30:.2f} GiB, with policy {policy}"
    if policy == "noeviction" or (policy.startswith("volatile") and settings.ttl_s is None):
        return Finding(False, subject, f"{about}: once it is full, nothing more is stored", _POLICY_ADVICE)
    return Finding(True, subject, about)
