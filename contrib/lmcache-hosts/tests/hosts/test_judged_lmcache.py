"""LMCache's own file adapter before the kit, and ours beside it. What fails is on docs/engines/backends-judged.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("lmcache.lmcache_native", reason="LMCache is not installed here")
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

from lmcache_hosts.lmcache_l2 import HostedL2Adapter
from lmcache_hosts.reverse_lmcache import LMCacheBackend
from lmcache_testing.host_backend import HostBackendContract


class TestLMCacheFs(HostBackendContract):
    faults: ClassVar = {
        "two_models_never_share_an_object[org/name-org-SEP-name]": "a slash becomes -SEP- in the file's name",
        "a_flipped_bit_is_not_served": "files have no checksum",
        "the_bytes_of_another_object_are_not_served": "files do not say whose they are",
        "a_file_that_is_too_long_is_not_served": "the end of a file is not looked for",
        "a_damaged_object_is_replaced_by_the_next_store": "a store skips what has a file",
    }

    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        config = {"type": "fs", "base_path": str(tmp_path)}
        return lambda model="model": LMCacheBackend(FSL2Adapter(FSL2AdapterConfig.from_dict(config)), model)

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: sorted(tmp_path.rglob("*.data"))


class TestOurs(HostBackendContract):
    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        params = {"tier": {"type": "fs", "path": str(tmp_path)}}
        return lambda model="model": LMCacheBackend(HostedL2Adapter(params), model)

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 65536]
