"""The fuzzers' flag."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz")
    group.addoption("--frames", type=int, default=20_000, help="structured frames to send; a million takes minutes")
