"""The kit against the adapters of ours that bring no contract test of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from lmcache_core.tiers.contract import AdapterContext, Capabilities, L2Adapter, Outcome, Result
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings
from lmcache_fs.transport.paths import Paths
from lmcache_mock.memory import MemoryAdapter
from lmcache_testing import Backdoor, FaultyAdapter, L2AdapterContract, LatencyAdapter, RecordingAdapter, material


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


@pytest.fixture
def small_medium(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 2 MiB. None: none can be mounted here."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)  # lazily: an adapter may still have it open


class TestFs(L2AdapterContract):
    component = "fs"
    io_mode = "buffered"
    notices_wipe = True
    tells_last_use = True
    scan_wait_s = 0.1

    def _settings(self, path: Path) -> FsSettings:
        return FsSettings(path=path, io_mode=self.io_mode)

    @pytest.fixture
    def outage(self, tmp_path: Path) -> AbstractContextManager[None]:
        return _away(tmp_path / "disk")

    @pytest.fixture
    def lock(self, tmp_path: Path) -> AbstractContextManager[None]:
        return _away(tmp_path / "disk/tier/tmp")

    @pytest.fixture
    def litter(self, tmp_path: Path) -> Callable[[bytes], None]:
        """Files and folders of no object, and a folder where one would be."""

        def litter(key: bytes) -> None:
            paths = Paths(tmp_path / "disk/tier")
            beside = Path(next(iter((tmp_path / "disk/tier/objects").iterdir())))
            Path(paths.object(key)).mkdir(parents=True)
            (Path(paths.object(key)) / "within").write_text("a folder is no object")
            (Path(paths.objects) / "notes.txt").write_text("a file between the shards")
            (beside / "notes.txt").write_text("not hexadecimal")
            (beside / "0").write_text("an odd number of digits")
            (beside / key.hex()).write_bytes(bytes(100))  # in another shard than the key's own
            (beside / material.key(1).hex().upper()).write_text("in capitals")

        return litter

    @pytest.fixture(params=[".", "objects", "tmp and objects"])
    def wipe(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], None]:
        def wipe() -> None:
            for each in request.param.split(" and "):
                shutil.rmtree(tmp_path / "disk/tier" / each)

        return wipe

    @pytest.fixture
    def leftovers(self, tmp_path: Path) -> Callable[[], list[Path]]:
        return lambda: list((tmp_path / "disk/tier/tmp").iterdir())

    @pytest.fixture
    def small_adapter(self, small_medium: Path | None, adapter_context: AdapterContext) -> Iterator[FsAdapter | None]:
        if small_medium is None:
            yield None
            return
        with FsAdapter(self._settings(small_medium / "tier"), adapter_context) as adapter:
            yield adapter

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


class TestSmall(TestMemory):
    """What a medium cannot do is no fault of its adapter, once it says so."""

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

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        return [Outcome(Result.FAILED, error="nothing is deleted here")] * len(keys)


class TestKept(TestMemory):
    @pytest.fixture
    def memory(self, adapter_context: AdapterContext) -> MemoryAdapter:
        return Kept(None, adapter_context)

    @pytest.fixture
    def small_adapter(self) -> L2Adapter:
        return Kept(medium_bytes=2 << 20)
