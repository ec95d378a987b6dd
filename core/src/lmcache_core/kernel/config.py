"""What a kernel is built from."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lmcache_core import limits
from lmcache_core.errors import UsageError
from lmcache_core.kernel.ledger import Caps


@dataclass(slots=True)
class KernelConfig:
    """Sizes and times of one kernel.

    `pool_bytes` counts only the slab area, which starts at `data_offset` in the segment. `slab_bytes` is the unit into
    which it is divided; 0 means `allocator.slab_bytes_for(pool_bytes)`.
    """

    pool_bytes: int
    data_offset: int = 0
    slab_bytes: int = 0
    write_ttl_s: float = limits.WRITE_TTL_S
    read_ttl_s: float = limits.READ_TTL_S
    promise_ttl_s: float = limits.PROMISE_TTL_S
    watermark: float = limits.L1_WATERMARK
    evict_ratio: float = limits.EVICT_RATIO
    quarantine_fraction_max: float = limits.QUARANTINE_FRACTION_MAX
    quarantine_fraction_per_uid_max: float = limits.QUARANTINE_FRACTION_PER_UID_MAX
    pinned_fraction_max: float = limits.PINNED_FRACTION_MAX
    promised_fraction_max: float = limits.PROMISED_FRACTION_MAX
    promised_fraction_per_session_max: float = limits.PROMISED_FRACTION_PER_SESSION_MAX
    read_fraction_max: float = limits.READ_FRACTION_MAX
    read_fraction_per_session_max: float = limits.READ_FRACTION_PER_SESSION_MAX
    pinned_fraction_per_holder_max: float = limits.PINNED_FRACTION_PER_HOLDER_MAX
    pinned_fraction_per_session_max: float = limits.PINNED_FRACTION_PER_SESSION_MAX
    written_fraction_max: float = 1.0  # of one holder, while there are others; 1: all. Servers have less
    settled_leases_remembered: int = limits.SETTLED_LEASES_REMEMBERED
    keeps_dirty: bool = False  # refuse a store rather than evict what tiers do not have yet
    lost_keys_remembered: int = 32_768  # to explain misses: about 5 MB at most

    def __post_init__(self) -> None:
        for name in (
            "watermark", "evict_ratio", "quarantine_fraction_max", "quarantine_fraction_per_uid_max",
            "pinned_fraction_max", "promised_fraction_max", "promised_fraction_per_session_max", "read_fraction_max",
            "read_fraction_per_session_max", "pinned_fraction_per_holder_max", "pinned_fraction_per_session_max",
            "written_fraction_max",
        ):  # fmt: skip
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)} and must be above 0 and at most 1")
        for name in ("write_ttl_s", "read_ttl_s", "promise_ttl_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)} and must be above 0")
        if self.data_offset % limits.PAGE_BYTES:
            raise UsageError(f"data_offset {self.data_offset:#x} must be a multiple of {limits.PAGE_BYTES}")
        if not 0 < self.pool_bytes <= limits.POOL_BYTES_MAX:
            raise UsageError(f"pool_bytes {self.pool_bytes:,} must be above 0 and at most {limits.POOL_BYTES_MAX:,}")

    @property
    def caps(self) -> Caps:
        """The caps in bytes."""
        of_session = (
            self.promised_fraction_per_session_max,
            self.read_fraction_per_session_max,
            self.pinned_fraction_per_session_max,
        )
        of_holder = (self.promised_fraction_max, self.read_fraction_max, self.pinned_fraction_per_holder_max)
        written = int(self.written_fraction_max * self.pool_bytes) if self.written_fraction_max < 1 else sys.maxsize
        return Caps(self._bytes(of_session), self._bytes(of_holder), written)

    def _bytes(self, fractions: tuple[float, float, float]) -> tuple[int, int, int]:
        promised, read, pinned = (int(fraction * self.pool_bytes) for fraction in fractions)
        return promised, read, pinned
