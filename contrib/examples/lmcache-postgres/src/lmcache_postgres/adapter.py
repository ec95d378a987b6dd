"""The tier: objects as rows of a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import psycopg

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
from lmcache_postgres.pool import LateError, Pool
from lmcache_postgres.settings import PostgresSettings

Answer = TypeVar("Answer")

_OBJECT_BYTES_MAX = 512 << 20  # a value may have 1 GiB, and the client holds several copies of it
_SCAN_PAGE_ENTRIES = 1000
_USAGE_S = 1.0
_AGAIN = ("08", "40", "53", "55", "57")  # connections, conflicts, resources, locks, an operator's doing


class PostgresAdapter(L2Adapter):
    """Rows of `settings.table`. A batch is one transaction."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True, object_bytes_max=_OBJECT_BYTES_MAX)

    def __init__(self, settings: PostgresSettings, context: AdapterContext) -> None:
        self._table = settings.table
        self._tier = context.tier
        told = psycopg.conninfo.conninfo_to_dict(settings.dsn.get_secret_value())
        self._place = f"{told.get('host', 'localhost')}:{told.get('port', 5432)}/{told.get('dbname', '')}"
        self._pool = Pool(settings.dsn.get_secret_value(), _SETUP.format(table=settings.table))
        self._closed = False

    # --- what the server calls, from several threads at once --------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        statement = (
            f"INSERT INTO {self._table} VALUES (%s, %s, %s) ON CONFLICT (key) DO UPDATE "
            "SET stored_at_s = excluded.stored_at_s, content = excluded.content"
        )

        def put(cursor: psycopg.Cursor) -> list[Outcome]:
            now = time.time()
            for item in sorted(items, key=lambda item: item.key):  # all in one order: no two wait for each other
                if item.nbytes <= _OBJECT_BYTES_MAX:
                    cursor.execute(statement, (item.key, now, b"".join(item.buffers)))
            return [
                Outcome(Result.DONE, item.nbytes)
                if item.nbytes <= _OBJECT_BYTES_MAX
                else Outcome(Result.FAILED, error=f"{item.nbytes:,} bytes, and a row holds {_OBJECT_BYTES_MAX:,}")
                for item in items
            ]

        return self._each(put, len(items), deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        def ask(cursor: psycopg.Cursor) -> list[bool]:
            cursor.execute(f"SELECT key FROM {self._table} WHERE key = ANY(%s)", (list(keys),))
            there = {key for (key,) in cursor}
            return [key in there for key in keys]

        return self._whole(ask, deadline)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        def fetch(cursor: psycopg.Cursor) -> list[Outcome]:
            outcomes = []
            for item in items:  # one by one: a batch of large objects would be held twice
                row = cursor.execute(f"SELECT content FROM {self._table} WHERE key = %s", (item.key,)).fetchone()
                outcomes.append(Outcome(Result.MISS) if row is None else _filled(item, memoryview(row[0])))
            return outcomes

        return self._each(fetch, len(items), deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        def remove(cursor: psycopg.Cursor) -> list[Outcome]:
            for key in sorted(keys):
                cursor.execute(f"DELETE FROM {self._table} WHERE key = %s", (key,))
            return [Outcome(Result.DONE)] * len(keys)

        return self._each(remove, len(keys), deadline)

    def usage(self) -> Usage:
        """Counted row by row: the table's size on disk includes rows that a vacuum has yet to free. A row's length is
        known without its content."""

        def ask(cursor: psycopg.Cursor) -> Usage:
            row = cursor.execute(f"SELECT coalesce(sum(octet_length(content)), 0)::bigint, count(*) FROM {self._table}")
            used, objects = row.fetchone() or (0, 0)
            return Usage(used, objects)

        return self._whole(ask, time.monotonic() + _USAGE_S)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """In the order of the keys; the cursor is the last key of the page, whether or not it is still there."""

        def ask(found: psycopg.Cursor) -> ScanPage:
            what = f"SELECT key, octet_length(content), stored_at_s FROM {self._table}"
            last = bytes.fromhex(cursor or "")
            found.execute(f"{what} WHERE key > %s ORDER BY key LIMIT %s", (last, _SCAN_PAGE_ENTRIES))
            entries = [ScanEntry(*row) for row in found]
            return ScanPage(entries, entries[-1].key.hex() if len(entries) == _SCAN_PAGE_ENTRIES else None)

        return self._whole(ask, deadline)

    def medium(self) -> str:
        return f"the table {self._table} of {self._place}"

    def close(self) -> None:
        self._closed = True
        self._pool.close()

    # --- inside -----------------------------------------------------------------------------------------------
    def _each(self, call: Callable[[psycopg.Cursor], list[Outcome]], count: int, deadline: float) -> list[Outcome]:
        """One outcome for each item: one transaction is done for all of them, or for none."""
        self._check_open()
        try:
            with self._pool.transaction(deadline) as cursor:
                return call(cursor)
        except (psycopg.Error, LateError) as error:
            full = isinstance(error, psycopg.errors.DiskFull)
            result = Result.FULL if full else Result.FAILED
            return [Outcome(result, error=self._words(error), retryable=not full and _is_passing(error))] * count

    def _whole(self, call: Callable[[psycopg.Cursor], Answer], deadline: float) -> Answer:
        self._check_open()
        try:
            with self._pool.transaction(deadline) as cursor:
                return call(cursor)
        except (psycopg.Error, LateError) as error:
            raise TierError(self._words(error), retryable=_is_passing(error)) from error

    def _words(self, error: Exception) -> str:
        return f"tier {self._tier!r}: {self._place}: {' '.join(str(error).split())}"

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self._tier!r} is closed", retryable=False)


# The lock: two that make one table at once would both find it missing. EXTERNAL: no compression, so that a value's
# length is known without it.
_SETUP = """
BEGIN;
SELECT pg_advisory_xact_lock(hashtext('lmcache'));
CREATE TABLE IF NOT EXISTS {table}
    (key bytea PRIMARY KEY, stored_at_s double precision NOT NULL, content bytea STORAGE EXTERNAL NOT NULL);
COMMIT
"""


def _is_passing(error: Exception) -> bool:
    """Whether a second try may do. What has no SQLSTATE never reached the database, or was cut off."""
    state = getattr(error, "sqlstate", None)
    return state is None or state.startswith(_AGAIN)


def _filled(item: LoadItem, content: memoryview) -> Outcome:
    room = sum(buffer.nbytes for buffer in item.buffers)
    if content.nbytes > room:
        return Outcome(Result.DAMAGED, error=f"it has {content.nbytes:,} bytes, and {room:,} were expected")
    at = 0
    for buffer in item.buffers:
        part = content[at : at + buffer.nbytes]
        buffer[: part.nbytes] = part
        at += part.nbytes
    return Outcome(Result.DONE, content.nbytes)
