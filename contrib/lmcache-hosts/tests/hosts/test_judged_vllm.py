"""vLLM's own file tier before the kit, and ours beside it. What fails is on docs/engines/backends-judged.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm_host import hosted, spec

from lmcache_hosts.reverse_vllm import SecondaryTierBackend
from lmcache_testing.host_backend import HostBackendContract


def backend(config: dict[str, Any], model: str) -> SecondaryTierBackend:
    of = spec(model)
    return SecondaryTierBackend(lambda view: SecondaryTierFactory.create_secondary_tier(config, view, of))


class TestVllmFs(HostBackendContract):
    cannot: ClassVar = {
        "a_batch_with_a_missing_object_gives_the_others": "a batch ends at its first missing block, by design"
    }
    faults: ClassVar = {
        "a_flipped_bit_is_not_served": "files have no checksum",
        "the_bytes_of_another_object_are_not_served": "files do not say whose they are",
        "a_file_that_is_too_long_is_not_served": "the end of a file is not looked for",
    }

    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        return lambda model="model": backend({"type": "fs", "root_dir": str(tmp_path)}, model)

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: sorted(tmp_path.rglob("*.bin"))


class TestOurs(HostBackendContract):
    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Any:
        return lambda model="model": backend(hosted(tier={"type": "fs", "path": str(tmp_path)}), model)

    @pytest.fixture
    def files(self, tmp_path: Path) -> Any:
        return lambda: [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 65536]
