"""Where an adapter writes files before it publishes them, and how those of dead adapters go away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from itertools import count
from pathlib import Path


class TemporaryFolder:
    """A folder of one adapter, under a lock that the operating system releases with the process.

    Safe among servers on one directory: a folder is swept only by who holds its lock, and the lock is taken
    before the folder gets its final name.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._numbers = count(1)
        self._lock: int | None = None
        self.path = ""

    def open(self) -> None:
        """Make the folder (again, if someone has removed it). Raises `OSError`."""
        self.close()
        self._parent.mkdir(parents=True, exist_ok=True)
        token = f"{os.getpid()}-{secrets.token_hex(8)}"
        making = self._parent / f".{token}"
        making.mkdir(mode=0o700)
        handle = os.open(making / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            making.rename(self._parent / token)
        except OSError:
            os.close(handle)
            raise
        self._lock = handle
        self.path = str(self._parent / token)

    def name(self) -> str:
        """A path that nobody else uses."""
        return f"{self.path}/{next(self._numbers)}"

    def close(self) -> None:
        """Remove the folder and what is in it."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def sweep(parent: Path) -> int:
    """Remove the folders of dead adapters; how many."""
    swept = 0
    with contextlib.suppress(OSError):
        for folder in list(parent.iterdir()):
            if not folder.name.startswith(".") and _is_dead(folder):
                swept += 1
    return swept


def _is_dead(folder: Path) -> bool:
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # not ours, or just swept by someone else
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except OSError:
        return False  # its adapter lives
    finally:
        os.close(handle)
