"""How much of the pool is on huge pages: counted from the page tables, because return codes do not say it."""

from __future__ import annotations

import fcntl
import struct
from array import array
from pathlib import Path

from lmcache_core.pool.segment import Segment

# include/uapi/linux/fs.h, since Linux 6.7: size, flags, start, end, walk_end, vec, vec_len, max_pages, and the masks of
# categories: inverted, all of, any of, returned. What is found are regions of start, end and categories.
_SCAN = struct.Struct("=12Q")
_PAGEMAP_SCAN = 3 << 30 | _SCAN.size << 16 | ord("f") << 8 | 16
_PAGE_IS_HUGE = 1 << 6
_REGIONS_MAX = 1024
_SCAN_BYTES = 64 << 20  # per call: 0.1 ms for small pages


def huge_page_fraction(segment: Segment, smaps: Path = Path("/proc/self/smaps")) -> float:
    """The part of the data area, 0 to 1, that this process maps with huge pages.

    Walks the process's page tables in steps of 0.1 ms; on Linux before 6.7 all of them at once (18 ms for a GiB of
    small pages), and meanwhile no thread can get memory from the system. Do not call it from a timer.
    """
    try:
        huge_bytes = _scanned(segment)
    except OSError:
        huge_bytes = from_smaps(segment, smaps)
    return min(huge_bytes / segment.info.data_bytes, 1.0)


def _scanned(segment: Segment) -> int:
    """Raises OSError if the kernel does not support it."""
    at = segment.mapping.address + segment.header.data_offset
    end = at + segment.info.data_bytes
    regions = array("Q", bytes(24 * _REGIONS_MAX))
    huge_bytes = 0
    with open("/proc/self/pagemap", "rb") as pagemap:
        while at < end:
            stop = min(end, at + _SCAN_BYTES)
            argument = bytearray(
                _SCAN.pack(_SCAN.size, 0, at, stop, 0, regions.buffer_info()[0], _REGIONS_MAX, 0, 0,
                           _PAGE_IS_HUGE, 0, _PAGE_IS_HUGE)
            )  # fmt: skip
            found = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
            huge_bytes += sum(regions[1 : 3 * found : 3]) - sum(regions[0 : 3 * found : 3])
            at = _SCAN.unpack(argument)[4]
    return huge_bytes


def from_smaps(segment: Segment, smaps: Path) -> int:
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
    return huge_kib * 1024
