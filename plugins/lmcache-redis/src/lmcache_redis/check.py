"""What `lmcache-core check` says of each server of a Redis tier: its memory, and limits that cut objects off."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_core.plugins.components import Finding
from lmcache_redis.settings import RedisSettings

BULK_LIMIT, BUFFER_LIMIT = "proto-max-bulk-len", "client-output-buffer-limit"
OBJECT_BYTES_MAX = 512 << 20  # proto-max-bulk-len, unless a server is set lower
_POLICY_ADVICE = "CONFIG SET maxmemory-policy allkeys-lru (or allkeys-lfu), and in the server's configuration file"


def memory_finding(address: object, settings: RedisSettings, memory: dict[str, str]) -> Finding:
    """What happens when the server at `address` is full. `memory`: its INFO memory."""
    limit, policy = int(memory.get("maxmemory", "0")), memory.get("maxmemory_policy", "unknown")
    if not limit:
        cure = "set maxmemory to what the machine can spare, and a policy that evicts"
        about = f"{address}: maxmemory is not set: the server grows until the machine has no memory"
        return Finding(False, "", about, cure)
    about = f"{address}: maxmemory is {limit / 2**30:.2f} GiB, with policy {policy}"
    if policy == "noeviction" or (policy.startswith("volatile") and settings.ttl_s is None):
        return Finding(False, "", f"{about}: once it is full, nothing more is stored", _POLICY_ADVICE)
    return Finding(True, "", about)


def limit_findings(address: object, limits: dict[str, str]) -> Iterator[Finding]:
    """Limits of the server that cut large objects off, as far as it tells them."""
    bulk = int(limits[BULK_LIMIT]) if limits.get(BULK_LIMIT, "").isdigit() else OBJECT_BYTES_MAX
    if bulk < OBJECT_BYTES_MAX:
        about = f"{address}: {BULK_LIMIT} is {bulk:,} bytes: a larger object is refused, and its connection is closed"
        yield Finding(False, "", about, f"CONFIG SET {BULK_LIMIT} 512mb, or use smaller chunks")
    hard = _hard_limit(limits.get(BUFFER_LIMIT, ""))
    if 0 < hard < OBJECT_BYTES_MAX:
        about = f"{address}: {BUFFER_LIMIT} of normal clients is {hard:,} bytes: a load of more is cut off"
        yield Finding(False, "", about, f"CONFIG SET {BUFFER_LIMIT} 'normal 0 0 0'")


def _hard_limit(text: str) -> int:
    """Of `normal HARD SOFT SECONDS slave …`; 0: none, or not known."""
    fields = text.split()
    at = fields.index("normal") + 1 if "normal" in fields else len(fields)
    return int(fields[at]) if at < len(fields) and fields[at].isdigit() else 0
