"""The kit against this adapter."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lmcache_lmdb.adapter import LmdbAdapter
from lmcache_lmdb.environment import closed, opened
from lmcache_lmdb.settings import LmdbSettings

from lmcache_core.tiers.contract import AdapterContext
from lmcache_testing import Backdoor, L2AdapterContract

MAP_BYTES = 256 << 20


class TestLmdb(L2AdapterContract):
    component = "lmdb"

    @pytest.fixture
    def settings(self, tmp_path: Path) -> LmdbSettings:
        return LmdbSettings(path=tmp_path / "kv.mdb", map_bytes=MAP_BYTES)

    @pytest.fixture
    def adapter(self, settings: LmdbSettings, adapter_context: AdapterContext) -> Iterator[LmdbAdapter]:
        with LmdbAdapter(settings, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, settings: LmdbSettings, adapter_context: AdapterContext) -> Callable[[], LmdbAdapter]:
        return lambda: LmdbAdapter(settings, adapter_context)

    @pytest.fixture
    def backdoor(self, tmp_path: Path) -> Backdoor:
        return Values(tmp_path / "kv.mdb")

    @pytest.fixture
    def hang(self, tmp_path: Path) -> contextlib.AbstractContextManager[None]:
        return written_by_another(tmp_path / "kv.mdb.writers")

    @pytest.fixture
    def lock(self, tmp_path: Path) -> contextlib.AbstractContextManager[None]:
        return written_by_another(tmp_path / "kv.mdb.writers")

    @pytest.fixture
    def unreachable(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[LmdbAdapter]:
        settings = LmdbSettings(path=tmp_path / "no such folder" / "kv.mdb", map_bytes=MAP_BYTES)
        with LmdbAdapter(settings, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def small_adapter(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[LmdbAdapter]:
        with LmdbAdapter(LmdbSettings(path=tmp_path / "small.mdb", map_bytes=4 << 20), adapter_context) as adapter:
            yield adapter


class Values(Backdoor):
    """By transactions of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[object]:
        environment = opened(self._path, MAP_BYTES, True)
        try:
            with environment.lmdb.begin(write=True) as transaction:
                yield transaction
        finally:
            closed(self._path, environment)

    def read(self, key: bytes) -> bytes | None:
        with self._transaction() as transaction:
            found: bytes | None = transaction.get(key)  # type: ignore[attr-defined]
            return found

    def write(self, key: bytes, content: bytes) -> None:
        with self._transaction() as transaction:
            transaction.put(key, content)  # type: ignore[attr-defined]

    def remove(self, key: bytes) -> None:
        with self._transaction() as transaction:
            transaction.delete(key)  # type: ignore[attr-defined]


@contextlib.contextmanager
def written_by_another(turn: Path) -> Iterator[None]:
    with turn.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
