"""Nodes that find each other through a real Redis or etcd, and go on without it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from lmcache_core.errors import TierError
from lmcache_peer import members
from lmcache_peer.admission import Admission
from lmcache_peer.directory import Directory, NodeEntry, directory_of
from lmcache_peer.limits import DIRECTORY_TTL_S
from lmcache_peer.messages import VERSION
from lmcache_peer.settings import PeerTierSettings
from lmcache_testing.waiting import until

from .conftest import StartNode, free_port


class DirectoryProcess(ABC):
    """A real directory of one process, stopped by pid. What is below `started` looks at it through another door."""

    settings: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.start()

    @abstractmethod
    def command(self) -> list[str]:
        """What is to run."""

    @abstractmethod
    def started(self) -> bool:
        """Whether it answers."""

    @abstractmethod
    def value(self, node: str) -> bytes | None:
        """Of the entry."""

    @abstractmethod
    def ttl_s(self, node: str) -> float:
        """Seconds that the entry has left."""

    @abstractmethod
    def expire(self, node: str) -> None:
        """Its time has come."""

    @abstractmethod
    def put(self, node: str, value: bytes) -> None:
        """Somebody else's entry, without an end."""

    def start(self) -> None:
        self._popen = subprocess.Popen(
            self.command(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(self.started, "the directory to start")

    def stop(self) -> None:
        self._popen.kill()
        self._popen.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._popen.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._popen.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "all of it to be stopped")
        try:
            yield
        finally:
            self._popen.send_signal(signal.SIGCONT)

    def save(self) -> None:
        """For `go_back`."""
        self.stop()
        shutil.copytree(self._folder, self._kept)
        self.start()

    def go_back(self) -> None:
        """It comes back with what it had when it was saved."""
        self.stop()
        shutil.rmtree(self._folder)
        shutil.copytree(self._kept, self._folder)
        self.start()

    @property
    def _kept(self) -> Path:
        return self._folder.with_suffix(".kept")


class RedisProcess(DirectoryProcess):
    """`redis-server`."""

    def __init__(self, folder: Path) -> None:
        self._binary = _installed("redis-server", "redis-server")
        self._port = free_port()
        self.settings = {"redis_url": f"redis://127.0.0.1:{self._port}/0"}
        super().__init__(folder)

    def command(self) -> list[str]:
        quiet = ["--save", "", "--appendonly", "no", "--dir", str(self._folder), "--bind", "127.0.0.1"]
        self.door = redis.Redis(port=self._port)
        return [self._binary, "--port", str(self._port), *quiet]

    def started(self) -> bool:
        try:
            return bool(self.door.ping())
        except redis.exceptions.RedisError:
            return False

    def stop(self) -> None:
        self.door.close()
        super().stop()

    def save(self) -> None:
        self.door.save()
        super().save()

    def value(self, node: str) -> bytes | None:
        value: Any = self.door.get(f"lmcache-peer:default:node:{node}")
        return value

    def ttl_s(self, node: str) -> float:
        left: Any = self.door.pttl(f"lmcache-peer:default:node:{node}")
        return float(left / 1000)

    def expire(self, node: str) -> None:
        self.door.pexpire(f"lmcache-peer:default:node:{node}", 1)

    def put(self, node: str, value: bytes) -> None:
        self.door.sadd("lmcache-peer:default:nodes", node)
        self.door.set(f"lmcache-peer:default:node:{node}", value)


class EtcdProcess(DirectoryProcess):
    """`etcd`, one member."""

    def __init__(self, folder: Path) -> None:
        self._binary = _installed("etcd", "etcd-server")
        self._port, self._peer_port = free_port(), free_port()
        self.settings = {"etcd_nodes": [f"127.0.0.1:{self._port}"]}
        super().__init__(folder)

    def command(self) -> list[str]:
        clients, peers = (f"http://127.0.0.1:{port}" for port in (self._port, self._peer_port))
        return [
            self._binary, "--data-dir", str(self._folder / "data"), "--log-level", "error",
            "--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers,
            "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}",
        ]  # fmt: skip

    def started(self) -> bool:
        try:
            return bool(self._ask("kv/range", key="x"))
        except OSError:
            return False

    def value(self, node: str) -> bytes | None:
        row = self._row(node)
        return base64.b64decode(row["value"]) if row else None

    def ttl_s(self, node: str) -> float:
        return float(self._ask("lease/timetolive", ID=self._row(node)["lease"])["TTL"])

    def expire(self, node: str) -> None:
        self._ask("lease/revoke", ID=self._row(node)["lease"])

    def put(self, node: str, value: bytes) -> None:
        self._ask("kv/put", key=f"lmcache-peer/default/node/{node}", value=value)

    def _row(self, node: str) -> dict[str, Any]:
        rows = self._ask("kv/range", key=f"lmcache-peer/default/node/{node}").get("kvs", [])
        return dict(rows[0]) if rows else {}

    def _ask(self, what: str, **query: Any) -> dict[str, Any]:
        raw = {name: each.encode() if name == "key" else each for name, each in query.items()}
        text = {name: base64.b64encode(each).decode() for name, each in raw.items() if isinstance(each, bytes)}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", f"/v3/{what}", json.dumps(raw | text))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer


def _installed(name: str, package: str) -> str:
    binary = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/bin")
    if binary is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {package})")
    return binary


@pytest.fixture(params=[RedisProcess, EtcdProcess], ids=["redis", "etcd"])
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DirectoryProcess]:
    process: DirectoryProcess = request.param(tmp_path / "directory")
    yield process
    process.stop()


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path / "directory")
    yield process
    process.stop()


def tier_settings(process: DirectoryProcess, **more: object) -> PeerTierSettings:
    return PeerTierSettings.model_validate({**process.settings, **more})


def directory_at(process: DirectoryProcess, **more: object) -> Directory:
    return directory_of(tier_settings(process, **more), "peers")


def entry(node: str, boot: int = 1) -> NodeEntry:
    return NodeEntry(node, boot, "127.0.0.1:7600", VERSION)


def test_a_node_is_there_until_it_leaves_or_says_nothing_for_its_ttl(process: DirectoryProcess) -> None:
    one, directory = directory_at(process), directory_at(process)
    one.register(entry("a"))
    directory.register(entry("b", 2))
    assert directory.entries() == [entry("a"), entry("b", 2)]
    assert 0 < process.ttl_s("a") <= DIRECTORY_TTL_S
    directory.leave(entry("b", 2))
    assert directory.entries() == [entry("a")]
    process.expire("a")
    until(lambda: directory.entries() == [], "its entry to expire")
    one.register(entry("a"))
    assert directory.entries() == [entry("a")]
    one.close()
    directory.close()


def test_names_of_nodes_that_are_gone_leave_the_set(redis_process: RedisProcess) -> None:
    directory = directory_at(redis_process)
    directory.register(entry("a"))
    redis_process.expire("a")
    until(lambda: directory.entries() == [], "its entry to expire")
    assert redis_process.door.smembers("lmcache-peer:default:nodes") == set()
    directory.close()


def test_of_two_nodes_with_one_name_the_last_to_start_has_it_and_the_other_is_told(process: DirectoryProcess) -> None:
    one, other = directory_at(process), directory_at(process)
    one.register(entry("a", 1))
    other.register(entry("a", 2))
    for _ in range(2):
        with pytest.raises(TierError, match="another node is registered as a, at 127"):
            one.register(entry("a", 1))
        other.register(entry("a", 2))
        assert one.entries() == [entry("a", 2)]
    one.leave(entry("a", 1))
    assert other.entries() == [entry("a", 2)], "it does not take the other's entry with it"
    other.leave(entry("a", 2))
    one.register(entry("a", 1))
    assert other.entries() == [entry("a", 1)]
    one.close()
    other.close()


def test_an_entry_under_another_name_is_nobodys(process: DirectoryProcess) -> None:
    directory = directory_at(process)
    directory.register(entry("a"))
    process.put("b", msgspec.msgpack.encode(entry("a", 9)))
    assert directory.entries() == [entry("a")]
    directory.close()


def test_clusters_see_nothing_of_each_other(process: DirectoryProcess) -> None:
    one, other = (directory_at(process, cluster=name) for name in ("one", "one-more"))
    one.register(entry("a"))
    assert (one.entries(), other.entries()) == ([entry("a")], [])
    one.close()
    other.close()


def test_what_is_no_entry_is_left_alone(process: DirectoryProcess) -> None:
    directory = directory_at(process)
    directory.register(entry("a"))
    process.put("wrong", b"no entry")
    process.put("deep", b"\x81\xa1x" + b"\x91" * 2500)  # one list in another, and so on, where a field may be
    if isinstance(process, RedisProcess):
        process.door.sadd("lmcache-peer:default:nodes", b"\xff\xfe")
    assert directory.entries() == [entry("a")]
    directory.close()


def test_a_directory_that_is_away_is_an_error_in_time_and_one_that_is_back_serves(process: DirectoryProcess) -> None:
    directory = directory_at(process)
    directory.register(entry("a"))
    process.stop()
    for call in (directory.entries, lambda: directory.register(entry("a"))):
        with pytest.raises(TierError, match="the directory does not answer"):
            call()
    directory.leave(entry("a"))
    process.start()
    directory.register(entry("a"))
    assert directory.entries() == [entry("a")]
    directory.close()


def test_a_directory_that_hangs_is_an_error_in_time(process: DirectoryProcess) -> None:
    directory = directory_at(process)
    directory.register(entry("a"))
    with process.paused():
        for call in (directory.entries, lambda: directory.register(entry("a"))):
            with pytest.raises(TierError, match="the directory does not answer"):
                call()
    until(lambda: _registers(directory, entry("a")), "it is back")
    assert directory.entries() == [entry("a")]
    directory.close()


def test_a_directory_that_comes_back_with_old_data_has_the_new_ones_within_a_ttl(process: DirectoryProcess) -> None:
    former, directory = directory_at(process), directory_at(process)
    former.register(entry("a", 1))
    former.register(entry("a", 1))
    process.save()
    directory.register(entry("a", 2))
    assert directory.entries() == [entry("a", 2)]
    process.go_back()
    until(lambda: _registers(directory, entry("a", 2)), "the old entry to expire")
    assert directory.entries() == [entry("a", 2)]
    assert 0 < process.ttl_s("a") <= DIRECTORY_TTL_S
    former.close()
    directory.close()


def _registers(directory: Directory, each: NodeEntry) -> bool:
    try:
        directory.register(each)
    except TierError:
        return False
    return True


def test_of_several_members_of_etcd_one_that_hangs_or_is_away_does_not_matter(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # connections wait in its backlog
        process = EtcdProcess(tmp_path / "directory")
        away, hangs = f"127.0.0.1:{free_port()}", f"127.0.0.1:{hanging.getsockname()[1]}"
        settings = {"etcd_nodes": [away, hangs, *process.settings["etcd_nodes"]]}
        directory = directory_of(PeerTierSettings.model_validate(settings), "peers")
        directory.register(entry("a"))
        assert directory.entries() == [entry("a")]
        directory.close()
        process.stop()


class LyingEtcd(ThreadingHTTPServer):
    """Answers every call with `content`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _LyingAnswer)
        self.content, self.status = b"", 200
        self.settings = PeerTierSettings(etcd_nodes=(f"127.0.0.1:{self.server_port}",), patience_s=0.1)


class _LyingAnswer(BaseHTTPRequestHandler):
    server: LyingEtcd

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def liar() -> Iterator[LyingEtcd]:
    with LyingEtcd() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


DEEP = b"[" * 100_000
LIES = {
    "deep": DEEP,
    "deep in an unknown field": b'{"header": ' + DEEP,
    "no rows": b'{"kvs": 7, "ID": "1"}',
    "no row": b'{"kvs": [[]], "ID": "1"}',
    "no base64": b'{"kvs": [{"key": "?", "value": "?"}], "ID": "1"}',
    "no JSON": b"404 page not found",
    "no text": b'{"kvs": [{"key": "\xff"}]}',
}


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_none_of_etcds_is_an_error_of_the_directory(liar: LyingEtcd, lie: str, status: int) -> None:
    liar.content, liar.status = LIES[lie], status
    with contextlib.closing(directory_of(liar.settings, "peers")) as directory:
        for call in (directory.entries, lambda: directory.register(entry("a"))):
            with pytest.raises(TierError, match="the directory does not answer: 127"):
                call()
        directory.leave(entry("a"))


def test_a_lease_that_is_no_number_and_a_time_that_is_none_are_errors_of_the_directory(liar: LyingEtcd) -> None:
    with contextlib.closing(directory_of(liar.settings, "peers")) as directory:
        for lie in (b"{}", b'{"ID": "soon"}'):
            liar.content = lie
            with pytest.raises(TierError, match="the directory does not answer"):
                directory.register(entry("a"))
        liar.content = b'{"ID": "1", "result": {"TTL": "10"}}'
        directory.register(entry("a"))
        for lie in (b'{"result": {"TTL": "soon"}}', b'{"result": {"TTL": []}}', b'{"result": 7}'):
            liar.content = lie
            with pytest.raises(TierError, match="the directory does not answer"):
                directory.register(entry("a"))


class _Odd(Directory):
    """Fails in a way that nobody has foreseen, until it does not."""

    fails = True

    def entries(self) -> list[NodeEntry]:
        if self.fails:
            raise RecursionError("odd")
        return [entry("a")]


def test_nothing_that_a_directory_does_ends_the_looking_around(
    liar: LyingEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "DIRECTORY_PERIOD_S", 0.0)
    liar.content, odd = DEEP, _Odd()
    etcd = directory_of(liar.settings, "peers")
    for directory, error in ((etcd, "does not answer"), (odd, "odd")):
        known = members.Members(liar.settings, "me", Admission(liar.settings), directory)
        known.begin(time.monotonic() + 30)
        until(lambda known=known, error=error: error in known.directory_error, "the error to be shown")
        liar.content, odd.fails = b"{}", directory is etcd
        until(lambda known=known: not known.directory_error, "it to be asked again")
        known.close()


def test_nodes_find_each_other_and_go_on_while_the_directory_is_away(
    node: StartNode, process: DirectoryProcess
) -> None:
    url = process.settings
    a = node("a", serve=url)
    a.store(1, 2, 3, 4)
    b = node("b", serve=url, tier=url)
    b.sees("a", 4)
    assert b.load(1) == [1]
    until(lambda: a.serving["registered"], "the status of a helper to say so")
    process.stop()
    until(lambda: not a.serving["registered"], "its status to say that it is not")
    digests = a.serving["digests"]
    until(lambda: a.serving["digests"] > digests + 3, "some rounds of the helper")
    assert not a.serving["registered"]
    until(lambda: b.tier["adapter"]["directory_away"], "the status to say so")
    assert "does not answer" in b.tier["adapter"]["directory_error"]
    assert b.load(2) == [2], "the last known nodes are used"
    process.start()
    until(lambda: not b.tier["adapter"]["directory_away"], "the directory to be back")
    until(lambda: b.tier["adapter"]["nodes"] == 1, "a to register again")
    b.sees("a", 4)
    assert b.load(3) == [3]


def test_a_node_that_was_restarted_is_another_and_one_that_is_gone_is_asked_nothing(
    node: StartNode, process: DirectoryProcess
) -> None:
    url = process.settings
    a = node("a", serve=url)
    a.store(1, 2)
    b = node("b", tier=url)
    b.sees("a", 2)
    assert b.load(1) == [1]
    former = process.value("a")
    os.kill(a.helper, signal.SIGKILL)
    until(lambda: process.value("a") not in (None, former), "another boot")
    until(lambda: b.peer("a").get("usable") and b.load(2) == [2], "the new one is asked")
    a.server.stop()
    until(lambda: b.tier["adapter"]["nodes"] == 0, "nobody is left")
    assert b.load(5) == []


def test_an_address_that_is_not_loopback_is_asked_nothing_without_tls(redis_process: RedisProcess) -> None:
    from lmcache_core.tiers.contract import AdapterContext
    from lmcache_peer.adapter import PeerAdapter

    directory = directory_at(redis_process)
    directory.register(NodeEntry("far", 1, "192.0.2.1:7600", VERSION))
    directory.register(NodeEntry("odd", 1, "no address", VERSION))
    directory.register(NodeEntry("old", 1, "127.0.0.1:7600", VERSION + 1))
    with PeerAdapter(tier_settings(redis_process), AdapterContext("peers")) as adapter:
        adapter.members.begin(time.monotonic() + 30)
        assert (adapter.status()["nodes"], adapter.status()["refused_nodes"]) == (0, 3)
    directory.close()


def test_nodes_of_one_authority_talk_by_tls_and_strangers_do_not(
    node: StartNode, redis_process: RedisProcess, tmp_path: Path
) -> None:
    ours, theirs = (authority(tmp_path / name) for name in ("ours", "theirs"))
    url = redis_process.settings
    a = node("a", serve=url | ours)
    a.store(1, 2)
    b = node("b", tier=url | ours)
    b.sees("a", 2)
    assert b.load(1, 2) == [1, 2]
    c = node("c", tier=url | theirs)
    assert c.load(1) == []
    assert c.peer("a")["usable"] == 0
    d = node("d", tier=url)  # without TLS
    assert d.load(1) == []


def authority(folder: Path) -> dict[str, str]:
    """A certificate authority with one certificate, as settings."""
    folder.mkdir()

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", f"/CN={folder.name}", "-days", "2")
    openssl("req", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    openssl("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out",
            "node.pem", "-days", "2")  # fmt: skip
    files = {"tls_ca_file": "ca.pem", "tls_cert_file": "node.pem", "tls_key_file": "node.key"}
    return {name: str(folder / file) for name, file in files.items()}
