"""Small things that users tripped over."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any
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
    server.populator.error = "the control group has no room"  # as its thread says it
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


@pytest.mark.parametrize("line", [["status", "--nonsense"], ["tiers", "shrink"], ["nonsense"]])
def test_a_wrong_command_line_is_json_too(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line, "--json"]) == 2
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    assert error["code"] == "USAGE"
    assert error["message"] in told.err
    assert "--help" in error["message"]


def test_check_writes_to_the_state_directory_and_warns_of_tiers_without_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmcache_fs")
    flags = ["--name", "checked", "--runtime_dir", str(tmp_path / "run"), "--l1.size_bytes", "1MiB"]
    flags += ["--l1.backing", "memfd", "--l2.d.type", "fs", "--l2.d.path", str(tmp_path / "d")]

    def check(*more: str) -> tuple[int, dict[str, Any]]:
        status = main(["check", "--json", *flags, *more])
        findings = json.loads(capsys.readouterr().out)["findings"]
        return status, {f"{each['subject']}: {each['message']}": each for each in findings}

    status, found = check("--state_dir", str(tmp_path / "state"))
    assert status == 0
    assert any("set l2.d.capacity_bytes" in each["cure"] for each in found.values())
    assert any("state is writable" in said for said in found)
    assert not (tmp_path / "state").exists(), "nothing stays behind"
    status, found = check("--state_dir", str(tmp_path / "state"), "--l2.d.capacity_bytes", "1MiB")
    assert status == 0
    assert not any("grows until" in said for said in found)
    assert any("its capacity_bytes (1MiB) fit" in said for said in found)
    status, found = check("--state_dir", "/proc/self/lmcache")  # what root, too, cannot write to
    assert status == 1
    assert any(said.startswith("state_dir") and not each["ok"] and each["cure"] for said, each in found.items())


def test_check_compares_capacities_with_what_is_free_and_has_cures_in_their_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmcache_fs")
    flags = ["--name", "checked", "--runtime_dir", str(tmp_path / "run"), "--state_dir", str(tmp_path / "state")]
    flags += ["--l1.size_bytes", "100TiB", "--l2.d.type", "fs", "--l2.d.path", str(tmp_path / "d")]
    assert main(["check", "--json", *flags, "--l2.d.capacity_bytes", "900TiB"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    wide = next(each for each in findings if "900TiB" in each["message"])
    assert "set l2.d.capacity_bytes" in wide["cure"]
    pool = next(each for each in findings if each["subject"] == "l1")
    assert "make the pool smaller" in pool["cure"]
    assert "make the pool smaller" not in pool["message"]


def table_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) in (0, 1)
    return capsys.readouterr().out


def test_every_table_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lmcache_mock")
    long = "a_tier_with_a_name_as_long_as_it_may"[:32].rstrip("_")
    with server_of(tmp_path, 8 << 20) as server, server.connect() as client:
        client.tiers_add(long, {"type": "mock", "capacity_bytes": 123 << 30, "faults": ["any gone"]}, {})
        keys = [number.to_bytes(32, "big") for number in range(3)]
        client.store(keys, [bytes(4096)] * 3, namespace=SPACE)
        client.quota_set("a-tenant.with-quite_a-long.name", {"l1": {"limit_bytes": 1 << 20}}, [SPACE.id])
        client.record_start(tmp_path / "trace")
        client.lookup(keys, namespace=SPACE)
        client.record_stop()
        where = ["--name", server.settings.name, "--runtime-dir", str(tmp_path / "run")]
        space = ["--namespace", f"{SPACE.id:016x}", "--dtype", "uint8", "--shape", "4096"]
        said = {
            "tiers": table_of(capsys, "tiers", "list", *where),
            "quota": table_of(capsys, "quota", "get", *where),
            "explain": table_of(capsys, "explain", *space, keys[0].hex(), "ab" * 32, *where),
            "info": table_of(capsys, "trace", "info", str(tmp_path / "trace")),
        }
    said["check"] = table_of(capsys, "check", "--state_dir", str(tmp_path / "state"), "--l2.d.type", "mock")
    said["config"] = table_of(capsys, "config", "--state_dir", str(tmp_path / "state"))
    said["plugins"] = table_of(capsys, "plugins")
    said["show"] = table_of(capsys, "plugins", "show", "mock")
    capacities = [str(1000 * number) for number in range(1, 9)]
    said["simulate"] = table_of(
        capsys, "simulate", "--synthetic", "sessions=4", "--policy", "lru", "noop", "--capacity", *capacities
    )
    for name, text in said.items():
        wide = [line for line in text.splitlines() if len(line) > 80]
        assert not wide, f"{name}: {wide}"
        assert text.count("\n") > 2
    assert "a-tenant.with-quite_a-long.name" in said["quota"].replace("\n", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "completion.bash"
    script.write_text(table_of(capsys, "completion", "bash"))

    def completed(*words: str) -> list[str]:
        line = " ".join(words)
        code = (
            f"source {script}; COMP_WORDS=({line.strip()}{' ' + repr('') if line.endswith(' ') else ''}); "
            f"COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; "
            "found=$(complete -p lmcache-core | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $found; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert "explain" in completed("lmcache-core", "ex")
    assert "reconfigure" in completed("lmcache-core", "tiers", "rec")
    assert "--l1.size_bytes" in completed("lmcache-core", "serve", "--l1.si")
    assert "--json" in completed("lmcache-core", "status", "--js")


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
