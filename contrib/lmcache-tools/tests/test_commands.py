"""What the package adds to the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core.cli.main import build_parser, main
from lmcache_core.plugins.loader import load_plugins
from lmcache_tools.plugin import COMMANDS


def test_help_lists_every_command_with_its_summary() -> None:
    shown = " ".join(build_parser(load_plugins()).format_help().split())
    assert [name for name, (summary, _) in COMMANDS.items() if f"{name} {summary}" not in shown] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: lmcache-core {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["top", "warm"])
def test_commands_that_ask_a_server_can_be_told_whose_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert "--server-uid UID" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "taken"), [("top", False), ("size", False), ("verify", True), ("warm", True)])
def test_settings_may_follow_commands_that_read_them(
    name: str, taken: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, *(["--tier", "none"] if taken else []), "--l1.size_bytes", "8MiB"]) == 2
    said = capsys.readouterr().err
    assert ("unrecognized arguments: --l1.size_bytes" in said) is not taken
    assert ("the settings have no tier 'none'" in said) is taken


@pytest.mark.parametrize(
    "command", [["verify", "--tier"], ["copy", "--to", "other", "--from"]], ids=lambda each: each[0]
)
def test_a_tier_whose_path_is_not_there_is_not_made_by_reading_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmcache_fs")
    absent = tmp_path / "mistyped" / "disk"
    tiers = [
        f"--l2.{name}.{what}={value}"
        for name in ("cold", "other")
        for what, value in (("type", "fs"), ("path", absent))
    ]
    assert main([*command, "cold", *tiers]) == 2
    assert f"l2.cold.path: there is no {absent}" in capsys.readouterr().err
    assert not absent.parent.exists()
