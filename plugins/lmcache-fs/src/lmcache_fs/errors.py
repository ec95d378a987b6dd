"""The operating system's errors, and what they mean: outcomes, and what a person can do."""

from __future__ import annotations

import errno
from pathlib import Path

from lmcache_core.errors import TierError
from lmcache_core.files import FULL, inodes_are_scarce, reason_of
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_fs.settings import FsSettings

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_PERMANENT = (*_FORBIDDEN, errno.EINVAL, errno.ENOTDIR, errno.EFBIG)
# The machine's or the process's trouble. Any other error of a read is about what is read: file systems and drivers have
# many numbers for a bad sector (EIO, EUCLEAN, EBADMSG, EREMOTEIO, ENODATA, …).
_NOT_THE_FILE = (
    *_FORBIDDEN, errno.EINVAL, errno.ENOTDIR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR,
    errno.ENODEV, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESTALE,
)  # fmt: skip


class Errors:
    """The errors of one tier."""

    def __init__(self, tier: str, root: Path, settings: FsSettings) -> None:
        self._tier = tier
        self._root = root
        self._settings = settings

    def outcome(self, what: str, error: OSError) -> Outcome:
        """Of one object."""
        if error.errno in FULL:
            return self.of(Result.FULL, what, error, retryable=False)
        return self.of(Result.FAILED, what, error, retryable=error.errno not in _PERMANENT)

    def of(self, result: Result, what: str, error: OSError, *, retryable: bool) -> Outcome:
        """Of one object, where what it means is known."""
        return Outcome.of(self._explained(what, error, retryable=retryable), result)

    def of_the_file(self, error: OSError) -> bool:
        """Whether a read failed because of what is read: one bad object, and not a bad medium."""
        return error.errno not in _NOT_THE_FILE

    def of_the_folder(self, error: OSError) -> bool:
        """Whether a look failed because of the rights or the kind of a folder: perhaps of one shard's alone."""
        return error.errno in (errno.EACCES, errno.EPERM, errno.ENOTDIR)

    def tier_error(self, what: str, error: OSError) -> TierError:
        """Of a whole call."""
        return self._explained(what, error, retryable=error.errno not in _FORBIDDEN)

    def _explained(self, what: str, error: OSError, *, retryable: bool) -> TierError:
        """What happened, to which file, and what to do."""
        if error.errno == errno.EROFS:
            cure = "mount it writable; if the kernel has made it read-only, its log says which errors the disk had"
        elif error.errno in _FORBIDDEN:
            cure = f"give the server's user the right to read and write {self._root}"
        elif error.errno == errno.EINVAL and self._settings.io_mode == "direct":
            cure = f'the medium does not allow O_DIRECT: use l2.{self._tier}.io_mode = "auto"'
        elif error.errno == errno.EDQUOT:
            cure = f"raise the quota, lower l2.{self._tier}.capacity_bytes, or store larger chunks"
        elif error.errno == errno.EFBIG:
            cure = "the object is larger than a file may be here: raise the limit (ulimit -f), or store smaller chunks"
        elif error.errno in FULL and inodes_are_scarce(self._root):
            cure = "the file system has no inodes left: give it more, or store larger chunks"
        elif error.errno in FULL:
            cure = f"free some space on the medium, or lower l2.{self._tier}.capacity_bytes"
        else:
            cure = f"check the disk under {self._root}"
        where = error.filename2 or error.filename or self._root  # a rename fails because of what is in its way
        message = f"tier {self._tier!r} cannot {what}: {reason_of(error, self._root)} ({where})"
        return TierError(message, cure=cure, retryable=retryable)
