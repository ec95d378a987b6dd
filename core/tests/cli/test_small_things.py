"""Small things that users tripped over."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.results import Status
from lmcache_core.errors import NotEnoughMemoryError, PoolError
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.threads import NO_THREAD
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json, server_settings

SPACE = Namespace("small", Layout("uint8", (4096,)))


def server_of(folder: Path, size: int = 64 << 20, **more: Any) -> Server:
    return Server(server_settings(folder, l1={"size_bytes": size, "backing": "memfd"}, **more))


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
    def full(*_: object, what: str) -> None:
        raise NotEnoughMemoryError(f"the control group has no room for {what}")

    monkeypatch.setattr("lmcache_core.pool.populate.check_room", full)
    server = server_of(tmp_path)
    with pytest.raises(PoolError, match="the control group has no room"):
        server.start(wait=True)
    assert server.parts.loop.ended


def test_a_system_without_threads_is_one_line_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError(NO_THREAD)

    before = logging.getLogger().handlers[:]
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert main(["serve", "--runtime_dir", str(tmp_path)]) == 2
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "threads" in each]
    assert "ulimit -u" in line
    assert logging.getLogger().handlers == before


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

    def check(*more: str) -> tuple[int, Json]:
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
    flags += ["--l1.size_bytes", "60TiB", "--l2.d.type", "fs", "--l2.d.path", str(tmp_path / "d")]
    assert main(["check", "--json", *flags, "--l2.d.capacity_bytes", "900TiB"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    wide = next(each for each in findings if "900TiB" in each["message"])
    assert "set l2.d.capacity_bytes" in wide["cure"]
    pool = next(each for each in findings if each["subject"] == "l1")
    assert "make the pool smaller" in pool["cure"]
    assert "make the pool smaller" not in pool["message"]


def checked(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Json]:
    main(["check", "--json", *flags])
    return {each["subject"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


def test_check_and_serve_count_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 GiB of objects needs more than 1 GiB: with room for one but not the other, both say so, in the same words."""
    from lmcache_core.pool import making
    from lmcache_core.pool.room import LimitedBy, Room

    monkeypatch.setattr(making, "room", lambda *_, **__: Room(1 << 30, LimitedBy.MOUNT, "/dev/shm"))
    flags = ["--name", "large", "--runtime_dir", str(tmp_path / "run"), "--state_dir", str(tmp_path / "state")]
    flags += ["--l1.size_bytes", "1GiB"]
    said = checked(capsys, *flags)["l1"]
    assert not said["ok"]
    assert said["message"].startswith("/dev/shm holds 1.00 GiB free and pool 'large' needs 1.0")
    with pytest.raises(NotEnoughMemoryError) as refused:
        server_of(tmp_path, 1 << 30, name="large")
    assert str(refused.value) == f"{said['message']}: {said['cure']}"


def test_check_says_what_listens_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--runtime_dir", str(tmp_path / "run"), "--l1.size_bytes", "8MiB", "--l1.backing", "memfd"]
    curve = ["--zmq.curve_secret_key_file", str(tmp_path / "key"), "--zmq.curve_clients_dir", str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        said = checked(capsys, *flags, *curve, "--zmq.tcp", at)["zmq"]
        assert (said["ok"], said["message"]) == (False, f"it cannot listen at {at}: Address already in use")
        assert said["cure"].startswith("set zmq.tcp to a free port")
    assert checked(capsys, *flags, *curve, "--zmq.tcp", at)["zmq"]["ok"]
    assert checked(capsys, *flags, *curve, "--zmq.tcp", "[::]:0")["zmq"]["ok"]


def test_check_says_that_a_server_of_this_name_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server_of(tmp_path, 8 << 20) as server:
        flags = ["--runtime_dir", str(tmp_path / "run"), "--l1.size_bytes", "8MiB"]
        named = ["--name", server.parts.settings.name]
        said = checked(capsys, *flags, *named)["server"]
        running = f"{server.parts.settings.name!r} is running (process {os.getpid()})"
        assert (said["ok"], said["cure"]) == (True, "")
        assert said["message"] == f"{running}: these findings are about its next start"
        assert "server" not in checked(capsys, *flags, "--name", "another")


def test_what_a_running_server_has_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its port, and the memory of its pool, which its next start gets back."""
    from lmcache_core.pool import making
    from lmcache_core.pool.room import LimitedBy, Room

    flags = ["--runtime_dir", str(tmp_path / "run"), "--l1.size_bytes", "64MiB", "--l1.backing", "memfd"]
    curve = ["--zmq.curve_secret_key_file", str(tmp_path / "key"), "--zmq.curve_clients_dir", str(tmp_path)]
    with server_of(tmp_path) as server, socket.create_server(("127.0.0.1", 0)) as listening:
        assert server.parts.populator.wait(60)
        monkeypatch.setattr(making, "room", lambda *_, **__: Room(8 << 20, LimitedBy.MACHINE, "the machine"))
        at = f"127.0.0.1:{listening.getsockname()[1]}"
        found = checked(capsys, *flags, *curve, "--zmq.tcp", at, "--name", server.parts.settings.name)
        assert found["l1"]["ok"]
        assert (found["zmq"]["ok"], found["zmq"]["cure"]) == (True, "")
        found = checked(capsys, *flags, *curve, "--zmq.tcp", at, "--name", "another")
        assert not found["l1"]["ok"]
        assert not found["zmq"]["ok"]


def table_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) in (0, 1)
    return capsys.readouterr().out


def test_every_table_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lmcache_mock")
    monkeypatch.setenv("COLUMNS", "80")
    long = "a_tier_with_a_name_as_long_as_it_may"[:32].rstrip("_")
    with server_of(tmp_path, 8 << 20, drain_s=0.1) as server, server.connect() as client:  # the tier stays gone
        client.tiers_add(long, {"type": "mock", "capacity_bytes": 123 << 30, "faults": ["any gone"]}, {})
        keys = [number.to_bytes(32, "big") for number in range(3)]
        client.store(keys, [bytes(4096)] * 3, namespace=SPACE)
        client.quota_set("a-tenant.with-quite_a-long.name", {"l1": {"limit_bytes": 1 << 20}}, [SPACE.id])
        where = ["--name", server.parts.settings.name, "--runtime-dir", str(tmp_path / "run")]
        space = ["--namespace", f"{SPACE.id:016x}", "--dtype", "uint8", "--shape", "4096"]
        said = {
            "tiers": table_of(capsys, "tiers", "list", *where),
            "quota": table_of(capsys, "quota", "get", *where),
            "explain": table_of(capsys, "explain", *space, keys[0].hex(), "ab" * 32, *where),
        }
    said["check"] = table_of(capsys, "check", "--state_dir", str(tmp_path / "state"), "--l2.d.type", "mock")
    said["config"] = table_of(capsys, "config", "--state_dir", str(tmp_path / "state"))
    said["plugins"] = table_of(capsys, "plugins")
    said["show"] = table_of(capsys, "plugins", "show", "mock")
    for name, text in said.items():
        wide = [line for line in text.splitlines() if len(line) > 80 and "/" not in line]  # paths stay whole
        assert not wide, f"{name}: {wide}"
        assert text.count("\n") > 2
    assert "a-tenant.with-quite_a-long.name" in said["quota"].replace("\n", "")


def test_status_and_tiers_find_the_server_that_the_settings_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_of(tmp_path, 1 << 20) as server:
        text = f'name = "{server.parts.settings.name}"\nruntime_dir = "{tmp_path / "run"}"\n'
        (tmp_path / "lmcache.toml").write_text(text)
        monkeypatch.chdir(tmp_path)
        assert main(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["server"]["name"] == server.parts.settings.name
        assert main(["tiers", "list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []


RUN_WITHOUT_STREAMS = """
import os, sys
from pathlib import Path
from lmcache_core.cli.main import main
status = main(["config"])
Path(sys.argv[1]).write_text(f"{status} {[os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)]}")
"""


def test_standard_streams_that_were_closed_lead_nowhere_and_their_numbers_are_taken(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_STREAMS, str(seen)],
        cwd=tmp_path,
        preexec_fn=lambda: os.closerange(0, 3),
        close_fds=True,
        timeout=120,
        check=True,
    )
    assert seen.read_text() == f"0 {['/dev/null'] * 3}"
