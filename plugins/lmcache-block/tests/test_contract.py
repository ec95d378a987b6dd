"""The conformance kit on a file, past the page cache and through it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from lmcache_block.adapter import BlockAdapter
from lmcache_block.settings import BlockSettings
from lmcache_core.tiers.contract import AdapterContext
from lmcache_testing import L2AdapterContract

from .door import BlockDoor


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """Within it a file is in the way where the folder was."""
    folder.rename(folder.with_name("away"))
    folder.write_text("in the way")
    try:
        yield
    finally:
        folder.unlink()
        folder.with_name("away").rename(folder)


class TestBlock(L2AdapterContract):
    component = "block"
    io_mode: Literal["direct", "buffered"] = "direct"
    scan_wait_s = 0.1

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        """Its files are large: they go with the test."""
        folder = tmp_path / "disk"
        folder.mkdir()
        yield folder
        for file in folder.iterdir():
            file.unlink()

    @pytest.fixture
    def settings(self, folder: Path) -> BlockSettings:
        return self._settings(folder / "medium", 50 << 20, 2 << 20)

    def _settings(self, path: Path, size_bytes: int, extent_bytes: int) -> BlockSettings:
        # The order of writes is the same without syncs, of which the kit would wait for thousands.
        return BlockSettings(
            path=path, size_bytes=size_bytes, extent_bytes=extent_bytes, io_mode=self.io_mode, fsync=False
        )

    @pytest.fixture
    def adapter(self, settings: BlockSettings, adapter_context: AdapterContext) -> Iterator[BlockAdapter]:
        with BlockAdapter(settings, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, settings: BlockSettings, adapter_context: AdapterContext) -> Callable[[], BlockAdapter]:
        return lambda: BlockAdapter(settings, adapter_context)

    @pytest.fixture
    def backdoor(self, settings: BlockSettings) -> BlockDoor:
        return BlockDoor(settings.path)

    @pytest.fixture
    def small_adapter(self, folder: Path, adapter_context: AdapterContext) -> Iterator[BlockAdapter]:
        with BlockAdapter(self._settings(folder / "small", 5 << 20, 256 << 10), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def unreachable(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[BlockAdapter]:
        with BlockAdapter(BlockSettings(path=tmp_path / "not mounted" / "medium"), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def outage(self, folder: Path) -> AbstractContextManager[None]:
        return away(folder)

    @pytest.fixture
    def leftovers(self, folder: Path) -> Callable[[], list[Path]]:
        return lambda: [path for path in folder.iterdir() if path.name not in ("medium", "small")]

    @pytest.mark.xfail(reason="the medium is one process's, which keeps the records in memory while it has its lock")
    def test_what_someone_else_removed_is_a_miss(self, adapter: BlockAdapter, backdoor: BlockDoor) -> None:
        super().test_what_someone_else_removed_is_a_miss(adapter, backdoor)


class TestBlockBuffered(TestBlock):
    """Through the page cache."""

    io_mode = "buffered"


@pytest.fixture(autouse=True)
def _can_it(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if getattr(request.cls, "io_mode", "buffered") == "direct":
        try:
            os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError as error:
            pytest.skip(f"no O_DIRECT here: {error}")
