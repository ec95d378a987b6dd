"""The command line as a user runs it: a process of its own, with a stranger's plugin installed on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

ACME = """
    import os
    import time
    from lmcache_core import ComponentSpec, Finding, Kind, PluginInfo, hookimpl
    from lmcache_core.cli.bench import add_bench

    @hookimpl
    def lmcache_plugin_info():
        return PluginInfo(summary="objects on Acme")

    @hookimpl
    def lmcache_components():
        return [
            ComponentSpec(Kind.L2_ADAPTER, "acme", "acme_parts:AcmeAdapter", "acme_parts:AcmeSettings", "on Acme"),
            ComponentSpec(Kind.SERDE, "no_library", "acme_parts_that_need_a_library:Serde"),
        ]

    @hookimpl
    def lmcache_check(settings):
        if os.environ.get("ACME") == "raises":
            raise RuntimeError("the check fell over")
        well = os.environ.get("ACME") != "down"
        if not well:
            return [Finding(False, "bucket", "cannot be reached", "plug it in")]
        return [Finding(True, "bucket", "can be reached")]

    @hookimpl
    def lmcache_add_commands(subparsers, benches):
        parser = subparsers.add_parser("acme-hello", help="say hello")
        parser.add_argument("--to", default="you")
        parser.set_defaults(run=lambda arguments: print("hello", arguments.to) or 7)
        add_bench(benches, "acme", "nothing much", "acme_bench")
"""
PARTS = """
    from pydantic import BaseModel, ConfigDict, Field, SecretStr
    from lmcache_core import Finding, TierError
    from lmcache_core.tiers.contract import Capabilities

    class AcmeSettings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        bucket: str = Field(description="where objects go")
        token: SecretStr | None = Field(None, description="who we are")

    class AcmeAdapter:  # as much of one as commands use
        capabilities = Capabilities(ttl=True, scan=False)

        def __init__(self, settings, context):
            self.bucket = settings.bucket

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def medium(self):
            return self.bucket

        def check(self, deadline):
            if self.bucket == "gone":
                raise TierError("there is no such bucket", cure="create it")
            yield Finding(True, "", "it answers")
"""
BENCH = """
    def add_options(parser):
        parser.add_argument("--rounds", type=int, default=3)

    def run(options, bench):
        bench.steps(1)
        bench.step("going round")
        bench.record("rounds", options.rounds, "n", target=5, lower_is_better=False)
"""
BROKEN = "import a_library_that_is_not_there"


def put(root: Path, distribution: str, entry: str, module: str) -> None:
    info = root / f"{distribution.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[lmcache_core]\n{entry} = {module}\n")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed distributions: a sound one and a broken one."""
    root = tmp_path_factory.mktemp("site")
    sources = {"acme_plugin": ACME, "acme_parts": PARTS, "acme_bench": BENCH, "broken_plugin": BROKEN}
    for module, source in sources.items():
        (root / f"{module}.py").write_text(dedent(source))
    put(root, "lmcache-acme", "acme", "acme_plugin")
    put(root, "lmcache-broken", "broken", "broken_plugin")
    return root


@pytest.fixture
def environ(site: Path, tmp_path: Path) -> dict[str, str]:
    """An environment without anybody's settings, and with only the plugins of `site` allowed."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_CORE_")}
    paths = [str(site), *filter(None, [mine.get("PYTHONPATH")])]
    return {
        **mine,
        "PYTHONPATH": os.pathsep.join(paths),
        "LMCACHE_CORE_PLUGINS": "lmcache-acme,lmcache-broken",
        "LMCACHE_CORE_RUNTIME_DIR": str(tmp_path / "run"),
        "LMCACHE_CORE_STATE_DIR": str(tmp_path / "state"),
    }


@pytest.fixture
def run(environ: dict[str, str], tmp_path: Path) -> Run:
    """`run("config", "--json", env={…})` → the finished process."""

    def call(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lmcache_core.cli.main", *argv],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**environ, **(env or {})},
            timeout=120,
            check=False,
        )

    return call
