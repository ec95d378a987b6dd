"""The kit against the adapters of ours that bring no contract test of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from lmcache_core.testing import (
    Backdoor,
    FaultyAdapter,
    L2AdapterContract,
    LatencyAdapter,
    MemoryAdapter,
    RecordingAdapter,
)
from lmcache_core.tiers.contract import AdapterContext, Capabilities, L2Adapter, Outcome, Result, StoreItem
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.paths import Paths
from lmcache_fs.settings import FsSettings


class Files(Backdoor):
    """The files of a disk tier."""

    def __init__(self, path: Path) -> None:
        self._paths = Paths(path)

    def _path(self, key: bytes) -> Path:
        return Path(self._paths.object(key))

    def read(self, key: bytes) -> bytes | None:
        return self._path(key).read_bytes() if self._path(key).exists() else None

    def write(self, key: bytes, content: bytes) -> None:
        self._path(key).write_bytes(content)

    def remove(self, key: bytes) -> None:
        self._path(key).unlink()


@contextlib.contextmanager
def _away(folder: Path) -> Iterator[None]:
    """Within it a file is in the way where the folder was."""
    folder.rename(folder.with_name("away"))
    folder.write_text("in the way")
    try:
        yield
    finally:
        folder.unlink()
        folder.with_name("away").rename(folder)


class TestFs(L2AdapterContract):
    component = "fs"
    io_mode = "buffered"

    def _settings(self, path: Path) -> FsSettings:
        return FsSettings(path=path, io_mode=self.io_mode)

    @pytest.fixture
    def outage(self, tmp_path: Path) -> AbstractContextManager[None]:
        return _away(tmp_path / "disk")

    @pytest.fixture
    def lock(self, tmp_path: Path) -> AbstractContextManager[None]:
        return _away(tmp_path / "disk/tier/tmp")

    @pytest.fixture
    def adapter(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[FsAdapter]:
        with FsAdapter(self._settings(tmp_path / "disk/tier"), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, tmp_path: Path, adapter_context: AdapterContext) -> Callable[[], FsAdapter]:
        return lambda: FsAdapter(self._settings(tmp_path / "disk/tier"), adapter_context)

    @pytest.fixture
    def backdoor(self, tmp_path: Path) -> Files:
        return Files(tmp_path / "disk/tier")

    @pytest.fixture
    def unreachable(self, tmp_path: Path, adapter_context: AdapterContext) -> Iterator[FsAdapter]:
        (tmp_path / "file").write_text("in the way")
        with FsAdapter(self._settings(tmp_path / "file" / "tier"), adapter_context) as adapter:
            yield adapter


class TestFsDirect(TestFs):
    """Past the page cache, where the file system can."""

    io_mode = "direct"

    @pytest.fixture(autouse=True)
    def _can_it(self, tmp_path: Path) -> None:
        try:
            os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError as error:
            pytest.skip(f"no O_DIRECT here: {error}")


class _Objects(Backdoor):
    def __init__(self, memory: MemoryAdapter) -> None:
        self._objects = memory.objects

    def read(self, key: bytes) -> bytes | None:
        return self._objects[key][0] if key in self._objects else None

    def write(self, key: bytes, content: bytes) -> None:
        self._objects[key] = (content, 0.0)

    def remove(self, key: bytes) -> None:
        del self._objects[key]


class TestMemory(L2AdapterContract):
    """The kit's own reference."""

    @pytest.fixture
    def memory(self, adapter_context: AdapterContext) -> MemoryAdapter:
        return MemoryAdapter(None, adapter_context)

    @pytest.fixture
    def adapter(self, memory: MemoryAdapter) -> L2Adapter:
        return memory

    @pytest.fixture
    def backdoor(self, memory: MemoryAdapter) -> Backdoor:
        return _Objects(memory)

    @pytest.fixture
    def small_adapter(self) -> L2Adapter:
        return MemoryAdapter(medium_bytes=2 << 20)


class TestWrapped(TestMemory):
    """A wrapper that does nothing changes nothing."""

    @pytest.fixture
    def adapter(self, memory: MemoryAdapter) -> L2Adapter:
        return RecordingAdapter(FaultyAdapter(LatencyAdapter(memory, latency_s=1e-5, bandwidth_bytes_s=1e10)))


class Small(MemoryAdapter):
    """Honest, and limited: objects of 64 KiB at most, keys of 44 bytes, batches of two."""

    capabilities: ClassVar[Capabilities] = Capabilities(object_bytes_max=1 << 16, key_bytes_max=44, batch_keys_max=2)

    def _store_one(self, item: StoreItem) -> Outcome:
        if item.nbytes > 1 << 16:
            return Outcome(Result.FAILED, error=f"{item.nbytes:,} bytes are more than a value may have")
        return super()._store_one(item)


class TestSmall(TestMemory):
    """What a medium cannot do is no fault of its adapter, once it says so."""

    scan_pages_objects = 600

    @pytest.fixture
    def memory(self, adapter_context: AdapterContext) -> MemoryAdapter:
        return Small(None, adapter_context)

    @pytest.fixture
    def small_adapter(self) -> L2Adapter:
        return Small(medium_bytes=2 << 20)


class Kept(MemoryAdapter):
    """Honest, and without a delete, a scan, or a promise to be called by many threads."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        delete=False, scan=False, thread_safe=False, object_bytes_max=1 << 20
    )

    def _store_one(self, item: StoreItem) -> Outcome:
        if item.nbytes > 1 << 20:
            return Outcome(Result.FAILED, error=f"{item.nbytes:,} bytes are more than a value may have")
        return super()._store_one(item)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        return [Outcome(Result.FAILED, error="nothing is deleted here")] * len(keys)


class TestKept(TestMemory):
    @pytest.fixture
    def memory(self, adapter_context: AdapterContext) -> MemoryAdapter:
        return Kept(None, adapter_context)

    @pytest.fixture
    def small_adapter(self) -> L2Adapter:
        return Kept(medium_bytes=2 << 20)
