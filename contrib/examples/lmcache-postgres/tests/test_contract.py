"""The kit against this adapter, on a real PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import psycopg
import pytest
from lmcache_postgres.adapter import PostgresAdapter
from lmcache_postgres.settings import PostgresSettings
from pydantic import SecretStr

from lmcache_core.tiers.contract import AdapterContext
from lmcache_testing import Backdoor, L2AdapterContract


class TestPostgres(L2AdapterContract):
    component = "postgres"

    @pytest.fixture
    def settings(self, dsn: str, table: str) -> PostgresSettings:
        return PostgresSettings(dsn=SecretStr(dsn), table=table)

    @pytest.fixture
    def adapter(self, settings: PostgresSettings, adapter_context: AdapterContext) -> Iterator[PostgresAdapter]:
        with PostgresAdapter(settings, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, settings: PostgresSettings, adapter_context: AdapterContext) -> Callable[[], PostgresAdapter]:
        return lambda: PostgresAdapter(settings, adapter_context)

    @pytest.fixture
    def backdoor(self, dsn: str, table: str) -> Iterator[Backdoor]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield Rows(connection, table)

    @pytest.fixture
    def hang(self, dsn: str, table: str) -> contextlib.AbstractContextManager[None]:
        return locked(dsn, table)

    @pytest.fixture
    def lock(self, dsn: str, table: str) -> contextlib.AbstractContextManager[None]:
        return locked(dsn, table, "SHARE")  # others may read

    @pytest.fixture
    def unreachable(self, adapter_context: AdapterContext) -> Iterator[PostgresAdapter]:
        nowhere = PostgresSettings(dsn=SecretStr("postgresql://nobody@127.0.0.1:1/nothing"))
        with PostgresAdapter(nowhere, adapter_context) as adapter:
            yield adapter


class Rows(Backdoor):
    """By another connection."""

    def __init__(self, connection: psycopg.Connection, table: str) -> None:
        self._connection = connection
        self._table = table

    def read(self, key: bytes) -> bytes | None:
        with contextlib.suppress(psycopg.errors.UndefinedTable):  # the adapter makes it at its first use
            row = self._connection.execute(f"SELECT content FROM {self._table} WHERE key = %s", (key,)).fetchone()
            return None if row is None else bytes(row[0])
        return None

    def write(self, key: bytes, content: bytes) -> None:
        self._connection.execute(f"UPDATE {self._table} SET content = %s WHERE key = %s", (content, key))

    def remove(self, key: bytes) -> None:
        self._connection.execute(f"DELETE FROM {self._table} WHERE key = %s", (key,))


@contextlib.contextmanager
def locked(dsn: str, table: str, mode: str = "ACCESS EXCLUSIVE") -> Iterator[None]:
    """Somebody has the table for himself, and does not let go."""
    with psycopg.connect(dsn) as connection:
        connection.execute(f"LOCK TABLE {table} IN {mode} MODE")
        yield
        connection.rollback()
