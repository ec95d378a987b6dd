"""The units, manifests and container files, as far as they can be tried without the systems they are for."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent
UNIT = HERE / "systemd/lmcache-core@.service"
COMMAND = Path(sys.executable).parent / "lmcache-core"
KUBERNETES = "1.30"
WAIT_S = 60.0


def run(*argv: object, stdin: str = "") -> str:
    done = subprocess.run([str(each) for each in argv], input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on this machine: install it to have this checked")
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the command where it is on this machine."""
    text = UNIT.read_text().replace("/opt/lmcache-core/bin/lmcache-core", str(COMMAND))
    path = tmp_path / UNIT.name
    path.write_text(text)
    return path


def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    done = subprocess.run([tool("systemd-analyze"), "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0
    assert not done.stderr


def test_the_unit_is_as_closed_as_systemd_can_make_it(unit: Path) -> None:
    run(tool("systemd-analyze"), "security", "--offline=true", "--threshold=20", unit)


def test_every_flag_and_command_of_the_unit_exists(unit: Path) -> None:
    for line in re.findall(r"^Exec\w+=.*$", UNIT.read_text(), re.MULTILINE):
        words = line[line.index("bin/lmcache-core") :].rstrip("'").split()[1:]
        told = run(COMMAND, words[0], "--help")
        for flag in (word for word in words if word.startswith("--")):
            assert flag in told or run(COMMAND, words[0], "--help", "--all").count(flag), f"{words[0]} has no {flag}"


class Manager:
    """The end of the notification socket at which systemd would be."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(WAIT_S)

    def hears(self) -> str:
        return self._socket.recv(4096).decode()

    def close(self) -> None:
        self._socket.close()


def test_a_server_tells_systemd_that_it_is_ready_alive_and_stopping(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    server = subprocess.Popen(
        [COMMAND, "serve", "--name", "unit", "--l1.size_bytes", "16MiB", "--l1.backing", "memfd",
         "--runtime_dir", tmp_path / "run", "--state_dir", tmp_path / "state"],
        env={"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "1000000", "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        heard = {manager.hears() for _ in range(4)}
        assert heard == {"READY=1", "WATCHDOG=1"}
        server.terminate()
        while manager.hears() != "STOPPING=1":
            pass
        assert server.wait(WAIT_S) == 0
    finally:
        server.kill()
        server.communicate()
        manager.close()


@pytest.mark.parametrize("folder", ["base", "overlays/disk", "overlays/shm"])
def test_the_manifests_are_what_kubernetes_expects(folder: str) -> None:
    rendered = run(tool("kubectl"), "kustomize", HERE / "kubernetes" / folder)
    said = run(tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, "-", stdin=rendered)
    assert said.count("passed") == 6
    run(tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, HERE / "kubernetes/engine-pod.yaml")


@pytest.mark.parametrize("folder", ["base", "overlays/disk", "overlays/shm"])
def test_the_settings_in_the_manifests_are_settings(folder: str) -> None:
    said = run(COMMAND, "config", "--config", HERE / "kubernetes" / folder / "lmcache.toml", "--json")
    assert "size_bytes" in said


def test_the_worker_of_the_compose_file_finds_what_another_stored(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    server = subprocess.Popen(
        [COMMAND, "serve", "--name", "default", "--l1.size_bytes", "64MiB", "--l1.backing", "memfd",
         "--runtime_dir", run_dir, "--state_dir", tmp_path / "state"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        env = {"LMCACHE_CORE_RUNTIME_DIR": str(run_dir), "HOME": str(tmp_path)}
        said = [
            subprocess.run(
                [sys.executable, HERE / "container/worker.py"], env=env, capture_output=True, text=True, check=True
            ).stdout
            for _ in range(2)
        ]
        assert ": 0 of 16 chunks were there" in said[0]
        assert ": 16 of 16 chunks were there" in said[1]
    finally:
        server.terminate()
        server.communicate()
