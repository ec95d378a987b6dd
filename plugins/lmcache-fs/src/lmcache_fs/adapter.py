"""The disk tier: one file for each object."""

# Names are strings here: making a Path of each costs more than the call that uses it.
# ruff: noqa: PTH103, PTH104, PTH108, PTH112, PTH116, PTH208

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_fs.client import TRAILER, NotWholeError, make_folder, read_object, sync_folder, write_object
from lmcache_fs.errors import Errors
from lmcache_fs.settings import FsSettings
from lmcache_fs.transport.lead import Lead
from lmcache_fs.transport.mode import WriteMode
from lmcache_fs.transport.paths import Paths, key_of
from lmcache_fs.transport.temporary import TemporaryFolder, sweep

_SCAN_PAGE_ENTRIES = 1000
_LATE = Outcome(Result.FAILED, error="not started by its deadline", retryable=True)
_DONE = Outcome(Result.DONE)

Item = TypeVar("Item")


class FsAdapter(L2Adapter):
    """Files under `settings.path`. Thread-safe; several adapters, in several processes, may share a directory.

    A file is written under a temporary name and renamed: readers see it whole or not at all. A load sets the file's
    access time, from which `scan` gives the order of use to the next server. The directory is created when it is first
    needed, and again if someone deletes it.
    """

    # Small batches: a checksum just before the write, or just after the read, finds the bytes in the CPU's cache.
    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True, batch_bytes_max=2 << 20)

    def __init__(self, settings: FsSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._tier = context.tier
        self._recount = context.recount
        self._paths = Paths(settings.path)
        self._errors = Errors(context.tier, self._paths.root, settings)
        self.temporary = TemporaryFolder(self._paths.temporary)
        self._mode = WriteMode()
        self._lead = Lead(str(self._paths.root))
        self._making = threading.Lock()
        self._made = False
        self._closed = False

    # --- contract -----------------------------------------------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        return [self._one(self._store_one, item, deadline, "store") for item in items]

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self._check_open()
        return [self._is_there(key) for key in keys]

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        return [self._one(self._load_one, item, deadline, "load") for item in items]

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        return [self._one(self._delete_one, key, deadline, "delete") for key in keys]

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        return [self._one(self._set_aside_one, key, deadline, "set aside") for key in keys]

    def usage(self) -> Usage:
        """Only the free bytes: counting files would mean walking them."""
        self._check_open()
        try:
            room = os.statvfs(self._paths.root)
        except OSError:
            return Usage(None, None)
        return Usage(None, None, room.f_bavail * room.f_frsize)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """Shard by shard; the cursor is the last shard that was walked. Raises `TierError` if there is no directory and
        none can be created: otherwise the tier would count as empty until the next scan."""
        self._check_open()
        try:
            shards = self._shards()
        except OSError as error:
            raise self._errors.tier_error("scan", error) from error
        entries: list[ScanEntry] = []
        for shard in shards:
            if cursor is not None and shard <= cursor:
                continue
            entries += self._walk(f"{self._paths.objects}/{shard}")
            cursor = shard
            if len(entries) >= _SCAN_PAGE_ENTRIES or time.monotonic() >= deadline:
                return ScanPage(entries, cursor)
        return ScanPage(entries, None)

    def medium(self) -> str:
        return f"the directory {os.path.realpath(self._paths.root)}"

    def try_to_lead(self) -> bool:
        """Lock a file in the directory."""
        self._check_open()
        return self._lead.take()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._lead.close()
            self.temporary.close()

    # --- one object ---------------------------------------------------------------------------------------
    def _store_one(self, item: StoreItem) -> Outcome:
        self._make_folders()
        try:
            return self._publish(item)
        except FileNotFoundError:
            # Someone has deleted the directory, or a part of it: its objects are gone.
            self._recount.ask()
            with self._making:
                self._made = os.path.isdir(self.temporary.path)
            self._make_folders()
            self._make_shard(item.key)
            return self._publish(item)

    def _publish(self, item: StoreItem) -> Outcome:
        temporary, final = self.temporary.name(), self._paths.object(item.key)
        try:
            self._write(temporary, item)
            try:
                os.rename(temporary, final)
            except FileNotFoundError:
                self._make_shard(item.key)
                os.rename(temporary, final)
        except OSError:
            self.temporary.discard(temporary)
            raise
        if self._settings.fsync:
            try:
                sync_folder(self._paths.shard(item.key))
            except OSError as error:  # whatever the error, even FULL: the object may not survive a power cut
                return Outcome(Result.FAILED, error=self._errors.text("store", error), retryable=True)
        return Outcome(Result.DONE, item.nbytes)

    def _write(self, path: str, item: StoreItem) -> None:
        mode, sync = self._settings.io_mode, self._settings.fsync
        direct = mode == "direct" or (mode == "auto" and self._mode.direct())
        try:
            write_object(path, item.buffers, direct=direct, sync=sync)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct or mode == "direct":
                raise
            self._mode.refused()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            write_object(path, item.buffers, direct=False, sync=sync)

    def _load_one(self, item: LoadItem) -> Outcome:
        direct = self._settings.io_mode == "direct"
        path = self._paths.object(item.key)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        try:
            about = os.fstat(handle)
            nbytes = read_object(handle, about.st_size, item.buffers, direct=direct)
            # The order of use, for the next scan. A directory that is read-only to us keeps its old one.
            with contextlib.suppress(OSError):
                os.utime(handle, ns=(time.time_ns(), about.st_mtime_ns))
        except NotWholeError as error:
            self._keep_damaged(path, item.key)
            return Outcome(Result.DAMAGED, error=f"file {path} is damaged: {error}")
        finally:
            os.close(handle)
        return Outcome(Result.DONE, nbytes)

    def _delete_one(self, key: bytes) -> Outcome:
        os.unlink(self._paths.object(key))
        return _DONE

    def _set_aside_one(self, key: bytes) -> Outcome:
        error = self._keep_damaged(self._paths.object(key), key)
        if error is not None:
            raise error  # it is still there, and takes its space
        return _DONE

    def _is_there(self, key: bytes) -> bool:
        try:
            about = os.stat(self._paths.object(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._errors.tier_error("lookup", error) from error
        return stat.S_ISREG(about.st_mode) and about.st_size >= TRAILER.size

    def _keep_damaged(self, path: str, key: bytes) -> OSError | None:
        """Move a file to the damaged ones; delete it if there are too many, or if moving fails. Returns why the file is
        still in its place, if it is: then it stays damaged, and a miss."""
        try:
            os.makedirs(self._paths.damaged, mode=0o700, exist_ok=True)
            if len(os.listdir(self._paths.damaged)) < self._settings.damaged_files_max:
                os.rename(path, f"{self._paths.damaged}/{key.hex()}.{time.time_ns()}")
                return None
        except OSError:
            pass  # what cannot be kept is deleted
        try:
            os.unlink(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error
        return None

    # --- all of them --------------------------------------------------------------------------------------
    def _one(self, method: Callable[[Item], Outcome], item: Item, deadline: float, what: str) -> Outcome:
        """The outcome of one item: an error of the operating system is a value, never an exception."""
        if time.monotonic() >= deadline:
            return _LATE
        try:
            return method(item)
        except FileNotFoundError as error:
            if what == "store":
                return Outcome(Result.FAILED, error=self._errors.text(what, error), retryable=True)
            return _DONE if what in ("delete", "set aside") else Outcome(Result.MISS)
        except OSError as error:
            return self._errors.outcome(what, error)

    def _make_folders(self) -> None:
        if self._made:
            return
        with self._making:
            if not self._made:
                for folder in (str(self._paths.root), self._paths.objects, str(self._paths.temporary)):
                    make_folder(folder, sync=self._settings.fsync)
                sweep(self._paths.temporary)
                self.temporary.open()
                self._made = True

    def _make_shard(self, key: bytes) -> None:
        if not os.path.isdir(self._paths.objects):
            self._recount.ask()  # someone has deleted all that was there
        make_folder(self._paths.shard(key), sync=self._settings.fsync)

    def _shards(self) -> list[str]:
        try:
            return sorted(os.listdir(self._paths.objects))
        except FileNotFoundError:
            # The first start, or someone deleted everything.
            make_folder(str(self._paths.root), sync=self._settings.fsync)
            return []

    def _walk(self, folder: str) -> list[ScanEntry]:
        entries: list[ScanEntry] = []
        try:
            with os.scandir(folder) as files:
                for file in files:
                    key = key_of(file.name)
                    # In another folder no load or delete would find it: it is not ours.
                    if key is None or self._paths.shard(key) != folder:
                        continue
                    try:
                        about = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # deleted since it was listed
                    if not stat.S_ISREG(about.st_mode):
                        continue
                    used_at_s = max(about.st_atime, about.st_mtime)
                    entries.append(ScanEntry(key, max(0, about.st_size - TRAILER.size), used_at_s))
        except FileNotFoundError:
            pass  # deleted since it was listed
        except OSError as error:
            stray = isinstance(error, NotADirectoryError) and os.path.isdir(self._paths.objects)
            if not stray:  # a file among the shards is not ours; one in place of their folder: they are gone
                raise self._errors.tier_error("scan", error) from error
        return entries

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self._tier!r} is closed", retryable=False)
