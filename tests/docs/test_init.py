"""The settings file that `lmcache-core init` writes is one that the other commands read."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lmcache_core.cli import init
from lmcache_core.cli.main import main

COMMAND = [sys.executable, "-m", "lmcache_core.cli.main"]


def run(*argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, argv)], cwd=cwd, capture_output=True, text=True)


def settings(cwd: Path) -> dict[str, dict[str, object]]:
    done = run("config", "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


def test_check_accepts_what_init_writes(tmp_path: Path) -> None:
    assert run("init", cwd=tmp_path).returncode == 0
    done = run("check", "--l1.size_bytes", "16MiB", "--runtime_dir", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_init_writes_says_nothing_but_the_defaults_and_the_tiers(tmp_path: Path) -> None:
    before = settings(tmp_path)
    assert run("init", "--tiers", "disk,redis,s3", cwd=tmp_path).returncode == 0
    after = settings(tmp_path)
    assert {name: row["value"] for name, row in after.items() if not name.startswith("l2.")} == {
        name: row["value"] for name, row in before.items()
    }
    assert list(tomllib.loads((tmp_path / "lmcache.toml").read_text())["l2"]) == ["disk", "redis", "s3"]


def test_every_default_in_the_file_is_one_that_can_be_uncommented(tmp_path: Path) -> None:
    run("init", "--tiers", "disk", cwd=tmp_path)
    file = tmp_path / "lmcache.toml"
    lines = file.read_text().splitlines()
    said = [
        line.removeprefix("# ") if " = " in line and "…" not in line and "`" not in line else line for line in lines
    ]
    file.write_text("\n".join(said))
    origins = {row["origin"] for row in settings(tmp_path).values()}
    assert "file" in origins


def test_init_replaces_no_file_unasked(tmp_path: Path) -> None:
    (tmp_path / "lmcache.toml").write_text("name = 'mine'\n")
    done = run("init", cwd=tmp_path)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (tmp_path / "lmcache.toml").read_text() == "name = 'mine'\n"
    assert run("init", "--force", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("force", [False, True])
def test_init_on_a_full_disk_leaves_what_was_there(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a file, or an empty one, would be what the server reads next."""
    before = "name = 'mine'\n" if force else None
    file = tmp_path / "lmcache.toml"
    if before is not None:
        file.write_text(before)
    monkeypatch.setattr(init, "settings_file", lambda *_: "x" * (8 << 20))
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, was[1]))  # the kernel refuses the rest, as a full disk does
    try:
        code = main(["init", "--output", str(file), *(["--force"] if force else [])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 2
    assert "lmcache.toml cannot be written" in capsys.readouterr().err
    assert [each.read_text() for each in tmp_path.iterdir()] == ([] if before is None else [before])


@pytest.mark.parametrize("tiers", ["nosuch", "disk,disk"])
def test_init_refuses_tiers_that_cannot_be(tiers: str, tmp_path: Path) -> None:
    done = run("init", "--tiers", tiers, cwd=tmp_path)
    assert done.returncode == 2
    assert tiers.partition(",")[0] in done.stderr
    assert not (tmp_path / "lmcache.toml").exists()
