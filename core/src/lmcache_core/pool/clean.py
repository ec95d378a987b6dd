"""Finds and removes what dead servers left behind. Never touches what a living one uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lmcache_core.errors import PoolBusyError, PoolError, UntrustedError, UsageError
from lmcache_core.pool.backing import FILE_PREFIX, SHM_DIR, check_name
from lmcache_core.pool.header import KEPT_OFFSET
from lmcache_core.pool.ownership import OwnerLock, free_segment
from lmcache_core.trust import Trust


class CleanState(StrEnum):
    """What happened to a file."""

    REMOVED = "removed"
    WOULD_REMOVE = "would remove"
    OWNER_LIVES = "owner lives"
    KEPT = "kept for the next server"  # its last server kept it on purpose: removed only if it is named
    REFUSED = "refused"  # usually another user's


@dataclass(frozen=True)
class Cleaned:
    """One file that was found. `nbytes`: memory that was freed, or would be."""

    path: Path
    state: CleanState
    nbytes: int = 0
    reason: str = ""


def clean(
    runtime_dir: Path | None = None,
    names: Sequence[str] = (),
    *,
    dry_run: bool = False,
    shm_dir: Path = SHM_DIR,
) -> list[Cleaned]:
    """Remove segments, lock files and sockets of dead servers of our uid.

    `names` limits this to these pools, and includes those of them that were kept for the next server. Lock files
    NAME.lock are searched in `runtime_dir` and one level below. With a lock file, the socket NAME.sock beside it is
    removed, or, in a directory called NAME, every socket there and the directory itself, if it is then empty. A server
    is dead if its lock is free.
    """
    wanted = {check_name(name) for name in names}
    found: list[Cleaned] = []
    for path in _segments(shm_dir):
        if _selected(path.name.rpartition(".")[2], wanted):
            found += _clean(path, dry_run, segment=True, kept_too=bool(wanted))
    if runtime_dir is None or not runtime_dir.is_dir():
        return found
    trust, refused = Trust.of_server(), dict[Path, str]()
    for path in [*_files(runtime_dir, "*.lock"), *_files(runtime_dir, "*/*.lock")]:
        if not _selected(path.stem, wanted):
            continue
        try:
            trust.open_directory(path.parent).close()
        except (UntrustedError, OSError) as error:
            refused[path.parent] = str(error)
        else:
            found += _clean(path, dry_run, segment=False, kept_too=True)
    return [*found, *(Cleaned(path, CleanState.REFUSED, reason=reason) for path, reason in refused.items())]


def _segments(shm_dir: Path) -> list[Path]:
    """Files with our uid in the name, and those of our own older versions: names without a uid may be anybody's."""
    former = (path for path in _files(shm_dir, f"{FILE_PREFIX}*") if "." not in path.name.removeprefix(FILE_PREFIX))
    return [
        *_files(shm_dir, f"{FILE_PREFIX}{os.geteuid()}.*"),
        *(path for path in former if path.lstat().st_uid == os.geteuid()),
    ]


def _files(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern)) if directory.is_dir() else []


def _selected(name: str, wanted: set[str]) -> bool:
    with contextlib.suppress(UsageError):
        return check_name(name) in wanted if wanted else bool(check_name(name))
    return False  # not a pool's name, so somebody else's file


def _clean(path: Path, dry_run: bool, *, segment: bool, kept_too: bool) -> Iterator[Cleaned]:
    try:
        lock = OwnerLock.acquire_existing(path)
    except PoolBusyError:
        yield Cleaned(path, CleanState.OWNER_LIVES)
        return
    except PoolError as error:
        yield Cleaned(path, CleanState.REFUSED, reason=str(error))
        return
    if lock is None:
        return  # its owner has just removed it by itself
    with contextlib.closing(lock):
        nbytes = os.fstat(lock.fileno()).st_blocks * 512 if segment else 0
        if segment and not kept_too and _kept(lock.fileno()):
            yield Cleaned(path, CleanState.KEPT, nbytes)
            return
        if dry_run:
            yield Cleaned(path, CleanState.WOULD_REMOVE, nbytes)
            return
        try:
            if segment:
                free_segment(lock)
            else:
                _remove_sockets(path)
                lock.unlink()
                if path.parent.name == path.stem:
                    with contextlib.suppress(OSError):  # something else may be in it
                        path.parent.rmdir()
        except (PoolError, OSError) as error:
            yield Cleaned(path, CleanState.REFUSED, reason=str(error))
            return
        yield Cleaned(path, CleanState.REMOVED, nbytes)


def _kept(fd: int) -> bool:
    return any(os.pread(fd, 8, KEPT_OFFSET))


def _remove_sockets(lock_path: Path) -> None:
    """The sockets that the lock covers: the one with the same name, and in a directory of the pool's own, all of
    them."""
    own_directory = lock_path.parent.name == lock_path.stem
    for path in lock_path.parent.glob("*" if own_directory else f"{lock_path.stem}.sock"):
        if path.is_socket():
            path.unlink()
