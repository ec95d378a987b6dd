"""Small things that users tripped over."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.results import Status
from lmcache_core.errors import PoolError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace

SPACE = Namespace("small", Layout("uint8", (4096,)))


def server_of(folder: Path, size: int = 64 << 20) -> Server:
    registry = load_plugins()
    settings = make_settings(
        registry, name=f"s{uuid4().hex[:8]}", runtime_dir=str(folder / "run"), state_dir=str(folder / "state"),
        l1={"size_bytes": size, "backing": "memfd"},
    )  # fmt: skip
    return Server(settings, registry)


def test_an_embedded_server_that_waits_stores_all_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lmcache_core.server")
    server = server_of(tmp_path).start(wait=True)
    try:
        assert "all of the pool is populated" in caplog.text
        with server.connect() as client:
            keys = [number.to_bytes(32, "big") for number in range(4000)]
            statuses = client.store(keys, [bytes(4096)] * 4000, namespace=SPACE).statuses
            assert set(statuses) == {Status.STORED}
    finally:
        server.stop()


def test_waiting_for_memory_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(tmp_path)
    server.populator.wait(60)
    server.population_error = "the control group has no room"  # as its thread says it
    with pytest.raises(PoolError, match="the control group has no room"):
        server.start(wait=True)
    assert server.loop.ended


@pytest.mark.parametrize("command", [["status"], ["tiers", "list"], ["quota", "get"]])
def test_errors_are_json_where_json_was_asked_for(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json", "--name", "nobody", "--runtime-dir", str(tmp_path)]) == 2
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    assert error["code"] == "DISCONNECTED"
    assert error["message"] in told.err


def test_check_writes_to_the_state_directory_and_warns_of_tiers_without_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmcache_fs")
    flags = ["--name", "checked", "--runtime_dir", str(tmp_path / "run"), "--l1.size_bytes", "1MiB"]
    flags += ["--l1.backing", "memfd", "--l2.d.type", "fs", "--l2.d.path", str(tmp_path / "d")]
    assert main(["check", *flags, "--state_dir", str(tmp_path / "state")]) == 0
    said = capsys.readouterr().out
    assert "set l2.d.capacity_bytes" in said
    assert "state can be written to" in said
    assert not (tmp_path / "state").exists(), "nothing stays behind"
    assert main(["check", *flags, "--state_dir", str(tmp_path / "state"), "--l2.d.capacity_bytes", "1MiB"]) == 0
    assert "capacity_bytes" not in capsys.readouterr().out
    assert main(["check", *flags, "--state_dir", "/proc/self/lmcache"]) == 1  # what root, too, cannot write to
    assert "NOT OK  state_dir" in capsys.readouterr().out


def test_status_and_tiers_find_the_server_that_the_settings_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_of(tmp_path, 1 << 20) as server:
        text = f'name = "{server.settings.name}"\nruntime_dir = "{tmp_path / "run"}"\n'
        (tmp_path / "lmcache.toml").write_text(text)
        monkeypatch.chdir(tmp_path)
        assert main(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["server"]["name"] == server.settings.name
        assert main(["tiers", "list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []
