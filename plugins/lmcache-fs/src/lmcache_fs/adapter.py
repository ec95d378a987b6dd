"""The disk tier: one file for each object."""

# Names are strings here: making a Path of each costs more than the call that uses it.
# ruff: noqa: PTH103, PTH104, PTH106, PTH108, PTH112, PTH208

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from lmcache_core.files import inodes_are_scarce
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.blocking import BlockingAdapter
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_fs.check import folder_beside, room_at, surprises, unmounted
from lmcache_fs.client import (
    TRAILER,
    NotAFileError,
    NotWholeError,
    make_folder,
    open_file,
    read_object,
    sync_folder,
    write_object,
)
from lmcache_fs.errors import Errors
from lmcache_fs.settings import FsSettings
from lmcache_fs.transport.lead import Lead
from lmcache_fs.transport.mode import WriteMode
from lmcache_fs.transport.paths import Paths, key_of
from lmcache_fs.transport.place import Place
from lmcache_fs.transport.temporary import TemporaryFolder, sweep

_SCAN_PAGE_ENTRIES = 1000
_UNREAD_SHARDS_MAX = 8  # bad folders one after the other, before the medium counts as broken
_DONE = Outcome(Result.DONE)


class FsAdapter(BlockingAdapter):
    """Files under `settings.path`. Thread-safe; several adapters, in several processes, may share a directory.

    A file is written under a temporary name and renamed: readers see it whole or not at all. A load sets the file's
    access time, from which `scan` gives the order of use to the next server. The directory is created when it is first
    needed, and again if someone deletes it.
    """

    # Small batches: a checksum just before the write, or just after the read, finds the bytes in the CPU's cache.
    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=True, shared=True, private=True, batch_bytes_max=2 << 20
    )
    errors = (OSError,)

    def __init__(self, settings: FsSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._recount = context.recount
        self._paths = Paths(settings.path)
        self._errors = Errors(context.tier, self._paths.root, settings)
        self.temporary = TemporaryFolder(self._paths.temporary)
        self._mode = WriteMode()
        self._lead = Lead(str(self._paths.root))
        mount_point = None if settings.mount_point is None else str(settings.mount_point)
        self._place = Place(str(self._paths.root), mount_point, context.tier, context.recount.ask)
        self._inodes_scarce = False
        self._making = threading.Lock()
        self._made = False
        super().__init__(context, self._lead, self.temporary)

    # --- contract -----------------------------------------------------------------------------------------
    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self.check_open()
        unclear: list[OSError] = []
        found = [self._is_there(key, unclear) for key in keys]
        if keys and len(unclear) == len(keys) and (len(keys) > 1 or not self._errors.of_the_file(unclear[0])):
            raise self._errors.tier_error("lookup", unclear[0]) from unclear[0]
        return found

    def set_aside(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> Sequence[Outcome]:
        pairs = list(zip(keys, versions or [""] * len(keys), strict=True))
        return self.each("set aside", self._set_aside_one, pairs, deadline)

    def usage(self) -> Usage:
        """Only the free bytes: counting files would mean walking them. Before the directory is made, those of the
        folder that it will be in."""
        self.check_open()
        try:
            return Usage(None, None, room_at(self._settings.path).bytes_free)
        except OSError:
            return Usage(None, None)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """Shard by shard; the cursor is the last shard that was walked. Raises `TierError` if there is no directory and
        none can be created: otherwise the tier would count as empty until the next scan."""
        self.check_open()
        try:
            shards = self._shards()
        except OSError as error:
            raise self._errors.tier_error("scan", error) from error
        entries: list[ScanEntry] = []
        self._place.mark()
        unread: list[OSError] = []
        for walked, shard in enumerate(each for each in shards if cursor is None or each > cursor):
            entries += self._walk(f"{self._paths.objects}/{shard}", unread)
            if unread and len(unread) > walked and walked >= _UNREAD_SHARDS_MAX:  # not one could be read
                raise self._errors.tier_error("scan", unread[0]) from unread[0]
            cursor = shard
            if len(entries) >= _SCAN_PAGE_ENTRIES or time.monotonic() >= deadline:
                return ScanPage(entries, cursor)
        return ScanPage(entries, None)

    def medium(self) -> str:
        return f"the directory {os.path.realpath(self._paths.root)}"

    def try_to_lead(self) -> bool:
        """Lock a file in the directory."""
        self.check_open()
        return self._lead.take()

    def check(self, deadline: float) -> Iterator[Finding]:
        """Of a tier in a folder beside."""
        if waits := list(unmounted(self._tier, self._settings)):
            yield from waits
            return
        with folder_beside(self._settings) as beside, FsAdapter(beside, self._context) as adapter:
            yield from BlockingAdapter.check(adapter, deadline)
        yield from surprises(self._tier, self._settings)

    # --- one object ---------------------------------------------------------------------------------------
    def store_one(self, item: StoreItem, deadline: float) -> Outcome:
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
                return self._errors.of(Result.FAILED, "store", error, retryable=True)
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

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        direct = self._settings.io_mode == "direct"
        path = self._paths.object(item.key)
        try:
            handle, about = open_file(path)
        except FileNotFoundError:
            raise
        except NotAFileError as error:
            return Outcome(Result.DAMAGED, error=f"file {path} is damaged: {error}")
        except OSError as error:
            return self._unreadable(error)
        version = _version(about)
        try:
            nbytes = read_object(handle, about.st_size, item.buffers, direct=direct)
            # The order of use, for the next scan. A directory that is read-only to us keeps its old one.
            with contextlib.suppress(OSError):
                os.utime(handle, ns=(time.time_ns(), about.st_mtime_ns))
        except NotWholeError as error:
            return Outcome(Result.DAMAGED, error=f"file {path} is damaged: {error}", version=version)
        except OSError as error:
            return self._unreadable(error, version)
        finally:
            os.close(handle)
        return Outcome(Result.DONE, nbytes, version=version)

    def _unreadable(self, error: OSError, version: str = "") -> Outcome:
        """Of one file. The others may be well: if they are not, the server sees that all look damaged."""
        if not self._errors.of_the_file(error):
            raise error
        return self._errors.of(Result.DAMAGED, "load", error, retryable=False)._replace(version=version)

    def delete_one(self, key: bytes, deadline: float) -> Outcome:
        path = self._paths.object(key)
        if not _is_file(os.lstat(path)):
            return _DONE  # no object is there, and what is there is not ours
        os.unlink(path)
        if self._inodes_scarce:
            with contextlib.suppress(OSError):  # others are in it
                os.rmdir(self._paths.shard(key))
        return _DONE

    def _set_aside_one(self, pair: tuple[bytes, str], deadline: float) -> Outcome:
        key, version = pair
        path = self._paths.object(key)
        about = os.lstat(path)
        if not _is_file(about) or (version and _version(about) != version):
            return _DONE  # somebody has replaced it
        error = self._keep_damaged(path, key)
        if error is not None:
            raise error  # it is still there, and takes its space
        return _DONE

    def _is_there(self, key: bytes, unclear: list[OSError]) -> bool:
        """A file that cannot be looked at is there: a load will say what is wrong with it. One in a folder that lets
        nobody in is not."""
        try:
            about = os.lstat(self._paths.object(key))
        except OSError as error:
            if self._is_absent(error):
                return False
            of_the_file = self._errors.of_the_file(error)
            if not of_the_file and not self._errors.of_the_folder(error):
                raise self._errors.tier_error("lookup", error) from error
            unclear.append(error)
            return of_the_file
        return _is_file(about) and about.st_size >= TRAILER.size

    def _is_absent(self, error: OSError) -> bool:
        """Whether there is no such file. A file in place of a shard's folder has none in it, and is not ours."""
        return isinstance(error, FileNotFoundError) or (
            isinstance(error, NotADirectoryError) and os.path.isdir(self._paths.objects)
        )

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
    def refused(self, what: str, error: Exception) -> Outcome:
        assert isinstance(error, OSError)
        if what != "store" and self._is_absent(error):
            return Outcome(Result.MISS) if what == "load" else _DONE
        if isinstance(error, FileNotFoundError):
            return self._errors.of(Result.FAILED, what, error, retryable=True)
        if what == "store" and error.errno == errno.ENOSPC:
            self._note_inodes()
        return self._errors.outcome(what, error)

    def _note_inodes(self) -> None:
        """The medium is full. If it lacks inodes, folders without objects are removed, now and after each delete."""
        scarce = inodes_are_scarce(self._paths.root)
        if scarce and not self._inodes_scarce:
            with contextlib.suppress(OSError):
                for shard in os.listdir(self._paths.objects):
                    with contextlib.suppress(OSError):  # there are objects in it
                        os.rmdir(f"{self._paths.objects}/{shard}")
        self._inodes_scarce = scarce

    def _make_folders(self) -> None:
        if self._made:
            return
        with self._making:
            if not self._made:
                for folder in (str(self._paths.root), self._paths.objects, str(self._paths.temporary)):
                    make_folder(folder, sync=self._settings.fsync)
                self._place.mark()
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

    def _walk(self, folder: str, unread: list[OSError]) -> list[ScanEntry]:
        """What is in a shard. One that cannot be read, or a file in it, is left out: its objects are missed, and stored
        again."""
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
                    except OSError as error:
                        if not self._errors.of_the_file(error):
                            raise
                        continue
                    if not _is_file(about):
                        continue
                    used_at_s = max(about.st_atime, about.st_mtime)
                    entries.append(ScanEntry(key, max(0, about.st_size - TRAILER.size), used_at_s))
        except FileNotFoundError:
            pass  # deleted since it was listed
        except OSError as error:
            stray = isinstance(error, NotADirectoryError) and os.path.isdir(self._paths.objects)
            if not stray and not self._errors.of_the_file(error):
                # a file among the shards is not ours; one in place of their folder: they are gone
                raise self._errors.tier_error("scan", error) from error
            if not stray:
                unread.append(error)
        return entries

    def check_open(self) -> None:
        """Raises `TierError` as well where the disk is not mounted, or another one is."""
        super().check_open()
        try:
            self._place.check()
        except OSError as error:
            raise self._errors.tier_error("look at its directory", error) from error


def _is_file(about: os.stat_result) -> bool:
    """Whether it can be ours: we make regular files only."""
    return stat.S_ISREG(about.st_mode)


def _version(about: os.stat_result) -> str:
    return f"{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"
