"""Which of the adapters on one directory keeps headroom: the one that holds a lock, which ends with its process."""

from __future__ import annotations

import fcntl
import os

from lmcache_fs.client import NotAFileError, make_folder, open_file

_NAME = "leader"


class Lead:
    """A lock on a file in the directory. Only the scan uses it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._handle: int | None = None

    def take(self) -> bool:
        """True: we hold it. Also True if the medium has no locks, because then nobody else can lead either."""
        if self._handle is not None and self._is_there(self._handle):
            return True
        self.close()
        try:
            make_folder(self._root, sync=False)
            handle, _ = open_file(f"{self._root}/{_NAME}", os.O_RDWR | os.O_CREAT)
        except (OSError, NotAFileError):
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError:  # a medium without locks
            os.close(handle)
            return True
        self._handle = handle
        return True

    def close(self) -> None:
        """Let another lead."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _is_there(self, handle: int) -> bool:
        """Whether the file that we locked still has its name: someone may have deleted the directory."""
        try:
            found = os.stat(f"{self._root}/{_NAME}")  # noqa: PTH116
        except OSError:
            return False
        mine = os.fstat(handle)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
