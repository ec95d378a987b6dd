"""The operating system's errors, and what they mean: outcomes, and what a person can do."""

from __future__ import annotations

import errno

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_fs.settings import FsSettings

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_PERMANENT = (*_FORBIDDEN, errno.EINVAL, errno.ENOTDIR)


class Errors:
    """The errors of one tier."""

    def __init__(self, tier: str, root: object, settings: FsSettings) -> None:
        self._tier = tier
        self._root = root
        self._settings = settings

    def outcome(self, what: str, error: OSError) -> Outcome:
        """Of one object."""
        if error.errno in _FULL:
            return Outcome(Result.FULL, error=self.text(what, error))
        return Outcome(Result.FAILED, error=self.text(what, error), retryable=error.errno not in _PERMANENT)

    def tier_error(self, what: str, error: OSError) -> TierError:
        """Of a whole call."""
        return TierError(self.text(what, error), retryable=error.errno not in _FORBIDDEN)

    def text(self, what: str, error: OSError) -> str:
        """What happened, to which file, and after the last colon what to do."""
        if error.errno in _FORBIDDEN:
            cure = f"give the server's user the right to read and write {self._root}"
        elif error.errno == errno.EINVAL and self._settings.io_mode == "direct":
            cure = f'the medium does not allow O_DIRECT: use l2.{self._tier}.io_mode = "auto"'
        elif error.errno in _FULL:
            cure = f"free some space on the medium, or lower l2.{self._tier}.capacity_bytes"
        else:
            cure = f"check the disk under {self._root}"
        return f"tier {self._tier!r} cannot {what}: {error.strerror or error} ({error.filename or 'a file'}): {cure}"
