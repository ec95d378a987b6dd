"""The tier: objects as rows of a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import psycopg

from lmcache_core.errors import TierError
from lmcache_core.tiers.blocking import BatchAdapter, filled
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    StoreItem,
    Usage,
)
from lmcache_postgres.pool import Pool
from lmcache_postgres.settings import PostgresSettings

Answer = TypeVar("Answer")

_OBJECT_BYTES_MAX = 512 << 20  # a value may have 1 GiB, and the client holds several copies of it
_USAGE_S = 1.0
_AGAIN = ("08", "40", "53", "55", "57")  # connections, conflicts, resources, locks, an operator's doing


class PostgresAdapter(BatchAdapter):
    """Rows of `settings.table`. A batch is one transaction."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True, object_bytes_max=_OBJECT_BYTES_MAX)
    errors = (psycopg.Error,)
    cure = "say in l2.NAME.dsn where the database is, and as whom its table may be made and written"

    def __init__(self, settings: PostgresSettings, context: AdapterContext) -> None:
        self._table = settings.table
        dsn = psycopg.conninfo.conninfo_to_dict(settings.dsn.get_secret_value())
        self._place = f"{dsn.get('host', 'localhost')}:{dsn.get('port', 5432)}/{dsn.get('dbname', '')}"
        self._pool = Pool(settings.dsn.get_secret_value(), _SETUP.format(table=settings.table))
        super().__init__(context, self._pool)

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

        return self.together("store", len(items), partial(self._transaction, put, deadline))

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        def ask(cursor: psycopg.Cursor) -> list[bool]:
            cursor.execute(f"SELECT key FROM {self._table} WHERE key = ANY(%s)", (list(keys),))
            there = {key for (key,) in cursor}
            return [key in there for key in keys]

        return self.whole("look up", partial(self._transaction, ask, deadline))

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        def fetch(cursor: psycopg.Cursor) -> list[Outcome]:
            outcomes = []
            for item in items:  # one by one: a batch of large objects would be held twice
                row = cursor.execute(f"SELECT content FROM {self._table} WHERE key = %s", (item.key,)).fetchone()
                outcomes.append(Outcome(Result.MISS) if row is None else filled(item, memoryview(row[0])))
            return outcomes

        return self.together("load", len(items), partial(self._transaction, fetch, deadline))

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        def remove(cursor: psycopg.Cursor) -> list[Outcome]:
            for key in sorted(keys):
                cursor.execute(f"DELETE FROM {self._table} WHERE key = %s", (key,))
            return [Outcome(Result.DONE)] * len(keys)

        return self.together("delete", len(keys), partial(self._transaction, remove, deadline))

    def usage(self) -> Usage:
        """Counted row by row: the table's size on disk includes rows that a vacuum has yet to free. A row's length is
        known without its content."""

        def ask(cursor: psycopg.Cursor) -> Usage:
            row = cursor.execute(f"SELECT coalesce(sum(octet_length(content)), 0)::bigint, count(*) FROM {self._table}")
            used, objects = row.fetchone() or (0, 0)
            return Usage(used, objects)

        return self.whole("tell its usage", partial(self._transaction, ask, time.monotonic() + _USAGE_S))

    def entries_after(self, key: bytes, count: int, deadline: float) -> Sequence[ScanEntry]:
        def ask(cursor: psycopg.Cursor) -> list[ScanEntry]:
            what = f"SELECT key, octet_length(content), stored_at_s FROM {self._table}"
            cursor.execute(f"{what} WHERE key > %s ORDER BY key LIMIT %s", (key, count))
            return [ScanEntry(*row) for row in cursor]

        return self._transaction(ask, deadline)

    def medium(self) -> str:
        return f"the table {self._table} of {self._place}"

    # --- inside -----------------------------------------------------------------------------------------------
    def _transaction(self, call: Callable[[psycopg.Cursor], Answer], deadline: float) -> Answer:
        with self._pool.transaction(deadline) as cursor:
            return call(cursor)

    def refused(self, what: str, error: Exception) -> Outcome:
        full, text = isinstance(error, psycopg.errors.DiskFull), " ".join(str(error).split())
        message = f"tier {self._tier!r} cannot {what}: {self._place}: {text}"
        failed = TierError(message, cure=self.cure, retryable=not full and _is_passing(error))
        return Outcome.of(failed, Result.FULL if full else Result.FAILED)


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
