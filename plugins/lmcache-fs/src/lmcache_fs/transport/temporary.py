"""Where an adapter writes files before it publishes them, and how those of dead adapters are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_LOCK = "lock"


class TemporaryFolder:
    """A folder of one adapter, under a lock that the operating system releases with the process.

    Safe with several servers on one directory: folders are created and checked under a lock of their parent, so a
    folder whose own lock is free has no owner.
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
        with _alone(self._parent):
            folder = self._parent / f"{os.getpid()}-{secrets.token_hex(8)}"
            folder.mkdir(mode=0o700)
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                raise
        self._lock = handle
        self.path = str(folder)

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


def sweep(parent: Path) -> int:
    """Remove the folders of dead adapters; how many."""
    swept = 0
    with contextlib.suppress(OSError):
        with _alone(parent):
            dead = [folder for folder in parent.iterdir() if _is_dead(folder)]
        for folder in dead:  # nobody uses it again: there is time
            shutil.rmtree(folder, ignore_errors=True)
            swept += not folder.exists()
    return swept


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Under the lock of all folders in `parent`. Raises `OSError`."""
    # Beside the folder: a directory cannot be locked on every medium.
    handle = os.open(parent.with_name(f"{parent.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_dead(folder: Path) -> bool:
    """Whether no adapter owns the folder: its lock is free, or missing (its creator died, or a sweeper did). Called
    under the parent's lock, when nobody can be creating one."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # of another user: leave it alone
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False  # its adapter lives
    finally:
        os.close(handle)
