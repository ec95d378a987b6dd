"""Epochs of namespaces: part of every tier key, so that what was cleared can never come back from a medium."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lmcache_core.errors import SettingsError
from lmcache_core.files import replace_file
from lmcache_core.limits import KEY_BYTES
from lmcache_core.tiers.object.format import split_tier_key


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    everything: int
    namespaces: dict[int, int]


class Epochs:
    """One number for each namespace, never below that of `everything`. Kept in a file if there is one.

    The file is replaced before a new epoch is used: a crash can lose an answer to `clear`, never a clear that was
    answered. Servers that share a tier should share this file too, or they stop sharing with the first clear. A change
    happens under a lock, on the file's current content, and no epoch in it ever falls; `refresh` takes over the changes
    of other servers.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = Path(path) if path is not None else None
        self._stored = _Stored(0, {})
        self._seen: tuple[int, int, int] | None = None  # the file when it was last read
        if self._path is not None:
            try:
                self._merge()
            except (OSError, msgspec.MsgspecError) as error:
                raise SettingsError(
                    f"cannot read the epochs of the namespaces from {self._path}: {error}. Restore the file, or "
                    "clear the tiers by hand and delete it: without it cleared objects would come back"
                ) from error

    def of(self, namespace: int) -> int:
        stored = self._stored
        return max(stored.everything, stored.namespaces.get(namespace, 0))

    def refresh(self) -> bool:
        """Take over the changes of other servers; returns whether there were any. If the file cannot be read now,
        nothing changes, and the next refresh takes them over."""
        try:
            return self._path is not None and self._merge()
        except (OSError, msgspec.MsgspecError):
            return False

    def move(self, namespace: int | None) -> None:
        """Move a namespace, or all (None), to its next epoch. Raises `SettingsError` if it cannot be saved."""
        if self._path is None:
            self._stored = _moved(self._stored, namespace)
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_name(f"{self._path.name}.lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed, for one small write
                self._merge()
                moved = _moved(self._stored, namespace)
                replace_file(self._path, msgspec.json.encode(moved))
        except (OSError, msgspec.MsgspecError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingsError(
                f"the tiers are not cleared: their new epoch cannot be kept in {self._path}: {reason}; "
                "let the server write there, or set state_dir to a directory where it may"
            ) from error
        self._stored = moved

    def _merge(self) -> bool:
        """Whether the file had newer epochs."""
        assert self._path is not None
        try:
            about = self._path.stat()
            seen = (about.st_ino, about.st_mtime_ns, about.st_size)
            if seen == self._seen:
                return False
            found = msgspec.json.decode(self._path.read_bytes(), type=_Stored, strict=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._seen, known = seen, self._stored
        everything = max(known.everything, found.everything)
        highest = {
            namespace: epoch
            for namespace in known.namespaces.keys() | found.namespaces.keys()
            if (epoch := max(known.namespaces.get(namespace, 0), found.namespaces.get(namespace, 0))) > everything
        }
        self._stored = _Stored(everything, highest)
        return self._stored != known


def _moved(stored: _Stored, namespace: int | None) -> _Stored:
    if namespace is None:
        return _Stored(max(stored.everything, *stored.namespaces.values(), 0) + 1, {})
    epoch = max(stored.everything, stored.namespaces.get(namespace, 0)) + 1
    return _Stored(stored.everything, {**stored.namespaces, namespace: epoch})


def former_epochs(tier_keys: Sequence[bytes], epochs: Epochs) -> list[bytes]:
    """Those of former epochs: a clear has made them unreachable."""
    former: dict[bytes, bool] = {}  # by the suffix after the key: a batch usually has one namespace and one epoch
    for tier_key in tier_keys:
        if tier_key[KEY_BYTES:] not in former:
            _, namespace, epoch = split_tier_key(tier_key)
            former[tier_key[KEY_BYTES:]] = epoch < epochs.of(namespace)
    if not any(former.values()):
        return []
    return [tier_key for tier_key in tier_keys if former[tier_key[KEY_BYTES:]]]
