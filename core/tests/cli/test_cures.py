"""`check`: what is to be done stands in the column for it, for everything that is not well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.plugins.components import Finding
from lmcache_core.plugins.registry import Registry
from lmcache_testing.embedded import Json

# What is wrong, a part of what is said of it, and of what is to be done.
WRONG: list[tuple[list[str], str, str]] = [
    (["--l1.sise_bytes", "1GiB"], "--l1.sise_bytes is not a setting", "did you mean '--l1.size_bytes'?"),
    (["--l1.size_bytes", "60TiB"], "pool 'default' needs 6", "make the pool smaller"),
    (["--l1.size_bytes", "0"], "pool 'default' of 0 bytes is smaller than one slab", "give it at least 1,048,576"),
    (["--l1.eviction.type", "lru", "--chunk_tokens", "0"], "chunk_tokens", "correct it where it is set"),
    (["--l1.eviction.type", "lrrru"], "there is no eviction_policy 'lrrru'", "did you mean 'lru'?"),
    (["--l1.eviction.type", "zzz"], "there is no eviction_policy 'zzz'", "install the package that has it"),
    (["--l2.cold.connections", "3"], "the tier 'cold' has no type", "set l2.cold.type to the name of an adapter"),
    (["--l2.COLD.type", "fs"], "'COLD' is not a tier name", "use lower-case words"),
    (["--l2", "cold"], "--l2 is a table", "set one of its settings"),
    (["--l2_order", '["cold"]'], "l2_order names the tier 'cold'", "remove it, or set l2.cold.type"),
    (["--name", "A B"], "use lower-case letters, digits, - and _", "correct it where it is set"),
    (["--name", "a", "--name", "b"], "--name is given twice", "give it once"),
    (["--l1.sise_bytes", "1", "--l1.backin", "shm"], "; --l1.backin is not a setting", "correct it where it is set"),
]


def findings(*words: str, cwd: Path, status: int = 1) -> list[Json]:
    argv = [sys.executable, "-m", "lmcache_core.cli.main", "check", "--json", *words]
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    found: list[Json] = json.loads(done.stdout)["findings"]
    return found


@pytest.mark.parametrize(("words", "said", "cure"), WRONG, ids=[" ".join(words) for words, _, _ in WRONG])
def test_what_is_not_well_has_its_cure_in_its_column_alone(
    words: list[str], said: str, cure: str, tmp_path: Path
) -> None:
    wrong = [each for each in findings(*words, cwd=tmp_path) if not each["ok"]]
    assert len(wrong) == 1
    assert said in wrong[0]["message"]
    assert cure in wrong[0]["cure"]
    assert cure not in wrong[0]["message"]


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_mock", reason="needs a tier: a server without one keeps nothing there")
    found = findings("--l2.cold.type", "mock", "--state_dir", "/proc/nowhere", cwd=tmp_path)
    (wrong,) = [each for each in found if not each["ok"]]
    assert (wrong["subject"], "cannot create a file in /proc" in wrong["message"]) == ("state_dir", True)
    assert wrong["cure"].startswith("make /proc/nowhere a directory that user")


def test_a_finding_that_is_none_is_to_be_reported() -> None:
    from lmcache_core import PluginInfo, hookimpl
    from lmcache_core.cli.check import findings_of
    from lmcache_core.settings.compose import make_settings

    class Plugin:
        @hookimpl
        def lmcache_plugin_info(self) -> PluginInfo:
            return PluginInfo()

        @hookimpl
        def lmcache_check(self, settings: object) -> str:
            return "all is well"

    registry = Registry()
    record = registry.register(Plugin(), "odd", distribution="lmcache-odd", version="1.0")
    assert [*findings_of(registry, record, make_settings())] == [
        Finding(False, "plugin odd", "its check yielded a str, not a Finding", f"report it to {record}")
    ]


def test_a_tier_that_takes_no_opaque_bytes_is_named_before_an_engine_comes(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_mock", reason="needs a tier")
    pytest.importorskip("lmcache_fp8", reason="needs a serde that does not take everything")
    tiers = [
        "--l1.size_bytes",
        "4MiB",
        "--l2.cold.type",
        "mock",
        "--l2.warm.type",
        "mock",
        "--state_dir",
        str(tmp_path),
    ]
    found = findings(*tiers, "--l2.cold.serde", "fp8", cwd=tmp_path, status=0)
    (named,) = [each for each in found if "opaque bytes" in each["message"]]
    assert named["subject"] == "tier 'cold'"
    assert "fp8 takes bfloat16, float16, float32" in named["message"]
    assert named["cure"].startswith("for such engines take it out of l2.cold.serde")
