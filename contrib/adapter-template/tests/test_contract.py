"""The kit against this adapter. The first fixture is all it needs; each of the others unlocks more tests."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lmcache_template.adapter import SqliteAdapter
from lmcache_template.settings import SqliteSettings

from lmcache_core.testing import Backdoor, L2AdapterContract, PluginPackageContract
from lmcache_core.tiers.contract import AdapterContext


class TestPackage(PluginPackageContract):
    distribution = "lmcache-template"


class TestSqlite(L2AdapterContract):
    component = "sqlite"

    @pytest.fixture
    def adapter(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[SqliteAdapter]:
        with SqliteAdapter(SqliteSettings(path=tmp_path / "kv.db"), adapter_context) as adapter:
            yield adapter

    # Durable and shared: a second adapter on the same file.
    @pytest.fixture
    def reopen(self, tmp_path: Path, adapter_context: AdapterContext) -> Callable[[], SqliteAdapter]:
        return lambda: SqliteAdapter(SqliteSettings(path=tmp_path / "kv.db"), adapter_context)

    # The medium itself, without the adapter.
    @pytest.fixture
    def backdoor(self, tmp_path: Path) -> Iterator[Backdoor]:
        with Table(tmp_path / "kv.db") as table:
            yield table

    # Someone holds the file's lock and does not let go.
    @pytest.fixture
    def hang(self, tmp_path: Path) -> contextlib.AbstractContextManager[None]:
        return locked(tmp_path / "kv.db")

    @pytest.fixture
    def unreachable(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[SqliteAdapter]:
        with SqliteAdapter(SqliteSettings(path=tmp_path / "no such folder" / "kv.db"), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def small_adapter(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[SqliteAdapter]:
        settings = SqliteSettings(path=tmp_path / "small.db", file_bytes_max=2 << 20)
        with SqliteAdapter(settings, adapter_context) as adapter:
            yield adapter


class Table(Backdoor):
    """The rows, by another connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Table:
        self._connection = sqlite3.connect(self._path, isolation_level=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def read(self, key: bytes) -> bytes | None:
        with contextlib.suppress(sqlite3.OperationalError):  # the adapter makes the table at its first use
            row = self._connection.execute("SELECT content FROM objects WHERE key = ?", (key,)).fetchone()
            return row[0] if row else None
        return None

    def write(self, key: bytes, content: bytes) -> None:
        self._connection.execute("UPDATE objects SET content = ? WHERE key = ?", (content, key))

    def remove(self, key: bytes) -> None:
        self._connection.execute("DELETE FROM objects WHERE key = ?", (key,))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        connection.close()
