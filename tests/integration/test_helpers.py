"""Processes beside the server: they start with it, come back, learn where it is and no secret, and end with it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from lmcache_core.errors import SettingsError
from lmcache_core.settings.compose import make_settings
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import WAIT_S, until

from ..conftest import Node


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def notes(path: Path) -> list[Json]:
    """What helpers wrote down: a line of JSON each."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


NOTE = "import json, os, time; print(json.dumps({what}), file=open({path!r}, 'a'), flush=True); "


def noting(path: Path, what: str, then: str) -> str:
    return python(NOTE.format(path=str(path), what=what) + then)


def test_it_is_told_where_the_server_is_and_no_secret(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "correct-horse")
    monkeypatch.setenv("CHOSEN", "passed on")
    path = tmp_path / "notes"
    command = noting(path, "dict(os.environ)", "time.sleep(600)")
    server = node.serve("--helpers.one.command", command, "--helpers.one.environment", "CHOSEN,ABSENT")
    (environ,) = until(lambda: notes(path))
    assert environ["LMCACHE_CORE_ADDRESS"] == str(server.run / node.name / "lifeline")
    assert environ["LMCACHE_CORE_NAME"] == node.name
    assert environ["LMCACHE_CORE_RUNTIME_DIR"] == str(server.run)
    assert environ["CHOSEN"] == "passed on"
    assert "correct-horse" not in str(environ)


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_server_however_that_ends(node: Node, tmp_path: Path, ends: signal.Signals) -> None:
    path = tmp_path / "notes"
    server = node.serve("--helpers.one.command", noting(path, "os.getpid()", "time.sleep(600)"))
    (pid,) = until(lambda: notes(path))
    server.signal(ends)
    server.popen.wait()
    until(lambda: gone(pid))


def test_one_that_does_not_hear_is_killed_at_the_end(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code = deaf + NOTE.format(path=str(path), what="os.getpid()") + "time.sleep(600)"
    server = node.serve("--helpers.one.command", python(code))
    (pid,) = until(lambda: notes(path))
    server.signal(signal.SIGTERM)
    assert server.popen.wait(WAIT_S) == 0
    until(lambda: gone(pid))


def test_one_that_ends_is_started_again_and_status_says_so(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    server = node.serve("--helpers.one.command", noting(path, "os.getpid()", "os._exit(3)"))
    until(lambda: len(notes(path)) >= 2)
    assert len({*notes(path)}) == len(notes(path))
    with server.client(maps_pool=False) as client:
        told = until(lambda: (found := client.status()["helpers"]["one"])["restarts"] >= 1 and found)
    assert told["last_end"] == "exit status 3"


def test_one_that_is_killed_comes_back_with_its_name_in_status(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    server = node.serve("--helpers.one.command", noting(path, "os.getpid()", "time.sleep(600)"))
    (pid,) = until(lambda: notes(path))
    os.kill(pid, signal.SIGKILL)
    _, second = until(lambda: len(found := notes(path)) == 2 and found)
    with server.client(maps_pool=False) as client:
        told = client.status()["helpers"]["one"]
    assert (told["pid"], told["last_end"]) == (second, "signal SIGKILL")


def test_a_command_that_is_not_there_costs_the_server_nothing(node: Node) -> None:
    server = node.serve("--helpers.one.command", "/no/such/program --at all")
    with server.client(maps_pool=False) as client:
        told = until(lambda: (found := client.status()["helpers"]["one"])["last_end"] and found)
    assert told["last_end"] == "exit status 1"
    server.signal(signal.SIGTERM)
    assert server.popen.wait(WAIT_S) == 0


def test_commands_are_lists_or_lines() -> None:
    helpers = make_settings(helpers={"a": {"command": ["x", "y z"]}, "b": {"command": "x 'y z'"}}).helpers
    assert helpers["a"].command == helpers["b"].command == ("x", "y z")
    for wrong in ({"Bad-Name": {"command": ["x"]}}, {"a": {"command": []}}, {"a": {}}, {"a": {"comand": ["x"]}}):
        with pytest.raises(SettingsError, match="helpers"):
            make_settings(helpers=wrong)
