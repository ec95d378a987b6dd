"""What `lmcache-core check` says of a medium before a server uses it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from lmcache_block.errors import Errors
from lmcache_block.medium.store import BlockStore
from lmcache_block.settings import BlockSettings
from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding

_PROBE_BYTES = 8 << 20


def probe_beside(settings: BlockSettings, errors: Errors) -> AbstractContextManager[BlockSettings] | None:
    """Settings of a small medium in the folder of a file that does not exist yet, or is empty. None: the medium is
    there, and ours. Raises `TierError` for a device that is empty, or a file that nobody would make."""
    path = settings.path
    try:
        about = path.stat()
    except FileNotFoundError:
        if settings.size_bytes is None:
            cure = f"mount its disk, or set l2.{errors.tier}.size_bytes to have the file made"
            raise errors.refuse(f"there is no {path}", cure) from None
        return _beside(settings, errors)
    except OSError as error:
        raise errors.tier_error("look at its medium", error) from error
    return _beside(settings, errors) if stat.S_ISREG(about.st_mode) and about.st_size == 0 else None


@contextmanager
def _beside(settings: BlockSettings, errors: Errors) -> Iterator[BlockSettings]:
    there = next(each for each in settings.path.parents if os.access(each, os.F_OK))
    try:
        with tempfile.TemporaryDirectory(prefix=".lmcache-check-", dir=there) as folder:
            probe = Path(folder) / "medium"
            small = {"path": probe, "size_bytes": _PROBE_BYTES, "extent_bytes": None}
            try:
                yield settings.model_copy(update=small)
            except TierError as error:
                said, cure = (each.replace(str(probe), str(settings.path)) for each in (error.happened, error.cure))
                raise TierError(said, cure=cure) from error
    except OSError as error:
        cure = f"make {settings.path.parent} a directory that user {os.getuid()} may write to"
        raise TierError(f"no file can be made in {there}: {error.strerror}", cure=cure) from error


def findings(settings: BlockSettings, tier: str, store: BlockStore | None) -> Iterator[Finding]:
    """How much room there is, and what is damaged."""
    if store is None:
        there = next(each for each in settings.path.parents if os.access(each, os.F_OK))
        found = os.statvfs(there)
        free, wanted = found.f_bavail * found.f_frsize, settings.size_bytes or 0
        cure = "" if free >= wanted else f"free some space there, or lower l2.{tier}.size_bytes"
        said = f"a server will make a file of {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        yield Finding(not cure, "", said, cure)
        return
    counts = store.counts()
    size = f"{store.block.extents} extents of {store.block.extent_bytes / 2**20:g} MiB"
    yield Finding(True, "", f"{counts.objects:,} objects on {size}, {counts.bytes_free / 2**30:.1f} GiB are free")
    if counts.damaged_extents or counts.damaged_slots:
        said = f"{counts.damaged_extents} extents and {counts.damaged_slots} slots cannot be read, and are not touched"
        yield Finding(True, "", said, "check the disk: the kernel's log says which errors it had")
