"""A pool on a file of a disk: `l1.backing = "file"`. What is other than in memory, in one place.

The file is mapped as memory is, so the system's page cache stands between the pool and its disk: pages come and go as
it likes, and each is written back some time after it was changed. So what a disk has after a power cut is of different
moments, page by page, and a page may itself be torn. After a reboot therefore (the boot's number in the header is
another one) nothing is believed: an entry must have its seal, and its object is compared with its checksum by whoever
reads it first. Whatever a clear had removed might be there again, so the second of the last clear is on the disk before
a clear is answered; what was stored up to then is not adopted. A server that ends in good order flushes everything and
says so; then only the checksums are compared.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from lmcache_core.errors import NotEnoughMemoryError, PoolError, PoolMismatchError, UntrustedError
from lmcache_core.files import FULL, reason_of
from lmcache_core.pool import header as headers
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.header import MAGIC, WORKER_ROW_BYTES, Header
from lmcache_core.pool.lifelock import lock_is_free
from lmcache_core.pool.processes import our_boot
from lmcache_core.trust import Trust

MAKING = b"LMCMAKE\0"  # in place of the magic, until the header is complete: the file is ours, and holds nothing
_NETWORKS = frozenset(("9p", "afs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"))
_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))


def check_place(path: Path) -> None:
    """Raises `PoolError` unless a pool can be made, or found, at this path: its directory is there, only we and root
    can replace what is in it, and it is on this machine."""
    try:
        Trust.of_server().open_directory(path.parent).close()
    except FileNotFoundError:
        raise PoolError(
            f"{path.parent} does not exist: create it, or mount its disk first (l1.path; in a unit of systemd: "
            "RequiresMountsFor=)"
        ) from None
    except (UntrustedError, OSError) as error:
        raise PoolError(f"{path.parent} cannot hold a pool: {error}; name another directory in l1.path") from error
    kind = file_system_of(path.parent)
    if kind in _NETWORKS or kind.startswith("fuse"):
        raise PoolError(
            f"{path.parent} is on {kind}, and processes of other machines may map the same file: name a directory on a "
            "disk of this machine in l1.path"
        )


def lies_in_memory(path: Path) -> str:
    """The file system's name, if what is at this path ends with the machine; else empty."""
    kind = file_system_of(path.parent)
    return kind if kind in _MEMORY else ""


def file_system_of(directory: Path) -> str:
    """As the system names it; empty: unknown."""
    real, best, found = os.fspath(directory.resolve()), -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            front, _, back = line.partition(" - ")
            mount = front.split()[4].encode().decode("unicode_escape", errors="replace")
            if len(mount) >= best and (real == mount or real.startswith(mount.rstrip("/") + "/")):
                best, found = len(mount), back.split()[0]
    return found


def is_pool(fd: int) -> bool:
    """Whether this file is a pool, or was about to become one."""
    return os.pread(fd, len(MAGIC), 0) in (MAGIC, MAKING)


def check_ours(fd: int, path: Path, name: str) -> None:
    """Raises `PoolError`, and touches nothing, unless this file is a pool of this name, or was about to become one."""
    page = os.pread(fd, headers.HEADER_BYTES, 0)
    other = "use another l1.path, or move the file away"
    if not is_pool(fd):
        raise PoolError(f"{path} is there and is not a pool of lmcache-core, so it is not touched: {other}")
    with contextlib.suppress(PoolMismatchError):
        if (found := headers.decode(page).name) != name:
            raise PoolError(f"{path} is the pool of the server {found!r}, so it is not touched: {other}")


def nobody_maps(fd: int, header: Header) -> bool:
    """Whether this pool was last served before the machine started anew, so that no worker can map it. A worker's life
    lock disproves that: a container may have a number of its own for the boot."""
    if header.backing is not Backing.FILE:
        return False
    if is_of_this_boot(int.from_bytes(os.pread(fd, 8, headers.BOOT_OFFSET), "little")):
        return False
    return lock_is_free(fd, header.workers_offset, header.worker_rows * WORKER_ROW_BYTES)


def is_of_this_boot(word: int) -> bool:
    """Whether the word at `BOOT_OFFSET` names this boot of the machine. A boot without a number is no boot's."""
    return word != 0 and word == our_boot()


def allocate(fd: int, header: Header, path: Path) -> None:
    """Give the file all of its blocks, unless it has them: a write to a hole of a full disk would be a SIGBUS. One that
    was copied, or brought back from a backup, may have holes."""
    if os.fstat(fd).st_blocks * 512 >= header.segment_bytes:
        return
    try:
        os.posix_fallocate(fd, 0, header.segment_bytes)
    except OSError as error:
        kind = NotEnoughMemoryError if error.errno in (*FULL, errno.EFBIG) else PoolError
        why = reason_of(error, path.parent)
        raise kind(
            f"pool {header.name!r} got no room for its {header.segment_bytes:,} bytes at {path}: {why}; "
            "free some there, make the pool smaller, or name another disk in l1.path"
        ) from error
