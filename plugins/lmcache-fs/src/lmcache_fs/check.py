"""What `lmcache-core check` says of a disk tier's folder before there is one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_fs.settings import FsSettings

_FREE_FRACTION_MIN = 0.05


@contextmanager
def folder_beside(settings: FsSettings) -> Iterator[FsSettings]:
    """Settings of a tier in a folder of its own on the same medium: it is removed, and no directory is made. Raises
    `TierError`."""
    there = _nearest(settings.path)
    mine = f"make {settings.path} a directory that user {os.getuid()} may read and write"
    try:
        with tempfile.TemporaryDirectory(prefix=".lmcache-check-", dir=there) as probe:
            try:
                yield settings.model_copy(update={"path": Path(probe), "mount_point": None})
            except TierError as error:
                message, cure = (
                    each.replace(probe, str(settings.path)) for each in (error.happened, error.cure or mine)
                )
                raise TierError(message, cure=cure) from error
    except OSError as error:
        raise TierError(f"no file can be made in {there}: {error.strerror}", cure=mine) from error


def unmounted(name: str, settings: FsSettings) -> Iterator[Finding]:
    """Whether the tier waits for its disk."""
    if settings.mount_point is not None and not settings.mount_point.is_mount():
        cure = f"mount the disk, or correct l2.{name}.mount_point"
        yield Finding(True, "", f"nothing is mounted at {settings.mount_point}: the tier waits for it", cure)


def surprises(name: str, settings: FsSettings) -> Iterator[Finding]:
    """What a server would do that is seldom meant, and how little space there is."""
    there = _nearest(settings.path)
    if there not in (settings.path, settings.path.parent):
        message = f"{settings.path.parent} does not exist: a server makes it, below {there}"
        yield Finding(True, "", message, f"correct l2.{name}.path if it is misspelt")
    if settings.mount_point is None and (expected := mount_expected(settings.path, there)):
        message = f"it is on the file system of /, and nothing is mounted at {expected}"
        yield Finding(True, "", message, f"mount the disk, and set l2.{name}.mount_point = {expected}")
    free, total = room_at(settings.path)
    if total:
        scarce = free < _FREE_FRACTION_MIN * total  # no failure: an object has just been stored there
        cure = f"free some space, or move l2.{name}.path" if scarce else ""
        yield Finding(True, "", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free", cure)


class Room(NamedTuple):
    """Of a file system."""

    bytes_free: int
    nbytes: int


def room_at(path: Path) -> Room:
    """Of the folder, or of the one that it will be made in. Raises `OSError`, also where a file is in the way."""
    found = os.statvfs(f"{_nearest(path)}/")
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if os.access(each, os.F_OK))  # not below a closed folder


def mount_expected(path: Path, there: Path, fstab: Path = Path("/etc/fstab")) -> str:
    """Where a disk should be mounted for this path and is not: as /etc/fstab says, or the first folder below /mnt and
    /media, where disks are mounted by custom. Empty if there is none, or the path has a file system of its own."""
    if there.stat().st_dev != Path("/").stat().st_dev:
        return ""
    for line in _lines(fstab):
        fields = line.split()
        if len(fields) > 1 and fields[1] != "/" and path.is_relative_to(fields[1]) and not os.path.ismount(fields[1]):
            return fields[1]
    return "/".join(path.parts[:3])[1:] if path.parts[1:2] in (("mnt",), ("media",)) else ""


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if not line.startswith("#")]
    except (OSError, ValueError):  # no such file, or not for us: nothing is expected
        return []
