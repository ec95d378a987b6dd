"""Finds and removes what dead servers left behind. Never touches what a living one uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import PoolBusyError, PoolError, UntrustedError, UsageError
from lmcache_core.pool import on_disk
from lmcache_core.pool.backing import FILE_PREFIX, LIFELINE_NAME, SHM_DIR, check_name
from lmcache_core.pool.claim import SUFFIX, Claim, living_claim, stem_of
from lmcache_core.pool.header import KEPT_OFFSET
from lmcache_core.pool.ownership import free_segment, open_ours
from lmcache_core.trust import Trust

_LOCK = ".lock"  # of former versions


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
    files: Sequence[Path] = (),
) -> list[Cleaned]:
    """Remove segments, claims and sockets of dead servers of our uid.

    `names` limits this to these pools, and includes those of them that were kept for the next server. What a server
    leaves in a runtime directory is searched in `runtime_dir` and one level below: its claims on NAME, and the lock
    file NAME.lock of former versions. With them the socket NAME.sock beside them is removed, or, in a directory called
    NAME, every socket there and the directory itself, if it is then empty. A server is dead if nobody listens at its
    claims; locks that others hold on its files do not matter. `files`: pools on disks (`l1.path`), which no name leads
    to; with them, and without names, nothing else is removed.
    """
    on_disks = [cleaned for path in files for cleaned in _clean_file(path, dry_run)]
    if files and not names:
        return on_disks
    wanted = {check_name(name) for name in names}
    found = on_disks
    for path in _segments(shm_dir):
        if _selected(path.name.rpartition(".")[2], wanted):
            found += _clean(path, path.name, dry_run, segment=True, kept_too=bool(wanted))
    if runtime_dir is None or not runtime_dir.is_dir():
        return found
    trust, refused = Trust.of_server(runtime_dir), dict[Path, str]()
    for path, name in _remains(runtime_dir):
        if not _selected(name, wanted):
            continue
        try:
            trust.open_directory(path.parent).close()
        except (UntrustedError, OSError) as error:
            refused[path.parent] = str(error)
        else:
            found += _clean(path, name, dry_run, segment=False, kept_too=True)
    return [*found, *(Cleaned(path, CleanState.REFUSED, reason=reason) for path, reason in refused.items())]


def _clean_file(path: Path, dry_run: bool) -> Iterator[Cleaned]:
    try:
        with contextlib.closing(Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
            if not on_disk.is_pool(file.fileno()):
                raise PoolError("it is not a pool of lmcache-core")
    except (PoolError, OSError) as error:
        yield Cleaned(path, CleanState.REFUSED, reason=str(error))
        return
    yield from _clean(path, path.name, dry_run, segment=True, kept_too=True)


def _segments(shm_dir: Path) -> list[Path]:
    """Segments with our uid in the name, also those of which only a claim is left."""
    ours = (path for path in _files(shm_dir, f"{FILE_PREFIX}{os.geteuid()}.*") if not path.name.endswith("~"))
    return list(dict.fromkeys(path.with_name(stem_of(path)) if stem_of(path) else path for path in ours))


def _remains(runtime_dir: Path) -> list[tuple[Path, str]]:
    """What shows that there was a server: for each directory and pool name, one file."""
    found: dict[tuple[Path, str], Path] = {}
    for pattern in (f"*{_LOCK}", f"*{SUFFIX}"):
        for path in [*_files(runtime_dir, pattern), *_files(runtime_dir, f"*/{pattern}")]:
            found.setdefault((path.parent, stem_of(path) or path.stem), path)
    return sorted((path, name) for (_, name), path in found.items())


def _files(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern)) if directory.is_dir() else []


def _selected(name: str, wanted: set[str]) -> bool:
    with contextlib.suppress(UsageError):
        return check_name(name) in wanted if wanted else bool(check_name(name))
    return False  # not a pool's name, so somebody else's file


def _clean(path: Path, name: str, dry_run: bool, *, segment: bool, kept_too: bool) -> Iterator[Cleaned]:
    """`path`: the segment, or a file that shows that there was a server of pool `name`."""
    beside = () if segment or path.parent.name != name else (LIFELINE_NAME,)
    if living_claim(path.parent, name, beside):
        yield Cleaned(path, CleanState.OWNER_LIVES)
        return
    file = None
    try:
        file = open_ours(path) if segment or path.suffix == _LOCK else None
        nbytes = os.fstat(file.fileno()).st_blocks * 512 if segment and file else 0
        if segment and not kept_too and file and _kept(file.fileno()):
            yield Cleaned(path, CleanState.KEPT, nbytes)
        elif dry_run:
            yield Cleaned(path, CleanState.WOULD_REMOVE, nbytes)
        else:
            with contextlib.closing(Claim.take(path.parent, name, beside)) as claim:  # removes those of the dead
                if segment and file:
                    free_segment(file, path)
                elif not segment:
                    path.unlink(missing_ok=True)
                    _remove_sockets(path.parent, name, claim.path)
                claim.withdraw()
                if path.parent.name == name:
                    with contextlib.suppress(OSError):  # something else may be in it
                        path.parent.rmdir()
            yield Cleaned(path, CleanState.REMOVED, nbytes)
    except PoolBusyError:
        yield Cleaned(path, CleanState.OWNER_LIVES)
    except (PoolError, OSError) as error:
        yield Cleaned(path, CleanState.REFUSED, reason=str(error))
    finally:
        if file is not None:
            file.close()


def _kept(fd: int) -> bool:
    return any(os.pread(fd, 8, KEPT_OFFSET))


def _remove_sockets(directory: Path, name: str, besides: Path) -> None:
    """The sockets of the dead server: NAME.sock, and in a directory of the pool's own, all of them."""
    for path in directory.glob("*" if directory.name == name else f"{name}.sock"):
        if path != besides and path.is_socket():
            path.unlink()
