"""How much memory is available: on the mount, on the machine and in every control group above this process.

In a control group that is too small, an allocation ends in an OOM kill and not in an error. So the room is checked
before anything is allocated, and again before each step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath

from lmcache_core.errors import NotEnoughMemoryError
from lmcache_core.limits import HUGE_PAGE_BYTES, ROOM_RESERVE_BYTES_MAX, ROOM_RESERVE_FRACTION
from lmcache_core.pool.backing import SHM_DIR, Backing

_GIB = 1 << 30
_UNLIMITED_BYTES = 1 << 62  # version 1 writes its "no limit" as the largest page-aligned i64


class LimitedBy(StrEnum):
    """What has the least room."""

    MOUNT = "mount"
    MACHINE = "machine"
    CONTROL_GROUP = "control group"
    DISK = "disk"


@dataclass(frozen=True)
class Room:
    """Bytes that can still be allocated, and what limits them.

    `figures` holds the room of everything that was asked, under a readable name.
    """

    available_bytes: int
    limited_by: LimitedBy
    where: str
    figures: dict[str, int] = field(default_factory=dict)


def room(backing: Backing = Backing.SHM, *, mount: Path = SHM_DIR, root: Path = Path("/")) -> Room:
    """The least of: free on the mount, available on the machine, limit minus usage of every control group.

    `mount` counts for a backing with a name; a file on a disk needs nothing else, as the system writes its pages back
    when memory is short. Machine and control groups each keep a reserve for everyone else.
    `root` is where /proc and /sys are looked up. What cannot be read sets no limit.
    """
    rooms: list[tuple[int, LimitedBy, str]] = []
    memory = _meminfo(root)
    if backing is Backing.HUGETLB:
        free = (memory.get("HugePages_Free", 0) - memory.get("HugePages_Rsvd", 0)) * HUGE_PAGE_BYTES
        # Huge pages were taken from the machine when they were reserved, and memory groups do not count them.
        rooms.append((free, LimitedBy.MACHINE, "huge pages"))
    elif backing is not Backing.FILE:
        if "MemAvailable" in memory:
            spare = (memory["MemAvailable"] * 1024) - _reserve(memory["MemTotal"] * 1024)
            rooms.append((spare, LimitedBy.MACHINE, "the machine"))
        for path, limit, used in control_groups(root):
            rooms.append((limit - used - _reserve(limit), LimitedBy.CONTROL_GROUP, f"control group {path}"))
    if backing.has_name:
        held = os.statvfs(mount)
        if held.f_blocks:  # 0 blocks: a mount without a limit
            limited_by = LimitedBy.DISK if backing is Backing.FILE else LimitedBy.MOUNT
            rooms.append((held.f_bavail * held.f_frsize, limited_by, str(mount)))
    nothing_known = (_UNLIMITED_BYTES, LimitedBy.MACHINE, "the machine")
    least, by, where = min(rooms, key=lambda entry: entry[0], default=nothing_known)
    return Room(max(least, 0), by, where, {name: max(nbytes, 0) for nbytes, _, name in rooms})


def check_room(needed_bytes: int, found: Room, *, what: str = "the L1 pool") -> None:
    """Raise NotEnoughMemoryError, with the figures and the cure, unless `needed_bytes` fit into `found`."""
    if needed_bytes <= found.available_bytes:
        return
    has, needs = _gib(found.available_bytes), _gib(needed_bytes)
    whole_gib = -(-needed_bytes // _GIB)
    if found.limited_by is LimitedBy.DISK:
        raise NotEnoughMemoryError(
            f"{found.where} has {has} GiB free and {what} needs {needs} GiB",
            cure="free some there, make the pool smaller, or name another disk in l1.path",
        )
    if found.limited_by is LimitedBy.MOUNT:
        raise NotEnoughMemoryError(
            f"{found.where} holds {has} GiB free and {what} needs {needs} GiB",
            cure=f"start the container with --shm-size={whole_gib + 1}g (Kubernetes: mount a volume with "
            'emptyDir.medium: Memory there), set l1.backing = "memfd", or make the pool smaller',
        )
    if found.limited_by is LimitedBy.CONTROL_GROUP:
        raise NotEnoughMemoryError(
            f"{found.where} has room for {has} GiB more and {what} needs {needs} GiB",
            cure="raise the container's memory limit (docker --memory, Kubernetes resources.limits.memory), or make "
            "the pool smaller",
        )
    if found.where == "huge pages":
        pages = -(-needed_bytes // HUGE_PAGE_BYTES)
        raise NotEnoughMemoryError(
            f"the machine has {has} GiB of free huge pages and {what} needs {needs} GiB",
            cure=f'reserve them with sysctl vm.nr_hugepages={pages} or more, or set l1.backing = "memfd"',
        )
    raise NotEnoughMemoryError(
        f"the machine has {has} GiB of memory to give and {what} needs {needs} GiB",
        cure="make the pool smaller, or free memory (MemAvailable in /proc/meminfo counts)",
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}" if nbytes >= _GIB // 100 else f"{nbytes / _GIB:.4f}"


def _reserve(of_bytes: int) -> int:
    return min(ROOM_RESERVE_BYTES_MAX, int(of_bytes * ROOM_RESERVE_FRACTION))


def _meminfo(root: Path) -> dict[str, int]:
    """The numbers of /proc/meminfo: in KiB, except HugePages_*, which count pages."""
    found = {}
    for line in read_lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0])
    return found


# --- control groups -----------------------------------------------------------------------------------------


def control_groups(root: Path = Path("/")) -> Iterator[tuple[str, int, int]]:
    """(path, limit, usage) in bytes of each limited memory group of this process, innermost first.

    Usage leaves out inactive page cache: the kernel drops it before it kills.
    """
    for version, directory in group_directories("memory", root):
        figures = (_read_v2 if version == 2 else _read_v1)(root / directory.relative_to("/"))
        if figures is not None and figures[0] < _UNLIMITED_BYTES:
            yield (str(directory), *figures)


def group_directories(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, PurePosixPath]]:
    """(version, directory) of this process's control groups for that controller and of their ancestors, innermost
    first. In a version 2 hierarchy the controller may be off in a directory: then its files are missing there."""
    mounts = list(_mounts(root))
    for line in read_lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            wanted, version = "cgroup2", 2
        elif controller in controllers.split(","):
            wanted, version = "cgroup", 1
        else:
            continue
        for kind, mounted_root, mount_point, options in mounts:
            if kind != wanted or (kind == "cgroup" and controller not in options):
                continue
            for directory in _ancestors(PurePosixPath(path), mounted_root, mount_point):
                yield version, directory
            break


def _ancestors(path: PurePosixPath, mounted_root: PurePosixPath, mount_point: PurePosixPath) -> list[PurePosixPath]:
    """Directories of the group and its ancestors, as far up as this mount shows them."""
    # In a container without a namespace of its own the mount shows a subtree, and the path is the host's.
    inside = path.relative_to(mounted_root) if path.is_relative_to(mounted_root) else PurePosixPath()
    if ".." in inside.parts:  # a group outside the namespace: only its root can be seen
        inside = PurePosixPath()
    here = mount_point / inside
    return [here, *(up for up in here.parents if up.is_relative_to(mount_point))]


def _mounts(root: Path) -> Iterator[tuple[str, PurePosixPath, PurePosixPath, list[str]]]:
    """(file system, mounted root, mount point, super options) of each control group mount."""
    for line in read_lines(root / "proc/self/mountinfo"):
        front, _, back = line.partition(" - ")
        before, after = front.split(), back.split()
        if len(before) < 5 or len(after) < 3 or not after[0].startswith("cgroup"):
            continue
        yield after[0], _unescaped(before[3]), _unescaped(before[4]), after[2].split(",")


def _unescaped(field_text: str) -> PurePosixPath:
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field_text))


def read_lines(path: Path) -> list[str]:
    """The lines of a file of the operating system; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # no such kernel feature, or hidden from us: nothing to learn here


def _read_v2(directory: Path) -> tuple[int, int] | None:
    limits = [_number(directory / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    used = _number(directory / "memory.current")
    if not known or used is None:
        return None
    # Above memory.high nothing is killed, but shared memory cannot be reclaimed: everything would crawl.
    return min(known), max(used - _inactive_file(directory, "inactive_file"), 0)


def _read_v1(directory: Path) -> tuple[int, int] | None:
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit, max(used - _inactive_file(directory, "total_inactive_file"), 0)


def _number(path: Path) -> int | None:
    """The number in a file. None for "max", for a missing file, and for anything that is no number."""
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _inactive_file(directory: Path, name: str) -> int:
    for line in read_lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
