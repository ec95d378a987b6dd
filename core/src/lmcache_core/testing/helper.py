"""The contract of helpers, as tests: each helper runs beside a real server, embedded in the test's process."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from lmcache_core.plugins.components import Kind
from lmcache_core.server.helper import HelperContext, HelperProcess
from lmcache_core.testing.contract import Contract

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

_WAIT_S = 60.0  # a safety net: normally seconds


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
        from lmcache_core.plugins.loader import load_plugins
        from lmcache_core.server.server import Server
        from lmcache_core.settings.compose import make_settings

        registry = load_plugins()
        settings = make_settings(
            registry,
            name=f"kit-{uuid4().hex[:10]}",
            runtime_dir=str(tmp_path / "run"),
            state_dir=str(tmp_path / "state"),
            l1={"size_bytes": 16 << 20, "backing": "memfd"},
            **{self.component: helper_settings},
        )
        with Server(settings, registry) as server:
            yield server

    def test_it_says_what_to_run(self, helper_process: HelperProcess) -> None:
        assert isinstance(helper_process, HelperProcess), f"a {type(helper_process).__name__} is no HelperProcess"
        assert shutil.which(helper_process.command[0]), f"there is no program {helper_process.command[0]}"

    def test_it_runs_beside_a_server_and_ends_with_it(self, helper_server: Server) -> None:
        """It starts, and is still the same process a moment later."""
        seen: dict[int, float] = {}
        end = time.monotonic() + _WAIT_S
        while not any(time.monotonic() - since > 1.0 for since in seen.values()):
            told = helper_server.helpers.status()[self.component]
            assert time.monotonic() < end, f"it does not stay: {told}"
            if told["pid"] is not None:
                seen.setdefault(told["pid"], time.monotonic())
            seen = {pid: since for pid, since in seen.items() if pid == told["pid"]}
            time.sleep(0.01)
        (pid,) = seen
        helper_server.stop()
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end, "it is still there after its server"
            time.sleep(0.01)
        assert pid != os.getpid(), "it runs in the server's own process"
