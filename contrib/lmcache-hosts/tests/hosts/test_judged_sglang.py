"""SGLang's own file backend before the kit, and ours beside it. What fails is on docs/engines/backends-judged.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch", reason="torch is not installed here")
import sglang_host
import torch

from lmcache_hosts.reverse_sglang import HiCacheBackend
from lmcache_testing.host_backend import HostBackend, HostBackendContract

if sglang_host.wheel() is None:
    pytest.skip("LMCACHE_CORE_SGLANG_WHEEL names no wheel of SGLang 0.5.23", allow_module_level=True)

sglang_host.import_storage()


class BytePool(sglang_host.PagePool):
    """Pages of bytes, as large as the kit's objects."""

    def __init__(self) -> None:
        super().__init__(pages=1, dtype=torch.uint8)
        self.pages = torch.zeros((1, HostBackend.NBYTES), dtype=torch.uint8)


class TestSGLangFile(HostBackendContract):
    faults: ClassVar = {
        "two_models_never_share_an_object[org/name-org-name]": "a slash becomes - in the file's name",
        "a_flipped_bit_is_not_served": "files have no checksum",
        "the_bytes_of_another_object_are_not_served": "files do not say whose they are",
        "a_file_that_is_too_long_is_not_served": "the end of a file is not looked for",
        "a_cut_file_is_a_miss_and_no_exception": "a short read raises into the host",
        "a_damaged_object_is_replaced_by_the_next_store": "a store skips what has a file",
    }

    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        extra = {"file_storage_path": str(tmp_path)}
        return lambda model="model": HiCacheBackend(
            sglang_host.backend(extra, BytePool(), name="file", model_name=model)
        )

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: sorted(tmp_path.rglob("*.bin"))


class TestOurs(HostBackendContract):
    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        extra = {"tier": {"type": "fs", "path": str(tmp_path)}}
        return lambda model="model": HiCacheBackend(sglang_host.backend(extra, BytePool(), model_name=model))

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 65536]
