"""The companion `l0` under the kit of lmcache-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_l0.records import record_layout

from lmcache_core.pool.layout import Layout
from lmcache_testing import CompanionContract


class TestL0(CompanionContract):
    component = "l0"

    @pytest.fixture
    def companion_settings(self, folder: Path) -> dict[str, Any]:
        return {"enabled": True, "hash_slots": 100, "promote_after": 1, "folder": str(folder)}

    @pytest.fixture
    def layout(self) -> Layout:
        return record_layout(4080)
