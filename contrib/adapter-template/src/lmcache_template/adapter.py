"""The SQLite tier: one row for each object."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_template.settings import SqliteSettings

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_PAGE_BYTES = 4096
_SCAN_PAGE_ENTRIES = 1000
_OBJECT_BYTES_MAX = 500 << 20  # SQLite's own limit for a value is 1,000,000,000 bytes unless it was built otherwise
_TABLE = "CREATE TABLE IF NOT EXISTS objects (key BLOB PRIMARY KEY, used_at_s REAL NOT NULL, content BLOB NOT NULL)"
_LATE = Outcome(Result.FAILED, error="not begun by its deadline", retryable=True)


class SqliteAdapter(L2Adapter):
    """Rows of the file `settings.path`. Thread-safe: each thread has a connection of its own."""

    # What is claimed here is tested by the kit, and used by the kernel.
    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True, object_bytes_max=_OBJECT_BYTES_MAX)

    def __init__(self, settings: SqliteSettings, context: AdapterContext) -> None:
        # Nothing is opened here: a tier whose medium is down at start is used as soon as it is up.
        self._settings = settings
        self._tier = context.tier
        self._of_thread = threading.local()
        self._opening = threading.Lock()
        self._opened: list[sqlite3.Connection] = []
        self._closed = False

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        return self._each(self._store_one, items, deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        def ask(connection: sqlite3.Connection) -> list[bool]:
            query = "SELECT 1 FROM objects WHERE key = ?"
            return [connection.execute(query, (key,)).fetchone() is not None for key in keys]

        return self._whole(ask, deadline)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self._each(self._load_one, items, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self._each(self._delete_one, keys, deadline)

    def usage(self) -> Usage:
        """From the file's page counts: to count rows would mean to walk them."""

        def ask(connection: sqlite3.Connection) -> Usage:
            pages, free, size = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
            most = self._settings.file_bytes_max
            used = (pages - free) * size
            return Usage(used, None, None if most is None else max(0, most - used))

        return self._whole(ask, time.monotonic() + 1.0)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """By key; the cursor is the last key of the page."""

        def ask(connection: sqlite3.Connection) -> ScanPage:
            after = bytes.fromhex(cursor) if cursor is not None else None
            query = (
                "SELECT key, length(content), used_at_s FROM objects WHERE ?1 IS NULL OR key > ?1 ORDER BY key LIMIT ?2"
            )
            rows = connection.execute(query, (after, _SCAN_PAGE_ENTRIES)).fetchall()
            entries = [ScanEntry(*row) for row in rows]
            return ScanPage(entries, entries[-1].key.hex() if len(entries) == _SCAN_PAGE_ENTRIES else None)

        return self._whole(ask, deadline)

    def medium(self) -> str:
        """The same words for every adapter on this file: the server refuses two tiers on one medium."""
        return f"the database {self._settings.path.resolve()}"

    def close(self) -> None:
        with self._opening:
            self._closed = True
            while self._opened:
                self._opened.pop().close()

    # --- one object ---------------------------------------------------------------------------------------
    def _store_one(self, connection: sqlite3.Connection, item: StoreItem) -> Outcome:
        if item.nbytes > _OBJECT_BYTES_MAX:
            return Outcome(Result.FAILED, error=f"{item.nbytes:,} bytes are more than a row can hold")
        # One statement: readers see the old object or the new one, and never a part of it.
        connection.execute(
            "INSERT INTO objects VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE "
            "SET used_at_s = excluded.used_at_s, content = excluded.content",
            (item.key, time.time(), b"".join(item.buffers)),
        )
        return Outcome(Result.DONE, item.nbytes)

    def _load_one(self, connection: sqlite3.Connection, item: LoadItem) -> Outcome:
        row = connection.execute("SELECT content FROM objects WHERE key = ?", (item.key,)).fetchone()
        if row is None:
            return Outcome(Result.MISS)
        content = memoryview(row[0])
        room = sum(buffer.nbytes for buffer in item.buffers)
        if content.nbytes > room:
            return Outcome(Result.DAMAGED, error=f"it has {content.nbytes:,} bytes, and {room:,} were expected")
        at = 0
        for buffer in item.buffers:
            part = content[at : at + buffer.nbytes]
            buffer[: part.nbytes] = part
            at += part.nbytes
        return Outcome(Result.DONE, content.nbytes)

    def _delete_one(self, connection: sqlite3.Connection, key: bytes) -> Outcome:
        connection.execute("DELETE FROM objects WHERE key = ?", (key,))
        return Outcome(Result.DONE)

    # --- all of them --------------------------------------------------------------------------------------
    def _each(
        self, method: Callable[[sqlite3.Connection, Item], Outcome], items: Sequence[Item], deadline: float
    ) -> list[Outcome]:
        """One outcome for each item: what SQLite refuses is a value."""
        self._check_open()
        outcomes: list[Outcome] = []
        for item in items:
            if time.monotonic() >= deadline:
                outcomes.append(_LATE)
                continue
            try:
                outcomes.append(method(self._connection(deadline), item))
            except sqlite3.Error as error:
                outcomes.append(self._refused(error))
        return outcomes

    def _whole(self, call: Callable[[sqlite3.Connection], Answer], deadline: float) -> Answer:
        """A call that has no outcome for each item raises TierError where it fails."""
        self._check_open()
        try:
            return call(self._connection(deadline))
        except sqlite3.Error as error:
            refused = self._refused(error)
            raise TierError(refused.error, retryable=refused.retryable) from error

    def _refused(self, error: sqlite3.Error) -> Outcome:
        code = getattr(error, "sqlite_errorcode", None)
        words = f"tier {self._tier!r}: {self._settings.path}: {error}"
        if code == sqlite3.SQLITE_FULL:
            return Outcome(Result.FULL, error=words)
        busy = code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        return Outcome(Result.FAILED, error=words, retryable=busy)

    def _connection(self, deadline: float) -> sqlite3.Connection:
        """This thread's connection; it waits for another one's lock until the deadline and no longer."""
        connection: sqlite3.Connection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = self._open(deadline)
        wait_ms = max(0, int(1000 * (deadline - time.monotonic())))
        connection.execute(f"PRAGMA busy_timeout = {wait_ms}")
        return connection

    def _open(self, deadline: float) -> sqlite3.Connection:
        with self._opening:
            self._check_open()
            wait_s = max(0.0, deadline - time.monotonic())
            # isolation_level None: each statement is a transaction of its own.
            connection = sqlite3.connect(
                self._settings.path, timeout=wait_s, isolation_level=None, check_same_thread=False
            )
            self._opened.append(connection)
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")  # readers go on while someone writes
            connection.execute("PRAGMA synchronous = OFF")  # a cache: a power cut may cost objects, which are misses
            if self._settings.file_bytes_max is not None:
                connection.execute(f"PRAGMA max_page_count = {max(1, self._settings.file_bytes_max // _PAGE_BYTES)}")
            connection.execute(_TABLE)
            return connection

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self._tier!r} is closed", retryable=False)
