"""Opens a medium, or makes one: whose it is, and that nobody else uses it.

A process has one store for each medium, which its adapters share. The lock belongs to an open file of this process
that is never passed on: it ends with the process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_block.errors import Errors
from lmcache_block.medium.buffers import aligned, holding
from lmcache_block.medium.file import FileMedium, Medium, close_all
from lmcache_block.medium.format import (
    BLOCK_BYTES,
    EDGE_BYTES,
    MAGIC,
    SECTOR_BYTES,
    OtherVersionError,
    Superblock,
    default_extent_bytes,
    new_superblock,
    pack_superblock,
    unpack_superblock,
)
from lmcache_block.medium.store import BlockStore
from lmcache_block.settings import BlockSettings
from lmcache_core.errors import TierError
from lmcache_core.guard import on_failure

_LOCK = struct.Struct("hhqqi0q")  # struct flock
_ERASE = "if nobody needs them, write zeros over its first and last MiB"


def open_store(settings: BlockSettings, errors: Errors) -> BlockStore:
    """The objects at the path. However long it takes: a medium that needs more than one call's time would never be
    open otherwise. Raises `TierError` and `OSError`."""
    medium = open_medium(settings, errors)
    with on_failure(medium.close):
        block = superblock_of(medium, settings, errors)
        store = BlockStore(
            medium, block, fsync=settings.fsync, trim=settings.trim, bounce_buffers=settings.bounce_buffers
        )
        store.recover()
    return store


# --- the file -------------------------------------------------------------------------------------------------
def open_medium(settings: BlockSettings, errors: Errors) -> FileMedium:
    """The file or device, locked. A file that is missing is made, if the settings say how large."""
    path = str(settings.path)
    direct = settings.io_mode == "direct"
    try:
        handle = _open(path, direct)
    except FileNotFoundError:
        if settings.size_bytes is None:
            raise errors.refuse(
                f"there is no {path}", f"mount its disk, or set l2.{errors.tier}.size_bytes to have the file made"
            ) from None
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
        handle = _made(path, direct)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise errors.refuse(
                f"{path} is in use: it is mounted, part of an array, or another server's",
                f"choose a device that nothing else uses for l2.{errors.tier}.path",
            ) from error
        raise
    medium = FileMedium(handle, direct=direct)
    with on_failure(medium.close):
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISBLK(about.st_mode):
            raise errors.refuse(
                f"{path} is neither a file nor a block device",
                f"correct l2.{errors.tier}.path, or remove what is there",
            )
        _lock(handle, path, errors)
        if stat.S_ISREG(about.st_mode):
            nbytes = os.fstat(handle).st_size  # who had the lock until now may have made it larger
            if settings.size_bytes is not None and nbytes < settings.size_bytes:
                _grow(handle, path, nbytes, settings.size_bytes)
            medium.expect_bytes(os.fstat(handle).st_size)
    return medium


def _made(path: str, direct: bool) -> int:
    """A new file, opened; or that which another server has just made."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return _open(path, direct)
    with on_failure(lambda: os.unlink(path)):  # noqa: PTH108  # it is still empty
        return _open(path, direct)


def _open(path: str, direct: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (os.O_DIRECT if direct else 0)
    try:
        is_device = stat.S_ISBLK(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        is_device = False
    # O_EXCL on a device: not while it is mounted.
    return os.open(path, flags | (os.O_EXCL if is_device else 0))


def _lock(handle: int, path: str, errors: Errors) -> None:
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise errors.refuse(
            f"another process uses {path}",
            f"stop that server, or set another l2.{errors.tier}.path: one server at a time uses a medium",
            retryable=True,
        ) from error
    about, there = os.fstat(handle), os.stat(path)  # noqa: PTH116
    if not os.path.samestat(about, there):
        raise errors.refuse(f"{path} was replaced while it was opened", "try again", retryable=True)


def _grow(handle: int, path: str, nbytes: int, wanted: int) -> None:
    """Allocate a file that is empty, or zeros at both ends, as one whose making was interrupted. Anything else keeps
    its size: whose it is can only be seen where its ends are now."""
    last = max(0, nbytes - EDGE_BYTES) // BLOCK_BYTES * BLOCK_BYTES
    for at in (0, last):
        end = aligned(EDGE_BYTES + BLOCK_BYTES)
        os.preadv(handle, [end], at)
        if end.tobytes().strip(b"\0"):
            return
    try:
        os.posix_fallocate(handle, 0, wanted)
    except OSError:
        os.ftruncate(handle, nbytes)
        if nbytes == 0:
            os.unlink(path)  # noqa: PTH108  # empty, and ours: we have its lock
        raise


# --- whose it is ----------------------------------------------------------------------------------------------
def is_empty(settings: BlockSettings, errors: Errors) -> bool:
    """Whether a server would format the medium. Changes nothing. Raises `TierError` and `OSError`."""
    medium = open_medium(settings.model_copy(update={"size_bytes": None}), errors)
    try:
        return _there(medium, settings, errors) is None
    finally:
        medium.close()


def superblock_of(medium: Medium, settings: BlockSettings, errors: Errors) -> Superblock:
    """The medium's; of an empty one, a new one. Raises `TierError` if somebody else's data is there."""
    found = _there(medium, settings, errors)
    if found is None:
        return format_medium(medium, settings.extent_bytes, str(settings.path), errors)
    block, is_whole = found
    if not is_whole:
        write_superblock(medium, block, 0)
        medium.sync()
    return block


def _there(medium: Medium, settings: BlockSettings, errors: Errors) -> tuple[Superblock, bool] | None:
    """The superblock, and whether it is the first one and not its copy. None: the medium is empty."""
    nbytes = medium.nbytes
    where = str(settings.path)
    if nbytes < 2 * EDGE_BYTES:
        cure = f"set l2.{errors.tier}.size_bytes, for example 200GiB, or choose a larger one"
        raise errors.refuse(f"{where} has {nbytes:,} bytes: too few for a medium", cure)
    first, last = aligned(EDGE_BYTES), aligned(EDGE_BYTES)
    medium.read(0, [first])
    medium.read(nbytes // BLOCK_BYTES * BLOCK_BYTES - EDGE_BYTES, [last])
    try:
        ours, copy = unpack_superblock(first), unpack_superblock(last)
    except OtherVersionError as error:
        cure = f"use the server that made it, or set another l2.{errors.tier}.path"
        raise errors.refuse(f"{where} has {error}", cure) from error
    if any(first[SECTOR_BYTES:].tobytes().strip(b"\0")):
        raise errors.refuse(f"{where} holds data that are not ours, in its first MiB", _ERASE)
    if ours is not None:
        if nbytes < ours.nbytes:
            cure = "give it back its size, or, if its objects are not needed, write zeros over its first MiB"
            raise errors.refuse(f"{where} has {nbytes:,} bytes, and had {ours.nbytes:,} when it was made", cure)
        return ours, True
    sector = bytes(first[:SECTOR_BYTES])
    is_zero, is_damaged = sector == bytes(SECTOR_BYTES), sector.startswith(MAGIC)
    if copy is not None:
        is_damaged = is_damaged or sector[len(MAGIC) :] == pack_superblock(copy)[len(MAGIC) :]
    if copy is not None and (is_zero or is_damaged):
        return copy, False
    if not is_zero:
        said = "a damaged superblock of ours, and no copy" if is_damaged else "data that are not ours"
        raise errors.refuse(f"{where} holds {said}", _ERASE)
    if last.tobytes().strip(b"\0"):
        raise errors.refuse(f"{where} holds data that are not ours, in its last MiB", _ERASE)
    return None


def format_medium(medium: Medium, extent_bytes: int | None, where: str, errors: Errors) -> Superblock:
    """Make an empty medium ours. The superblock comes last: until then it is empty. A sparse file gets its blocks: a
    store that finds none in a hole would be answered by evictions, which make no room there."""
    nbytes = medium.nbytes
    try:
        extent_bytes = extent_bytes or default_extent_bytes(nbytes)
        block = new_superblock(nbytes, extent_bytes, secrets.token_bytes(16), time.time())
    except ValueError as error:
        cure = f"lower l2.{errors.tier}.extent_bytes, or choose a larger medium"
        raise errors.refuse(f"{where} cannot be used: {error}", cure) from error
    medium.allocate()
    zeros = aligned(BLOCK_BYTES)
    for number in range(block.extents):  # what former users left there is no header
        offset = EDGE_BYTES + number * extent_bytes
        medium.write(offset, [zeros])
        medium.write(offset + extent_bytes - BLOCK_BYTES, [zeros])
    medium.sync()
    for at in (block.copy_at, 0):
        write_superblock(medium, block, at)
        medium.sync()
    return block


def write_superblock(medium: Medium, block: Superblock, at: int) -> None:
    """With zeros behind it, one block."""
    page = aligned(BLOCK_BYTES)
    page[:SECTOR_BYTES] = pack_superblock(block)
    medium.write(at, [page])


# --- one store for each medium ------------------------------------------------------------------------------
class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: BlockStore | None = None
        self.medium_id = b""
        self.users = 0  # adapters
        self.calls = 0  # of adapters that are inside the store


class Shared:
    """An adapter's share in the store of its medium, which is opened when it is first needed."""

    def __init__(self, settings: BlockSettings, errors: Errors) -> None:
        self._settings = settings
        self._errors = errors
        self.path = os.path.realpath(settings.path)
        self._closed = False
        with _entries_lock:
            self._entry = _entries.setdefault(self.path, _Entry())
            self._entry.users += 1

    @contextmanager
    def using(self, deadline: float) -> Iterator[BlockStore]:
        """The store, for one call. Raises `TierError`, `OSError` and `TimeoutError`."""
        store = self._entered() or self._opened_anew(deadline)
        try:
            if not store.medium.is_at(self.path):
                raise TierError(
                    f"tier {self._errors.tier!r}: {self.path} is not there any more, or is shorter, or another",
                    cure="put it back, or restart the server to use what is there now",
                )
            yield store
        finally:
            with _entries_lock:
                self._entry.calls -= 1

    def _entered(self) -> BlockStore | None:
        """The store, with one call more in it. None: it has to be opened, for the first time or after an error."""
        with _entries_lock:
            store = self._entry.store
            if store is None or store.broken:
                return None
            self._entry.calls += 1
            return store

    def _opened_anew(self, deadline: float) -> BlockStore:
        self._open(deadline)
        store = self._entered()
        if store is None:
            raise TierError(f"tier {self._errors.tier!r}: {self.path} has failed again")
        return store

    def is_empty(self, deadline: float) -> bool:
        """Whether a first use would format the medium."""
        with holding(self._entry.lock, deadline):
            return self._entry.store is None and is_empty(self._settings, self._errors)

    def opened(self) -> BlockStore | None:
        """None: nobody has needed it yet."""
        return self._entry.store

    def _open(self, deadline: float) -> None:
        entry = self._entry
        with holding(entry.lock, deadline):
            self._drop_broken()
            if entry.store is None:
                store = open_store(self._settings, self._errors)
                with on_failure(store.close):
                    if entry.medium_id not in (b"", store.block.medium_id):
                        raise self._errors.refuse(
                            f"another medium is at {self.path} than before", "restart the server to use it"
                        )
                entry.medium_id, entry.store = store.block.medium_id, store
        if self._closed:
            self._close_unused()
            raise TierError(f"tier {self._errors.tier!r} is closed", retryable=False)

    def _drop_broken(self) -> None:
        """Close a store whose sync has failed. Not while calls are in it: what they write must not meet what its
        successor gives to others."""
        with _entries_lock:
            store = self._entry.store
            if store is None or not store.broken:
                return
            if self._entry.calls:
                raise TierError(f"tier {self._errors.tier!r}: a sync has failed, and other calls have not ended yet")
            self._entry.store = None
        store.close()

    def close(self) -> None:
        """The last one closes the store. Waits for nothing; idempotent."""
        if self._closed:
            return
        self._closed = True
        with _entries_lock:
            self._entry.users -= 1
            if self._entry.users == 0 and _entries.get(self.path) is self._entry:
                del _entries[self.path]
        self._close_unused()

    def _close_unused(self) -> None:
        """Whoever comes last: the last adapter, or the thread that was still opening for it."""
        with _entries_lock:
            store = self._entry.store if self._entry.users == 0 else None
            if store is not None:
                self._entry.store = None
        if store is not None:
            store.close()


_entries: dict[str, _Entry] = {}
_entries_lock = threading.Lock()


def _forget_in_child() -> None:
    """A forked child has neither the lock nor the right to write: its adapters open the medium anew."""
    global _entries_lock  # some thread of the parent may have had it
    _entries_lock = threading.Lock()
    close_all()
    for entry in _entries.values():
        entry.lock, entry.store, entry.calls = threading.Lock(), None, 0


os.register_at_fork(after_in_child=_forget_in_child)
