"""Which file system is at the tier's directory, and whether it still is.

A disk that is not mounted leaves an empty directory behind, and another disk may be mounted in its place. PATH/medium
has a random id; while a server runs, it must stay the same file, or become one with the same id. Several servers may
share the directory: if somebody empties it, whoever of them comes first writes the marker again, with the id that all
of them know. A new server that comes before them finds a directory without an id, and cannot know it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable
from typing import NamedTuple

from lmcache_core.errors import TierError
from lmcache_fs.client import NotAFileError, open_file

_ID_CHARS = 32


class _Seen(NamedTuple):
    """The marker, as cheap to compare as one `stat`."""

    device: int
    inode: int
    changed_ns: int


class Place:
    """Of one adapter. Thread-safe.

    `on_replaced` is called if the directory has been emptied or mounted anew: what was there may have gone.
    """

    def __init__(self, root: str, mount_point: str | None, tier: str, on_replaced: Callable[[], None]) -> None:
        self._root = root
        self._marker = f"{root}/medium"
        self._mount_point = mount_point
        self._tier = tier
        self._on_replaced = on_replaced
        self._lock = threading.Lock()
        self._seen: _Seen | None = None
        self._id = ""
        self._device: tuple[int, int] | None = None  # of the root, while it was ours
        self._emptied: tuple[tuple[int, int], str] | None = None  # the file system and the id before that

    def check(self) -> None:
        """Raise `TierError` if another medium is at the directory than before, or none. Cheap: one `stat`, or three."""
        if self._mount_point is not None and not os.path.ismount(self._mount_point):
            raise TierError(
                f"tier {self._tier!r}: nothing is mounted at {self._mount_point}",
                cure=f"mount the disk, or correct l2.{self._tier}.mount_point",
                retryable=False,
            )
        seen = self._seen
        if seen is not None:
            try:
                about = os.stat(self._marker)  # noqa: PTH116
            except OSError:
                about = None
            if about is not None and (about.st_dev, about.st_ino, about.st_ctime_ns) == seen:
                return
        with self._lock:
            self._look()

    def mark(self) -> None:
        """Take the directory, which exists, as ours: give it an id unless it has one. One that takes no marker, because
        it is read-only or full, cannot be distinguished from others."""
        with self._lock, contextlib.suppress(OSError):
            if self._device is None:
                if not self._read():
                    self._write(self._id_to_give())
                self._adopt()

    def _look(self) -> None:
        there = self._read()
        if self._device is None:  # the first look
            if there:
                self._adopt()
            return
        if there and there == self._id:
            self._adopt()  # mounted again, or only touched, or emptied and marked by another server
            self._on_replaced()
            return
        now = _device(self._root)
        if there or now != self._device:
            what = f"another medium ({there[:8]}…)" if there else "another disk, with no mark of ours,"
            raise TierError(
                f"tier {self._tier!r}: {what} is at {self._root} and it was {self._id[:8]}… before",
                cure="mount that again, or restart the server to use what is there now",
                retryable=False,
            )
        # The same file system, without our files: somebody has deleted them.
        self._emptied, self._seen, self._device, self._id = (now, self._id), None, None, ""
        self._on_replaced()

    def _read(self) -> str:
        """The id; empty if there is none. Raises `TierError` where it cannot be read: then it is not known whose it
        is, and nobody replaces it."""
        try:
            handle, _ = open_file(self._marker)
            with open(handle, "rb") as file:
                return file.read(_ID_CHARS).decode("ascii", "replace").strip()
        except NotAFileError as error:
            text = f"tier {self._tier!r}: {self._marker} cannot be read: {error}; remove it if nobody needs it"
            raise TierError(text, retryable=False) from error
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            cure = "; servers of different users cannot share a directory" if error.errno == errno.EACCES else ""
            raise TierError(
                f"tier {self._tier!r}: {self._marker} cannot be read: {error.strerror}{cure}",
                retryable=error.errno != errno.EACCES,
            ) from error

    def _id_to_give(self) -> str:
        """The id that the directory had before it was emptied, if it is on the same file system; else a new one."""
        if self._emptied is not None and self._emptied[0] == _device(self._root):
            return self._emptied[1]
        return secrets.token_hex(_ID_CHARS // 2)

    def _write(self, medium_id: str) -> None:
        """Publish the id, whole or not at all; another server's stays if it was first."""
        beside = f"{self._marker}.{secrets.token_hex(8)}"
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.write(handle, medium_id.encode())
            finally:
                os.close(handle)
            try:
                os.link(beside, self._marker)
            except FileExistsError:
                if not self._read():  # cut off by a crash
                    os.rename(beside, self._marker)  # noqa: PTH104
            except OSError:  # a file system without links: the last server wins, before any has stored
                os.rename(beside, self._marker)  # noqa: PTH104
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)  # noqa: PTH108

    def _adopt(self) -> None:
        about = os.stat(self._marker)  # noqa: PTH116
        self._id = self._read()
        self._device = _device(self._root)
        self._seen = _Seen(about.st_dev, about.st_ino, about.st_ctime_ns)


def _device(path: str) -> tuple[int, int]:
    """The file system of a path, or of the nearest folder above it that exists."""
    while True:
        try:
            return os.stat(path).st_dev, os.statvfs(path).f_fsid  # noqa: PTH116
        except FileNotFoundError:
            above = os.path.dirname(path)  # noqa: PTH120
            if above == path:
                raise
            path = above
