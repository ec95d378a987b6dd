"""A Mooncake Store of our own: its master, nodes that lend memory, and a door in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from services.service import Daemon, ServiceError, free_port, wait_healthy

CLIENT_TTL_S = 3  # after which the master forgets a dead node
NODE_BYTES_MIN = 16 << 20  # Mooncake takes no smaller segment
WORKER = Path(__file__).with_name("mooncake_door.py")


class MooncakeCluster:
    """`mooncake_master` and `mooncake_client`s of the installed wheel, on free ports of 127.0.0.1. Raises
    `ServiceError` if it is not installed, or does not start."""

    def __init__(self, folder: Path, node_bytes: int = 256 << 20, nodes: int = 1, *options: str) -> None:
        found = find_spec("mooncake")
        if found is None or not found.submodule_search_locations:
            raise ServiceError("Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
        self._programs = Path(found.submodule_search_locations[0])
        self._log = folder / "mooncake.log"
        self._node_bytes = node_bytes
        self._options = options
        self.port, self._admin_port = free_port(), free_port()
        self._started: list[Daemon] = []
        self._nodes: list[Daemon] = []
        self._doors: list[MooncakeDoor] = []
        try:
            self.start_master()
            for _ in range(nodes):
                self.start_node()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_master(self) -> None:
        self._master = self._run(
            "mooncake_master",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._admin_port}",
            f"--client_ttl={CLIENT_TTL_S}",
            "--rpc_thread_num=4",
            *self._options,
        )
        wait_healthy("mooncake_master", self.answers, self._master)

    def start_node(self) -> None:
        before = len(self.segments())
        node = self._run(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--global_segment_size={self._node_bytes}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
        )
        self._nodes.append(node)
        wait_healthy("mooncake_client", lambda: len(self.segments()) > before, node)

    def kill_master(self) -> None:
        self._master.kill()

    @contextmanager
    def hang_master(self) -> Iterator[None]:
        """Within it the master takes requests and answers none."""
        stop(self._master.pid)
        try:
            yield
        finally:
            self._master.signal(signal.SIGCONT)

    def kill_node(self) -> None:
        self._nodes.pop(0).kill()

    def await_nodes(self, count: int) -> None:
        """Wait until the master knows so many nodes."""
        wait_healthy(f"a store of {count} nodes", lambda: len(self.segments()) == count, self._master)

    def answers(self) -> bool:
        return "ok" in self.ask("health")

    def segments(self) -> list[str]:
        return self.ask("get_all_segments").split()

    def names(self) -> list[str]:
        return self.ask("get_all_keys").split()

    def ask(self, path: str) -> str:
        """The master over HTTP; empty while it is away."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def door(self) -> MooncakeDoor:
        """Mooncake's own client, in a process of its own: it is closed with the cluster."""
        if not self._doors:
            self._doors.append(MooncakeDoor(self.address))
        return self._doors[0]

    def close(self) -> None:
        for door in self._doors:
            door.close()
        for process in self._started:
            process.kill()

    def _run(self, program: str, *arguments: str) -> Daemon:
        self._started.append(Daemon([str(self._programs / program), *arguments], self._log))
        return self._started[-1]


class MooncakeDoor:
    """A client of Mooncake without the adapter. Names are those of the store."""

    def __init__(self, master: str) -> None:
        environment = {**os.environ, "GLOG_minloglevel": "3"}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), master],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self.ask("ready")

    def ask(self, verb: str, name: str = "", content: bytes = b"") -> bytes | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, name, content.hex()]).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the door has ended"
        answer = json.loads(line)
        return None if answer is None else bytes.fromhex(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def stop(pid: int) -> None:
    """Stop a child: none of its threads runs once this returns."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
