"""Nodes that find each other through a real Redis, and go on without it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from lmcache_core.errors import TierError
from lmcache_peer.directory import NodeEntry, RedisDirectory, directory_of
from lmcache_peer.limits import DIRECTORY_TTL_S
from lmcache_peer.messages import VERSION
from lmcache_peer.settings import PeerTierSettings
from lmcache_testing.waiting import until

from .conftest import StartNode, free_port


class RedisProcess:
    """One `redis-server`, stopped by pid."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server") or shutil.which("redis-server", path="/usr/sbin:/usr/local/bin")
        if binary is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        quiet = ["--save", "", "--appendonly", "no", "--dir", str(folder), "--bind", "127.0.0.1"]
        self._argv = [binary, "--port", str(self.port), *quiet]
        self.start()

    def start(self) -> None:
        self._popen = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.door = redis.Redis(port=self.port)

        def answers() -> bool:
            try:
                return bool(self.door.ping())
            except redis.exceptions.RedisError:
                return False

        until(answers, "redis-server")

    def stop(self) -> None:
        self.door.close()
        self._popen.kill()
        self._popen.wait()


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path)
    yield process
    process.stop()


def settings(url: str, **more: object) -> PeerTierSettings:
    return PeerTierSettings.model_validate({"redis_url": url, **more})


def entry(node: str, boot: int = 1) -> NodeEntry:
    return NodeEntry(node, boot, "127.0.0.1:7600", VERSION)


def test_a_node_is_there_until_it_leaves_or_says_nothing_for_its_ttl(redis_process: RedisProcess) -> None:
    directory = directory_of(settings(redis_process.url), "peers")
    directory.register(entry("a"))
    directory.register(entry("b", 2))
    assert directory.entries() == [entry("a"), entry("b", 2)]
    key = b"lmcache-peer:default:node:a"
    assert 0 < redis_process.door.pttl(key) <= DIRECTORY_TTL_S * 1000
    directory.leave(entry("b", 2))
    assert directory.entries() == [entry("a")]
    redis_process.door.pexpire(key, 1)
    until(lambda: directory.entries() == [], "its entry to expire")
    assert redis_process.door.smembers("lmcache-peer:default:nodes") == set()
    directory.close()


def test_of_two_nodes_with_one_name_the_last_to_start_has_it_and_the_other_is_told(redis_process: RedisProcess) -> None:
    one, other = (RedisDirectory(settings(redis_process.url), "peers") for _ in range(2))
    one.register(entry("a", 1))
    other.register(entry("a", 2))
    for _ in range(2):
        with pytest.raises(TierError, match="another node is registered as a, at 127"):
            one.register(entry("a", 1))
        other.register(entry("a", 2))
        assert one.entries() == [entry("a", 2)]
    one.leave(entry("a", 1))
    assert one.entries() == [entry("a", 2)], "it does not take the other's entry with it"
    other.leave(entry("a", 2))
    one.register(entry("a", 1))
    assert other.entries() == [entry("a", 1)]
    one.close()
    other.close()


def test_an_entry_under_another_name_is_nobodys(redis_process: RedisProcess) -> None:
    directory = RedisDirectory(settings(redis_process.url), "peers")
    directory.register(entry("a"))
    redis_process.door.sadd("lmcache-peer:default:nodes", "b")
    redis_process.door.set("lmcache-peer:default:node:b", msgspec.msgpack.encode(entry("a", 9)))
    assert directory.entries() == [entry("a")]
    directory.close()


def test_clusters_see_nothing_of_each_other(redis_process: RedisProcess) -> None:
    one, other = (RedisDirectory(settings(redis_process.url, cluster=name), "peers") for name in ("one", "other"))
    one.register(entry("a"))
    assert (one.entries(), other.entries()) == ([entry("a")], [])
    one.close()
    other.close()


def test_what_is_no_entry_is_left_alone(redis_process: RedisProcess) -> None:
    directory = RedisDirectory(settings(redis_process.url), "peers")
    directory.register(entry("a"))
    redis_process.door.sadd("lmcache-peer:default:nodes", "wrong", b"\xff\xfe")
    redis_process.door.set("lmcache-peer:default:node:wrong", "no entry")
    assert directory.entries() == [entry("a")]
    directory.close()


def test_a_directory_that_is_away_is_an_error_in_time(redis_process: RedisProcess) -> None:
    directory = RedisDirectory(settings(redis_process.url), "peers")
    redis_process.stop()
    began = time.monotonic()
    with pytest.raises(TierError, match="the directory does not answer"):
        directory.entries()
    assert time.monotonic() - began < 30
    directory.close()
    redis_process.start()


def test_nodes_find_each_other_and_go_on_while_the_directory_is_away(
    node: StartNode, redis_process: RedisProcess
) -> None:
    url = {"redis_url": redis_process.url}
    a = node("a", serve=url)
    a.store(1, 2, 3, 4)
    b = node("b", serve=url, tier=url)
    b.sees("a", 4)
    assert b.load(1) == [1]
    until(lambda: a.serving["registered"], "the status of a helper to say so")
    redis_process.stop()
    until(lambda: not a.serving["registered"], "its status to say that it is not")
    digests = a.serving["digests"]
    until(lambda: a.serving["digests"] > digests + 3, "some rounds of the helper")
    assert not a.serving["registered"]
    until(lambda: b.tier["adapter"]["directory_away"], "the status to say so")
    assert "does not answer" in b.tier["adapter"]["directory_error"]
    assert b.load(2) == [2], "the last known nodes are used"
    redis_process.start()
    until(lambda: not b.tier["adapter"]["directory_away"], "the directory to be back")
    until(lambda: b.tier["adapter"]["nodes"] == 1, "a to register again")
    b.sees("a", 4)
    assert b.load(3) == [3]


def test_a_node_that_was_restarted_is_another_and_one_that_is_gone_is_asked_nothing(
    node: StartNode, redis_process: RedisProcess
) -> None:
    url = {"redis_url": redis_process.url}
    a = node("a", serve=url)
    a.store(1, 2)
    b = node("b", tier=url)
    b.sees("a", 2)
    assert b.load(1) == [1]
    former = redis_process.door.get("lmcache-peer:default:node:a")
    os.kill(a.helper, signal.SIGKILL)
    until(lambda: redis_process.door.get("lmcache-peer:default:node:a") not in (None, former), "another boot")
    until(lambda: b.peer("a").get("usable") and b.load(2) == [2], "the new one is asked")
    a.server.stop()
    until(lambda: b.tier["adapter"]["nodes"] == 0, "nobody is left")
    assert b.load(5) == []


def test_an_address_that_is_not_loopback_is_asked_nothing_without_tls(redis_process: RedisProcess) -> None:
    from lmcache_core.tiers.contract import AdapterContext
    from lmcache_peer.adapter import PeerAdapter

    directory = RedisDirectory(settings(redis_process.url), "peers")
    directory.register(NodeEntry("far", 1, "192.0.2.1:7600", VERSION))
    directory.register(NodeEntry("odd", 1, "no address", VERSION))
    directory.register(NodeEntry("old", 1, "127.0.0.1:7600", VERSION + 1))
    with PeerAdapter(settings(redis_process.url), AdapterContext("peers")) as adapter:
        adapter.members.begin(time.monotonic() + 30)
        assert (adapter.status()["nodes"], adapter.status()["refused_nodes"]) == (0, 3)
    directory.close()


def test_nodes_of_one_authority_talk_by_tls_and_strangers_do_not(
    node: StartNode, redis_process: RedisProcess, tmp_path: Path
) -> None:
    ours, theirs = (authority(tmp_path / name) for name in ("ours", "theirs"))
    url = {"redis_url": redis_process.url}
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
