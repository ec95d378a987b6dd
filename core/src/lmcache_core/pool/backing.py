"""Where the pool's memory is: a named file in /dev/shm, an unnamed memfd, perhaps on huge pages, or a disk's file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import PoolError, UsageError
from lmcache_core.limits import HUGE_PAGE_BYTES, POOL_NAME_BYTES_MAX

SHM_DIR = Path("/dev/shm")
FILE_PREFIX = "lmcache-core."
LIFELINE_NAME = "lifeline"  # the server's socket in its runtime directory
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*\Z")


class Backing(StrEnum):
    """The kind of the pool's memory."""

    SHM = "shm"  # named: tools and other containers attach by name
    MEMFD = "memfd"  # no name to leak, no limit of /dev/shm, and sealed: no worker can truncate it
    HUGETLB = "hugetlb"  # like memfd, with pages that vm.nr_hugepages reserves
    FILE = "file"  # at a path that the settings name: it outlives a reboot (`pool/on_disk.py`)

    @property
    def has_name(self) -> bool:
        """Whether the next server finds the pool of a dead one."""
        return self in (Backing.SHM, Backing.FILE)

    @property
    def page_bytes(self) -> int:
        """The unit in which the segment grows."""
        return HUGE_PAGE_BYTES if self is Backing.HUGETLB else 4096


class Access(StrEnum):
    """Who may open the pool."""

    OWNER = "owner"  # the server's uid: mode 0600
    GROUP = "group"  # the listed gids too: mode 0660


def check_name(name: str) -> str:
    """Returns the name, or raises a UsageError that says what is allowed."""
    if len(name) > POOL_NAME_BYTES_MAX or not _NAME.match(name):
        raise UsageError(
            f"{name!r} is not a valid pool name: use up to {POOL_NAME_BYTES_MAX} of a-z, 0-9, _ and -, "
            "starting with a letter or a digit"
        )
    return name


def segment_path(name: str, shm_dir: Path = SHM_DIR, *, uid: int | None = None) -> Path:
    """The file of a pool with backing shm, for a server of this uid (None: ours): each user has separate names."""
    return shm_dir / f"{FILE_PREFIX}{os.geteuid() if uid is None else uid}.{check_name(name)}"


def create_memfd(name: str, backing: Backing) -> int:
    """A new, empty, unnamed segment, close-on-exec, that can still be sealed."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if backing is Backing.HUGETLB:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        return os.memfd_create(f"{FILE_PREFIX}{name}", flags)
    except OSError as error:
        raise PoolError(
            f'no {backing} segment can be made for pool {name!r}: {error.strerror}; set l1.backing = "shm"'
        ) from error


def seal(fd: int) -> None:
    """Fix the size forever: if a worker truncated it, all others would get SIGBUS."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def reopen(fd: int) -> Descriptor:
    """A second open file description of the same segment, which shares no lock and no position with the first."""
    try:
        return Descriptor(os.open, f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        none_left = error.errno in (errno.EMFILE, errno.ENFILE)
        cure = (
            "see ulimit -n"
            if none_left
            else ("this process needs /proc, and read and write access by its uid or a gid of l1.gids")
        )
        raise PoolError(
            f"the pool's segment cannot be opened again through /proc/self/fd: {error.strerror}; {cure}"
        ) from error


def grant_access(
    target: int | Path, access: Access, gids: Sequence[int], *, owner_bits: int = 6, group_bits: int = 6
) -> None:
    """Set mode and groups of a segment, socket or directory that this process owns (`rwx` bits: 4, 2, 1).

    The first gid becomes the file's group; more of them need access lists, which tmpfs has and memfd lacks.
    """
    if access is Access.OWNER:
        os.chmod(target, owner_bits << 6)  # noqa: PTH101 - a descriptor, or a path
        return
    if not gids:
        raise UsageError('access = "group" names no gid: list those of the engine processes')
    try:
        os.chown(target, -1, gids[0])
        os.chmod(target, owner_bits << 6 | group_bits << 3)  # noqa: PTH101
        if len(gids) > 1:
            os.setxattr(target, "system.posix_acl_access", _access_list(gids[1:], owner_bits, group_bits))
    except OSError as error:
        what = target if isinstance(target, Path) else "the pool"
        raise PoolError(
            f"{what} cannot be opened to gids {', '.join(map(str, gids))}: {error.strerror}; the server must "
            "be a member of the first, and more than one needs a file system with access lists"
        ) from error


def _access_list(more_gids: Sequence[int], owner_bits: int, group_bits: int) -> bytes:
    """The kernel's form of an access list: version 2, then (tag, permissions, id), ids ascending."""
    undefined = 0xFFFFFFFF
    entries = [(0x01, owner_bits, undefined), (0x04, group_bits, undefined)]  # owner, owning group
    entries += [(0x08, group_bits, gid) for gid in sorted(set(more_gids))]
    entries += [(0x10, group_bits, undefined), (0x20, 0, undefined)]  # mask, others
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
