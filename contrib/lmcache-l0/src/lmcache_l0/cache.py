"""`SharedCache`: opens or makes the table's file, checks the sizes, and adds to the C type what needs no speed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lmcache_l0 import _table
from lmcache_l0.errors import TableError, TableMismatchError, TableRoomError, UsageError
from lmcache_l0.sizing import GIB, LOAD_MAX, Plan, plan_table

_STEP_BYTES = 64 << 20  # allocated between two looks at the room that is left
_SCAN_KEYS = 1024
_OPEN_TRIES = 8  # each is lost to somebody who removes the file at that moment
WAIT_S = 10.0


@dataclass(frozen=True)
class Stats:
    """The figures of a table, counted over all slots; `hits` and `misses` are this handle's own."""

    path: str
    keys: int
    hash_slots: int
    load: float
    key_bytes: int
    value_bytes: int
    file_bytes: int
    slot_bytes: int
    max_value_size: int
    versions: int
    found_probes_mean: float
    found_probes_p99: int
    found_probes_max: int
    miss_probes_mean: float
    miss_probes_max: int
    counted_hits: int
    claimed: int
    locked: int
    recovered: int
    writers: int
    enabled: bool
    hits: int
    misses: int

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


class SharedCache(_table.Table):
    """One table in shared memory, of many processes. Keys are str (taken as UTF-8) or bytes; values are bytes.

    Makes the file if it is not there and sizes are given or `create` says so; attaches to it otherwise. Sizes
    that are given at an attach must be the table's. `size_gb` counts GiB. Every handle may be used by all
    threads of a process, and by the children that it forks. Memory is allocated at once (`reserve=False`: when
    it is first touched, which may end in a bus error on a full mount).

    Raises SizesError, TableRoomError, TableMismatchError, TableDamagedError; FileNotFoundError where there is
    nothing to attach to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size_gb: float | None = None,
        max_value_size: int | None = None,
        hash_slots: int | None = None,
        *,
        versions: int | None = None,
        max_key_size: int | None = None,
        create: bool | None = None,
        read_only: bool = False,
        reserve: bool = True,
        wait_s: float = WAIT_S,
    ) -> None:
        asked = {
            "size_gb": size_gb,
            "max_value_size": max_value_size,
            "hash_slots": hash_slots,
            "versions": versions,
            "max_key_size": max_key_size,
        }
        given = {name: figure for name, figure in asked.items() if figure is not None}
        if create is None:
            create = bool(given) and not read_only
        elif create and read_only:
            raise UsageError("create=True and read_only=True: a table that cannot be written cannot be made")
        if wait_s <= 0:
            raise UsageError(f"wait_s={wait_s} must be above zero")
        name = os.fspath(path)
        fd = _open_or_make(Path(name), given, create=create, read_only=read_only, reserve=reserve)
        try:
            super().__init__(name, fd, not read_only, wait_s, LOAD_MAX)
        finally:
            os.close(fd)
        try:
            _compare(self, given)
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> Stats:
        """Load, probe lengths, bytes, writers: a walk over all slots, without the GIL."""
        found = self.survey()
        return Stats(
            path=self.path,
            keys=found["keys"],
            hash_slots=self.hash_slots,
            load=found["keys"] / self.hash_slots,
            key_bytes=found["key_bytes"],
            value_bytes=found["value_bytes"],
            file_bytes=self.file_bytes,
            slot_bytes=self.slot_bytes,
            max_value_size=self.max_value_size,
            versions=self.versions,
            found_probes_mean=found["found_probes_mean"],
            found_probes_p99=found["found_probes_p99"],
            found_probes_max=found["found_probes_max"],
            miss_probes_mean=found["miss_probes_mean"],
            miss_probes_max=found["miss_probes_max"],
            counted_hits=found["hits"],
            claimed=found["claimed"],
            locked=found["locked"],
            recovered=found["recovered"],
            writers=len(self.writers()),
            enabled=self.enabled,
            hits=self.hits,
            misses=self.misses,
        )

    def residents(self) -> Iterator[tuple[bytes, int, int]]:
        """(key, bytes of its value, reads counted by sampling) of every key, in no order.

        A key that is there from beginning to end is met once; one that comes or goes meanwhile, perhaps.
        """
        cursor = 0
        while True:
            cursor, rows = self.scan(cursor, _SCAN_KEYS)
            yield from rows
            if cursor == 0:
                return

    def __iter__(self) -> Iterator[bytes]:
        for key, _, _ in self.residents():
            yield key

    def keys(self) -> Iterator[bytes]:
        """Every key, as bytes."""
        return iter(self)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key with a consistent copy of its value; a key that is gone by then is left out."""
        for key in self:
            value = self.get(key)
            if value is not None:
                yield key, value

    def clear(self) -> None:
        """Delete every key that is there now."""
        for key in self:
            self.delete(key)

    def unlink(self) -> None:
        """Remove the table's file. Processes that have it attached keep it until they close it."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self):,} of {self.hash_slots:,} slots"
        return f"SharedCache({self.path!r}, {state})"


def _open_or_make(path: Path, given: dict[str, Any], *, create: bool, read_only: bool, reserve: bool) -> int:
    """A descriptor of a finished table file."""
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
    plan = plan_table(**given) if create else None  # before there is a file
    for _ in range(_OPEN_TRIES):
        try:
            fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            if create:
                raise
            raise FileNotFoundError(
                f"there is no table at {path}: create it with sizes, SharedCache(path, size_gb=…)"
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise TableError(f"{path} is not a file: name one in a folder of shared memory, such as /dev/shm")
            if plan is None or _table.ready(fd) or _finish(path, fd, plan, reserve):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise TableError(f"{path} was removed {_OPEN_TRIES} times while it was opened: somebody clears that folder")


def _finish(path: Path, fd: int, plan: Plan, reserve: bool) -> bool:
    """Build the table in an empty file, one process at a time. False: the name has moved on meanwhile."""
    fcntl.flock(fd, fcntl.LOCK_EX)  # freed by the kernel if we die in the middle: the next one starts over
    try:
        if not _same_file(fd, path):
            return False
        if _table.ready(fd):
            return True
        try:
            _allocate(path, fd, plan, reserve)
        except BaseException:
            path.unlink()  # nobody has attached to it: it was never ready
            raise
        _table.initialise(
            fd,
            plan.hash_slots,
            plan.max_value_size,
            plan.max_key_size,
            plan.versions,
            secrets.randbits(64),
            secrets.randbits(64),
            int(time.time()),
        )
        return True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _same_file(fd: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)


def _allocate(path: Path, fd: int, plan: Plan, reserve: bool) -> None:
    os.fchmod(fd, 0o600)  # whatever the umask says
    os.ftruncate(fd, 0)  # what a maker that died has left
    if reserve:
        _check_room(path, plan.file_bytes)
    os.ftruncate(fd, plan.file_bytes)
    if not reserve or not hasattr(os, "posix_fallocate"):
        return
    for offset in range(0, plan.file_bytes, _STEP_BYTES):
        left = plan.file_bytes - offset
        _check_room(path, left)
        try:
            os.posix_fallocate(fd, offset, min(_STEP_BYTES, left))
        except OSError as error:
            raise TableRoomError(f"{path} cannot be given {left:,} bytes more ({error.strerror})") from error


def _check_room(path: Path, needed_bytes: int) -> None:
    available_bytes, where = _room(path)
    if needed_bytes > available_bytes:
        raise TableRoomError(
            f"{where} has room for {available_bytes / GIB:.3f} GiB and the table {path} needs "
            f"{needed_bytes / GIB:.3f} GiB: make it smaller (size_gb, hash_slots, max_value_size), or give the "
            "container more (--shm-size, memory limit)"
        )


def _room(path: Path) -> tuple[int, str]:
    """Bytes that can be allocated at `path`, and what limits them."""
    folder = path.parent
    if folder.resolve().is_relative_to("/dev/shm"):
        # Memory: the mount, the machine and every control group have a say; past them the end is an OOM kill.
        from lmcache_core.pool.room import room

        found = room(mount=folder)
        return found.available_bytes, found.where
    held = os.statvfs(folder)
    return held.f_bavail * held.f_frsize, str(folder)


def _compare(table: SharedCache, given: dict[str, Any]) -> None:
    """Raise TableMismatchError unless the table is one that these sizes describe."""
    found = {name: getattr(table, name) for name in ("max_value_size", "hash_slots", "versions", "max_key_size")}
    differs = [
        f"{name}={figure:,}, not {given[name]:,}" for name, figure in found.items() if given.get(name, figure) != figure
    ]
    size_gb = given.get("size_gb")
    if not differs and size_gb is not None:
        sizes = found if "hash_slots" in given else {n: v for n, v in found.items() if n != "hash_slots"}
        plan = plan_table(**sizes, size_gb=size_gb)
        if plan.file_bytes != table.file_bytes:
            differs.append(f"{table.file_bytes / GIB:.3f} GiB, not {size_gb:.3f}")
    if differs:
        raise TableMismatchError(
            f"the table {table.path} has {'; '.join(differs)}: attach with its sizes or with none, or remove the "
            "file to make it anew"
        )
