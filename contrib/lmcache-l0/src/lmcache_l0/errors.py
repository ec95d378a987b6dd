"""The exceptions of a table. A miss is a value; these are calls that failed."""

from __future__ import annotations

from typing import ClassVar

from lmcache_core.errors import CacheError, Retry, UsageError

__all__ = [
    "SizesError",
    "TableBusyError",
    "TableDamagedError",
    "TableError",
    "TableFullError",
    "TableLoadWarning",
    "TableMismatchError",
    "TableRoomError",
    "UsageError",
    "ValueTooLargeError",
]


class TableError(CacheError):
    """The shared table cannot be created, attached or written."""

    code = "L0"


class TableMismatchError(TableError):
    """The existing table differs from the requested one; the message names both."""

    code = "L0_MISMATCH"


class TableDamagedError(TableError):
    """The file is not a table, or was truncated or overwritten."""

    code = "L0_DAMAGED"


class TableRoomError(TableError):
    """There is not enough memory, or space on the mount, for a table of this size."""

    code = "L0_ROOM"


class TableFullError(TableError):
    """No free slot within reach of the key; the message says how to size the table."""

    code = "L0_FULL"


class TableBusyError(TableError):
    """A living process holds the key's slot and is stopped, or writes it faster than it can be read."""

    code = "L0_BUSY"
    retry: ClassVar[Retry] = Retry.LATER


class SizesError(UsageError):
    """size_gb, hash_slots and max_value_size contradict each other; the message says what to change."""

    code = "L0_SIZES"


class ValueTooLargeError(UsageError):
    """The value does not fit a slot of this table."""

    code = "L0_VALUE_TOO_LARGE"


class TableLoadWarning(UserWarning):
    """The table has reached 70 % of its slots."""
