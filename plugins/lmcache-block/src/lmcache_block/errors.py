"""The operating system's errors, and what they mean: outcomes, and what a person can do."""

from __future__ import annotations

import errno

from lmcache_block.settings import BlockSettings
from lmcache_core.errors import TierError
from lmcache_core.files import FULL
from lmcache_core.tiers.contract import Outcome, Result

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_PERMANENT = (*_FORBIDDEN, errno.EINVAL, errno.ENOTDIR, errno.EFBIG)
# What a read answers for a bad sector, on one file system or driver or another. Anything else is about the medium.
_BAD_SECTOR = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO)


class Errors:
    """Of one tier."""

    def __init__(self, tier: str, settings: BlockSettings) -> None:
        self.tier = tier
        self._settings = settings

    def refuse(self, said: str, cure: str, *, retryable: bool = False) -> TierError:
        """A medium that is not used as it is."""
        return TierError(f"tier {self.tier!r}: {said}", cure=cure, retryable=retryable)

    def outcome(self, what: str, error: OSError) -> Outcome:
        """Of one object."""
        full = what == "store" and error.errno in FULL
        return Outcome.of(self.tier_error(what, error), Result.FULL if full else Result.FAILED)

    def unreadable(self, error: OSError, version: str) -> Outcome | None:
        """Of an object whose blocks cannot be read; None: it is the medium that cannot."""
        if error.errno not in _BAD_SECTOR:
            return None
        return Outcome.of(self.tier_error("load", error), Result.DAMAGED)._replace(retryable=False, version=version)

    def tier_error(self, what: str, error: OSError) -> TierError:
        """What happened, to which medium, and what to do."""
        path, tier = self._settings.path, self.tier
        if error.errno == errno.EROFS:
            cure = "mount it writable; if the kernel has made it read-only, its log says which errors the disk had"
        elif error.errno in _FORBIDDEN:
            cure = f"give the server's user the right to read and write {path}"
        elif error.errno == errno.EINVAL and self._settings.io_mode == "direct":
            cure = f'the medium does not allow O_DIRECT in blocks of 4 KiB: set l2.{tier}.io_mode = "buffered"'
        elif error.errno == errno.EDQUOT:
            cure = f"raise the quota of the user, the group or the project, or lower l2.{tier}.size_bytes"
        elif error.errno == errno.EFBIG:
            cure = f"the file would be larger than a file may be here: lower l2.{tier}.size_bytes"
        elif error.errno in FULL:
            cure = f"free some space on the file system of {path}, or lower l2.{tier}.size_bytes"
        else:
            cure = f"check the disk of {path}: the kernel's log says which errors it had"
        said = f"tier {tier!r} cannot {what}: {error.strerror or error} ({path})"
        return TierError(said, cure=cure, retryable=error.errno not in _PERMANENT)
