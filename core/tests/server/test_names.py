"""What others find a server by stands as long as the server, and an ordinary signal ends it in order."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.observe.troubles import troubles_of
from lmcache_core.server.peers.ipc_carrier import IpcCarrier
from lmcache_core.server.server import Server
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import until


@pytest.mark.parametrize("loss", ["removed", "another file", "another socket's", "whole directory"])
def test_a_name_that_is_lost_is_made_again(tmp_path: Path, loss: str) -> None:
    name, run = f"n{os.urandom(4).hex()}", tmp_path / "run"
    with Server(server_settings(tmp_path, name=name, drain_s=0.1)) as server:
        path = Path(server.address)
        if loss == "whole directory":
            shutil.rmtree(run)
        else:
            path.unlink()
        if loss == "another file":
            path.write_text("mine")
        elif loss == "another socket's":
            os.mknod(path, 0o140600)
        until(
            lambda: server.parts.listener.stands and all(claim.stands for claim in server.parts.segment.claims),
            "the names",
        )
        with Client.connect(name, runtime_dir=run) as client:
            assert client.ping(b"here") == b"here"
    assert not path.exists()


@pytest.mark.parametrize("where", ["beside the lifeline", "elsewhere"])
@pytest.mark.parametrize("loss", ["removed", "another file", "whole directory"])
def test_a_zmq_socket_that_is_lost_is_made_again(tmp_path: Path, where: str, loss: str) -> None:
    name, elsewhere = f"n{os.urandom(4).hex()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    ipc = True if where == "beside the lifeline" else str(elsewhere / "zmq")
    with Server(server_settings(tmp_path, name=name, drain_s=0.1, zmq={"ipc": ipc})) as server:
        carrier = server.parts.carriers[0]
        assert isinstance(carrier, IpcCarrier)
        path, mode = carrier.path, carrier.path.stat().st_mode
        with Client.connect(address=carrier.address, maps_pool=False) as former:
            if loss == "whole directory":
                shutil.rmtree(path.parent)
                if where == "elsewhere":
                    until(lambda: server.names.trouble, "the trouble")
                    elsewhere.mkdir(mode=0o700)
            else:
                path.unlink()
            if loss == "another file":
                path.write_text("mine")
            until(lambda: carrier.stands, "the socket")
            with Client.connect(address=carrier.address, maps_pool=False) as client:
                assert client.ping(b"here") == b"here"
            assert path.stat().st_mode == mode
            assert former.ping(b"still") == b"still"
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
@pytest.mark.parametrize("ignored", [False, True])
def test_an_ordinary_signal_is_no_crash(tmp_path: Path, number: signal.Signals, ignored: bool) -> None:
    name = f"s{os.urandom(4).hex()}"
    command = [sys.executable, "-c", "from lmcache_core.cli.main import main; main()", "serve", "--name", name,
               "--runtime_dir", str(tmp_path / "run"), "--state_dir", str(tmp_path / "state"),
               "--l1.size_bytes", "4MiB"]  # fmt: skip
    before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    finally:
        signal.signal(number, before)
    with process:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        process.send_signal(number)
        if ignored or number == signal.SIGUSR1:
            with Client.connect(name, runtime_dir=tmp_path / "run") as client:
                assert client.ping(b"on") == b"on"
            process.terminate()
        assert process.wait(60) == 0
    assert not [path for path in Path("/dev/shm").iterdir() if name in path.name]


def test_a_server_that_lost_its_names_to_another_one_gives_way_until_that_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, run = f"n{os.urandom(4).hex()}", tmp_path / "run"

    def server(state: str) -> Server:
        settings = {"state_dir": str(tmp_path / state), "l1": {"backing": "memfd"}, "drain_s": 0.1}
        return Server(server_settings(tmp_path, name=name, **settings))

    def troubles() -> str:
        return " ".join(troubles_of(client.status()))

    with server("first") as first, first.connect() as client:
        first.names.stop()  # we look at chosen moments
        shutil.rmtree(run)
        with server("second") as second:
            second.names.stop()
            for _ in range(3):
                first.names.look()
                second.names.look()
                assert second.parts.listener.stands
                assert not first.parts.listener.stands
                assert [claim.stands for claim in first.parts.segment.claims] == [False]
            assert str(os.getpid()) in client.status()["server"]["names_lost"]
            assert "no new client finds it" in troubles()
            assert caplog.text.count("belongs to another living server") == 1
            shutil.rmtree(run)
            second.names.look()
            until(lambda: second.parts.listener.stands, "the names of whoever comes first")
            first.names.look()
            assert second.parts.listener.stands
            with Client.connect(name, runtime_dir=run) as other:
                assert other.ping(b"here") == b"here"
        first.names.look()
        until(lambda: first.parts.listener.stands, "its names after the other one's end")
        first.names.look()
        assert "no new client finds it" not in troubles()


def test_a_lifeline_is_not_made_where_another_process_listens(tmp_path: Path) -> None:
    with (
        Server(server_settings(tmp_path, drain_s=0.1)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
    ):
        server.names.stop()
        path = Path(server.address)
        path.unlink()
        other.bind(str(path))
        other.listen(8)
        server.names.look()
        assert server.names.trouble
        assert path.stat().st_ino != server.parts.listener._file[1]
        path.unlink()
        server.names.look()
        until(lambda: server.parts.listener.stands, "the lifeline")
        assert not server.names.trouble
