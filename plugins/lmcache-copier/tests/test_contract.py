"""The contracts of what this package brings: its helper, its operation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmcache_copier.operation import FiguresReport
from lmcache_testing import HelperContract, OperationContract


class TestCopierHelper(HelperContract):
    component = "copier"

    @pytest.fixture
    def helper_settings(self) -> dict[str, Any]:
        return {"threads": 1}


class TestCopierOperation(OperationContract):
    component = "copier"

    @pytest.fixture
    def sample_request(self) -> msgspec.Struct:
        return FiguresReport({"jobs": 1})
