"""Where an adapter writes files before it publishes them, and how those of dead adapters are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from itertools import count
from pathlib import Path

from lmcache_fs.client import NotAFileError, open_file

_LOCK = "lock"
_UNFINISHED = "~"  # behind the name of a folder whose lock is not taken yet
_TRIES_MAX = 16  # of a folder that sweepers remove before it is finished


class TemporaryFolder:
    """A folder of one adapter, under a lock that the operating system releases with the process.

    Safe with several servers on one directory: a folder gets its name once its lock is taken, so a folder whose lock is
    free has no owner. Nobody waits for a lock: whoever can open the file could keep it.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._numbers = count(1)
        self._lock: int | None = None
        self._left: set[str] = set()
        self.path = ""

    def open(self) -> None:
        """Create the folder (again, if someone has removed it). Raises `OSError`."""
        self.close()
        for tries_left in reversed(range(_TRIES_MAX)):
            folder = self._parent / f"{os.getpid()}-{secrets.token_hex(8)}"
            unfinished = folder.with_name(folder.name + _UNFINISHED)
            unfinished.mkdir(mode=0o700)
            try:
                self._lock = _finished(unfinished, folder)
            except (FileNotFoundError, BlockingIOError):  # a sweeper took it for a dead one's
                if not tries_left:
                    raise
            else:
                self.path = str(folder)
                return

    def name(self) -> str:
        """A path that nobody else uses."""
        if self._left:
            self._remove_left()
        return f"{self.path}/{next(self._numbers)}"

    def discard(self, path: str) -> None:
        """Remove a file that was not published. If that fails, each later store tries again: the file takes space that
        nobody counts."""
        self._left.add(path)
        self._remove_left()

    def _remove_left(self) -> None:
        for each in sorted(self._left):
            try:
                os.unlink(each)  # noqa: PTH108  # a name like all others here
            except FileNotFoundError:
                pass
            except OSError:
                continue
            self._left.discard(each)

    def close(self) -> None:
        """Remove the folder and what is in it."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
            self._left.clear()


def _finished(unfinished: Path, folder: Path) -> int:
    """Lock the folder, then give it its name. The lock's descriptor. Raises `FileNotFoundError` or `BlockingIOError` if
    a sweeper was quicker, and `OSError`."""
    handle, _ = open_file(f"{unfinished}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unfinished.rename(folder)
        if not os.path.samestat(os.fstat(handle), os.stat(folder / _LOCK)):  # noqa: PTH116  # one call, no object
            raise FileNotFoundError(f"{folder / _LOCK} was replaced")
    except OSError:
        os.close(handle)
        raise
    return handle


def sweep(parent: Path) -> int:
    """Remove the folders of dead adapters; how many."""
    swept = 0
    with contextlib.suppress(OSError):
        for folder in [each for each in parent.iterdir() if _is_dead(each)]:
            shutil.rmtree(folder, ignore_errors=True)
            swept += not folder.exists()
    return swept


def _is_dead(folder: Path) -> bool:
    """Whether no adapter owns the folder: its lock is free, or missing (its creator died, or a sweeper did)."""
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode):
            return False
        handle, _ = open_file(f"{folder}/{_LOCK}", os.O_RDWR)
    except FileNotFoundError:
        return True
    except (OSError, NotAFileError):
        return False  # of another user, or no lock of ours: not ours to remove
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False  # its adapter lives
    finally:
        os.close(handle)
