"""A server's own table: found or created at the server's start, emptied, owned by one server, and removed at its
end."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any

from lmcache_core import Finding
from lmcache_core.errors import CacheError, UsageError
from lmcache_l0.cache import SharedCache
from lmcache_l0.errors import TableBusyError, TableMismatchError
from lmcache_l0.making import open_table, room_at
from lmcache_l0.records import L0_KEY_BYTES_MAX
from lmcache_l0.settings import L0Settings
from lmcache_l0.sizing import GIB, Plan, plan_table

_SMALLER = "make it smaller (l0.size_gb, l0.hash_slots), or give the mount more"
WAIT_S = 0.001  # the longest wait of the loop for a stopped writer


def table_path(folder: Path, server: str) -> Path:
    """The file of a server's table."""
    return folder / f"lmcache-core-{os.geteuid()}-{server}.l0"


def room_for(settings: L0Settings, server: str) -> Finding:
    """Whether the configured table can be created, or already exists."""
    path = table_path(settings.folder, server)
    try:
        file_bytes = _planned(settings).file_bytes
        held = path.stat().st_size if path.exists() else 0
        available_bytes, where = room_at(path)
    except CacheError as error:
        return Finding.of_error("l0", error, _SMALLER)
    except OSError as error:
        return Finding(False, "l0", str(error), f"make {path.parent} a directory that user {os.geteuid()} may write to")
    text = f"{path} takes {file_bytes / GIB:.3f} GiB, and {where} has room for {available_bytes / GIB:.3f} GiB"
    ok = file_bytes <= available_bytes + held
    return Finding(ok, "l0", text, "" if ok else _SMALLER)


def _planned(settings: L0Settings) -> Plan:
    return plan_table(**settings.sizes, max_key_size=L0_KEY_BYTES_MAX)  # type: ignore[arg-type]  # held by settings


class KeptTable:
    """The table and the lock of its owner. The lock is a flock of the file, on a separate file description, and ends
    with the process."""

    def __init__(self, settings: L0Settings, server: str) -> None:
        """An empty table, on or off as settings say. Raises `UsageError` if another server owns it, and what
        `SharedCache` raises."""
        self.path = table_path(settings.folder, server)
        plan = _planned(settings)
        sizes: dict[str, Any] = {
            "hash_slots": plan.hash_slots,
            "max_value_size": plan.max_value_size,
            "max_key_size": plan.max_key_size,
        }
        self._lock = -1
        try:
            if not self._adopt(sizes):
                # Off until it is ours: nobody may be served from a table without an owner.
                SharedCache(self.path, create=True, enabled=False, huge_pages=settings.huge_pages, **sizes).close()
                if not self._adopt(sizes):
                    raise UsageError(f"{self.path} was changed by somebody else while it was made: start again")
            self.table = SharedCache(self.path, create=False, wait_s=WAIT_S, huge_pages=settings.huge_pages)
            self.table.enabled = settings.enabled
        except BaseException:
            self._unlock()
            raise

    def _adopt(self, sizes: dict[str, Any]) -> bool:
        """Take over the existing table, and empty it. False: there is none, or it was unusable and is removed:
        processes that have it attached miss from now on."""
        try:
            fd = open_table(self.path, read_only=False)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UsageError(
                f"the table {self.path} is kept by another server of this name: give one of them another name, or "
                "another l0.folder"
            ) from None
        self._unlock()
        self._lock = fd
        try:
            with SharedCache(self.path, create=False, wait_s=WAIT_S, **sizes) as table:
                table.clear()
                return True
        except (TableMismatchError, TableBusyError):  # of other sizes, or a writer of it was stopped
            with SharedCache(self.path, create=False) as table:
                table.enabled = False
                table.unlink()
            return False

    def retire(self) -> None:
        """Disable the table and remove its file."""
        if not self.table.closed:
            self.table.enabled = False
            self.table.unlink()

    def close(self) -> None:
        """Close it and release the lock."""
        self.table.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = -1
