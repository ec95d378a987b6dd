"""The former release and this one, each in an environment of its own: as server and as client, with a pool and a disk
tier that go from one to the other. `nox -s compatibility` makes the environments."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_testing.embedded import Json

FORMER, PRESENT = "LMCACHE_CORE_FORMER_PYTHON", "LMCACHE_CORE_PRESENT_PYTHON"
SIDE = Path(__file__).with_name("side.py")
PYTHONS = {"former": os.environ.get(FORMER, ""), "present": os.environ.get(PRESENT, "")}
BOTH_WAYS = pytest.mark.parametrize(("server", "client"), [("former", "present"), ("present", "former")])
PATIENCE_S = 60


class Node:
    """A name on this machine, at which servers of either side start, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.name = f"sides-{uuid.uuid4().hex[:12]}"
        self.folder = folder
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("LMCACHE_CORE_")}

    @contextlib.contextmanager
    def serve(self, side: str, *, keep_pool: bool = False) -> Iterator[subprocess.Popen[str]]:
        """A server, until the block ends; its pool stays where it is killed in it, or was told to keep it."""
        command = [
            PYTHONS[side], "-m", "lmcache_core.cli.main", "serve", "--name", self.name,
            "--runtime_dir", str(self.folder / "run"), "--state_dir", str(self.folder / "state"),
            "--l1.size_bytes", "16MiB", "--drain_s", "10",
            "--l2.disk.type", "fs", "--l2.disk.path", str(self.folder / "disk"), "--l2.disk.capacity_bytes", "1GiB",
            *(["--keep-pool"] if keep_pool else []),
        ]  # fmt: skip
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "ready" in line:
                    break
            else:
                raise AssertionError(f"the server of the {side} side did not start:\n{self.log()}")
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)

    def client(self, side: str, what: str, first: int = 0) -> Json:
        """`store` or `read` 32 objects."""
        command = [PYTHONS[side], str(SIDE), self.name, str(self.folder / "run"), what, str(first)]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"
        return dict(json.loads(done.stdout))

    def understands(self, client: str, server: str) -> bool:
        """Whether the protocols of the sides have a version in common; where not, this server refuses that client in
        words that name both."""
        if not set(range(*protocol(client))) & set(range(*protocol(server))):
            told = self.client(client, "store")
            assert told["stored"] == 0
            for side in (client, server):
                first, end = protocol(side)
                assert f"{first} to {end - 1}" in told["why_unreachable"]
            return False
        return True

    def status(self, side: str) -> Json:
        command = [
            PYTHONS[side], "-m", "lmcache_core.cli.main", "status", "--name", self.name,
            "--runtime-dir", str(self.folder / "run"), "--json",
        ]  # fmt: skip
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def clean(self) -> None:
        command = [PYTHONS["present"], "-m", "lmcache_core.cli.main", "clean", self.name, "--runtime-dir"]
        subprocess.run([*command, str(self.folder / "run")], env=self.environment, capture_output=True, check=False)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.clean()


@functools.cache
def protocol(side: str) -> tuple[int, int]:
    """The first protocol version that a side speaks, and the one after its last."""
    code = "from lmcache_core.protocol import messages as m; print(m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX + 1)"
    first, end = subprocess.check_output([PYTHONS[side], "-c", code], text=True).split()
    return int(first), int(end)


ALL_READ = {"found": 32, "read": 32, "right": 32, "held": True, "why_unreachable": ""}


@BOTH_WAYS
def test_a_client_of_one_side_stores_and_reads_at_a_server_of_the_other(node: Node, server: str, client: str) -> None:
    with node.serve(server):
        if not node.understands(client, server):
            return
        assert node.client(client, "store")["stored"] == 32
        assert node.client(client, "read") == ALL_READ


@BOTH_WAYS
def test_clients_of_both_sides_read_what_the_other_stored(node: Node, server: str, client: str) -> None:
    with node.serve(server):
        if not node.understands(client, server):
            return
        node.client(client, "store")
        node.client(server, "store", 100)
        assert node.client(server, "read") == ALL_READ
        assert node.client(client, "read", 100) == ALL_READ


@BOTH_WAYS
@pytest.mark.parametrize("end", ["in good order", "killed"])
def test_a_server_goes_on_with_the_pool_of_one_of_the_other_side_or_says_why_not(
    node: Node, server: str, client: str, end: str
) -> None:
    with node.serve(server, keep_pool=True) as process:
        node.client(server, "store")
        if end == "killed":
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
    with node.serve(client):
        why = node.status(client)["pool"]["why_cold"]
        read = node.client(client, "read")
    assert read["right"] == read["read"], "never bytes that were not stored"
    assert why or read == ALL_READ, "either it goes on with all of it, or it says why it does not"


@BOTH_WAYS
def test_what_one_side_has_put_on_a_disk_the_other_reads(node: Node, server: str, client: str) -> None:
    with node.serve(server):
        node.client(server, "store")  # the drain gives the tier what it lacks
    with node.serve(client):
        assert node.client(client, "read") == ALL_READ
