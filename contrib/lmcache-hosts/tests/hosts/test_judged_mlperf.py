"""The benchmark's own disk tier before the kit, and ours beside it: `nox -s "host(mlperf)"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("numpy", reason="numpy is not installed here")
import mlperf_host

from lmcache_testing.host_backend import HostBackendContract

if not mlperf_host.found():
    pytest.skip(mlperf_host.REASON, allow_module_level=True)

from kv_cache.backends import NVMeBackend

from lmcache_hosts.mlperf import HostedStorage
from lmcache_hosts.reverse_mlperf import StorageBackendBackend

EMPTY = "a backend of the benchmark begins empty by design: a run is measured over what it wrote itself"


class TestNVMe(HostBackendContract):
    cannot: ClassVar = {
        "the_next_process_finds_it": EMPTY,
        "two_models_never_share_an_object": "it is not told the model",
    }
    faults: ClassVar = {
        "a_flipped_bit_is_not_served": "files have no checksum",
        "the_bytes_of_another_object_are_not_served": "files do not say whose they are",
        "a_file_that_is_too_long_is_not_served": "what cannot be parsed raises ValueError, which is no miss",
        "a_cut_file_is_a_miss_and_no_exception": "a short file raises ValueError, which is no miss",
    }

    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        return lambda model="model": StorageBackendBackend(NVMeBackend(str(tmp_path)))

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: sorted(tmp_path.glob("*.npy"))


class TestOurs(HostBackendContract):
    cannot: ClassVar = {"the_next_process_finds_it": EMPTY}

    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        return lambda model="model": StorageBackendBackend(
            HostedStorage({"tier": {"type": "fs", "path": str(tmp_path)}, "model": model})
        )

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 65536]
