"""The contract of helpers, as tests: each helper runs beside a real server, embedded in the test's process."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_core.plugins.components import Kind
from lmcache_core.server.helper import HelperContext, HelperProcess
from lmcache_testing.contract import Contract
from lmcache_testing.embedded import NAMELESS, embedded_server
from lmcache_testing.waiting import until

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

_STAYS_S = 1.0


class HelperContract(Contract):
    """For a helper whose package is installed. `component` is its name, and the fixture `helper_settings` gives the
    settings in its table (none by default)."""

    @pytest.fixture
    def helper_settings(self, tmp_path: Path) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def helper_process(self, tmp_path: Path, helper_settings: dict[str, Any]) -> HelperProcess:
        """The process that the server would run."""
        from lmcache_core.plugins.loader import load_plugins

        context = HelperContext("kit", str(tmp_path / "run" / "kit" / "lifeline"), tmp_path / "run")
        process: HelperProcess = load_plugins().build(Kind.HELPER, self.component, helper_settings, context)
        return process

    @pytest.fixture
    def helper_server(self, tmp_path: Path, helper_settings: dict[str, Any]) -> Iterator[Server]:
        """A server with only this helper."""

        with embedded_server(tmp_path, l1=NAMELESS, **{self.component: helper_settings}) as server:
            yield server

    def test_it_says_what_to_run(self, helper_process: HelperProcess) -> None:
        assert isinstance(helper_process, HelperProcess), f"a {type(helper_process).__name__} is no HelperProcess"
        assert shutil.which(helper_process.command[0]), f"there is no program {helper_process.command[0]}"

    def test_it_runs_beside_a_server_and_ends_with_it(self, helper_server: Server) -> None:
        """It starts, and is still the same process a moment later."""
        seen: dict[int | None, float] = {}

        def figures() -> dict[str, Any]:
            status: dict[str, Any] = helper_server.parts.helpers.status()[self.component]
            return status

        def stays() -> int | None:
            pid: int | None = figures()["pid"]
            if pid not in seen:  # none yet, or another one
                seen.clear()
            since_s = seen.setdefault(pid, time.monotonic())
            return pid if time.monotonic() - since_s > _STAYS_S else None

        pid = until(stays, lambda: f"it to stay: {figures()}")
        helper_server.stop()
        until(lambda: not Path(f"/proc/{pid}").exists(), "its end: it is still there after its server")
        assert pid != os.getpid(), "it runs in the server's own process"
