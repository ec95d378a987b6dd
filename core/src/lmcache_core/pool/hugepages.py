"""How much of the pool is on huge pages: what the kernel counts, since its return codes do not say."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.pool.segment import Segment


def huge_page_fraction(segment: Segment, smaps: Path = Path("/proc/self/smaps")) -> float:
    """The part of the data area, 0 to 1, that this process maps with huge pages.

    Walks the page tables of the whole process (about 50 ms for a GiB of small pages): for `status`, not for a
    timer.
    """
    mapping = segment.mapping
    start, end = mapping.address, mapping.address + mapping.nbytes
    huge_kib, inside = 0, False
    with open(smaps) as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):  # a mapping's first line: "start-end perms offset …"
                low, _, high = first.partition("-")
                inside = start <= int(low, 16) and int(high, 16) <= end
            elif inside and first in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
                huge_kib += int(rest.split()[0])
    return min(huge_kib * 1024 / segment.info.data_bytes, 1.0)
