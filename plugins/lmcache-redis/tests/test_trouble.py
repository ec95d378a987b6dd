"""Refusals, rights, memory that is full, and secrets that stay secret."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem
from lmcache_redis.adapter import RedisAdapter
from lmcache_redis.settings import RedisSettings

from .conftest import RedisServer

Make = Callable[..., RedisAdapter]
SECRET = "s3cret/with@odd:words"
QUOTED = "s3cret%2Fwith%40odd%3Awords"


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def checked(settings: RedisSettings) -> list[Finding]:
    with RedisAdapter(settings, AdapterContext(tier="shared")) as adapter:
        return list(adapter.check(soon()))


def items(*numbers: int, nbytes: int = 1000) -> list[StoreItem]:
    return [StoreItem(bytes([n]) * 32, [memoryview(os.urandom(nbytes))]) for n in numbers]


def test_a_full_server_answers_full_and_is_not_retried(own_server: Callable[..., RedisServer], tier: Make) -> None:
    server = own_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    adapter = tier(port=server.port)
    outcomes = adapter.store(items(*range(60), nbytes=100_000), soon())
    assert {outcome.result for outcome in outcomes} == {Result.DONE, Result.FULL}
    full = next(outcome for outcome in outcomes if outcome.result is Result.FULL)
    assert "allkeys-lru" in full.error
    assert not full.retryable
    with server.door() as door:
        refused = door.info("errorstats")["errorstat_OOM"]
        count = (
            refused["count"] if isinstance(refused, dict) else int(refused.partition("=")[2])
        )  # as redis-py 5 has it
        assert count == sum(outcome.result is Result.FULL for outcome in outcomes)


def test_check_tells_of_limits_of_the_server_that_cut_large_objects_off(own_server: Callable[..., RedisServer]) -> None:
    server = own_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    settings = RedisSettings(port=server.port)
    assert all(each.ok for each in checked(settings))
    with server.door() as door:
        door.config_set("proto-max-bulk-len", 2 << 20)
        door.config_set("client-output-buffer-limit", "normal 1500000 0 0")
    told = [each.message for each in checked(settings) if not each.ok]
    assert len(told) == 2
    assert "proto-max-bulk-len is 2,097,152 bytes" in told[0]
    assert "client-output-buffer-limit of normal clients is 1,500,000 bytes" in told[1]
    with server.door() as door:  # a user without the right to ask: what is not known is no finding
        rights = "-@all +get +getrange +set +touch +unlink +strlen +scan +dbsize +info +ping +hello +select"
        door.execute_command("ACL", "SETUSER", "cache", "on", ">pw", "~lmcache:*", "+object|idletime", *rights.split())
    limited = RedisSettings(port=server.port, username="cache", password="pw")
    assert all(each.ok for each in checked(limited))


def test_a_lookup_makes_an_object_recently_used(server: RedisServer, tier: Make) -> None:
    adapter = tier(port=server.port)
    adapter.store(items(1, 2), soon())
    names = [b"lmcache:" + (bytes([n]) * 32).hex().encode() for n in (1, 2)]
    with server.door() as door:
        while min(door.object("idletime", name) for name in names) < 1:
            time.sleep(0.1)  # the server counts seconds
        assert adapter.exists([bytes([1]) * 32], soon()) == [True]
        assert door.object("idletime", names[0]) < door.object("idletime", names[1])


def test_what_was_evicted_between_lookup_and_load_is_a_miss_by_itself(server: RedisServer, tier: Make) -> None:
    adapter = tier(port=server.port)
    adapter.store(items(1, 2, 3), soon())
    keys = [bytes([n]) * 32 for n in (1, 2, 3)]
    assert adapter.exists(keys, soon()) == [True] * 3
    with server.door() as door:
        door.delete(b"lmcache:" + keys[1].hex().encode())
    loads = [LoadItem(key, [memoryview(bytearray(1000))]) for key in keys]
    assert [outcome.result for outcome in adapter.load(loads, soon())] == [Result.DONE, Result.MISS, Result.DONE]


def test_other_keys_in_the_database_are_none_of_ours(server: RedisServer, tier: Make) -> None:
    adapter = tier(port=server.port, key_prefix="a[*]?:")
    adapter.store(items(1), soon())
    with server.door() as door:
        door.set("lmcache:00", "x")
        door.set("a[*]?:not hex", "x")
        door.set("ab:00", "x")
        door.rpush("a[*]?:00ff", "a list")
    page = adapter.scan(None, soon())
    assert [(entry.key, entry.nbytes) for entry in page.entries] == [(bytes([1]) * 32, 1000)]
    loads = [LoadItem(b"\x00\xff", [memoryview(bytearray(10))])]
    (outcome,) = adapter.load(loads, soon())
    assert outcome.result is Result.MISS


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_node_of_a_cluster_asked_as_a_single_server_names_the_mode(
    own_server: Callable[..., RedisServer], tier: Make
) -> None:
    server = own_server("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with server.door() as door:
        door.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 10)
    adapter = tier(port=server.port)
    (outcome,) = adapter.store(items(1), soon(2))
    assert outcome.result is Result.FAILED
    assert "slots" in outcome.error


@pytest.fixture
def guarded(own_server: Callable[..., RedisServer]) -> RedisServer:
    server = own_server()
    with server.door() as door:
        rights = ["~lmcache:*", "resetchannels", "-@all", "+get", "+set", "+touch", "+unlink", "+ping", "+hello"]
        door.execute_command("ACL", "SETUSER", "cache", "on", f">{SECRET}", *rights)
    return server


def told(adapter: RedisAdapter) -> str:
    """Everything that an adapter says when it is used."""
    words = [repr(adapter), str(adapter.__dict__)]
    for call in (
        lambda: adapter.store(items(1), soon(5)),
        lambda: adapter.load([LoadItem(b"k", [memoryview(bytearray(10))])], soon(5)),
        lambda: adapter.exists([b"k"], soon(5)),
        lambda: adapter.delete([b"k"], soon(5)),
        lambda: adapter.scan(None, soon(5)),
        lambda: adapter.usage(),
    ):
        try:
            words.append(str(call()))
        except TierError as error:
            words += [str(error), repr(error), repr(error.__cause__)]
    return "\n".join(words)


@pytest.mark.parametrize("by", ["fields", "url"])
@pytest.mark.parametrize("right", [True, False])
def test_no_password_appears_in_errors_or_logs(
    guarded: RedisServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], by: str, right: bool
) -> None:
    secret, quoted = (SECRET, QUOTED) if right else (SECRET + "!", QUOTED + "!")
    fields: dict[str, object] = {"port": guarded.port, "username": "cache", "password": secret}
    if by == "url":
        fields = {"url": f"redis://cache:{quoted}@127.0.0.1:{guarded.port}/0"}
    settings = RedisSettings(**fields)
    with caplog.at_level(logging.DEBUG), RedisAdapter(settings, AdapterContext(tier="shared")) as adapter:
        said = told(adapter)
    said += caplog.text + repr(settings) + str(settings) + str(settings.model_dump()) + settings.model_dump_json()
    try:
        said += str(checked(settings))
    except TierError as error:
        said += str(error)
    said += "".join(capfd.readouterr())
    assert ("done" in said) is right
    assert right or "set username and password" in said
    assert SECRET not in said
    assert QUOTED not in said


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": f"redis//cache:{QUOTED}@h"},
        {"url": f"redis://cache:{QUOTED}@h:port"},
        {"url": f"redis://cache:{QUOTED}@h?pool=3"},
        {"url": f"http://cache:{QUOTED}@h"},
        {"url": f"redis://cache:{QUOTED}@h", "mode": "cluster", "db": 4},
        {"url": f"unix://cache:{QUOTED}@/tmp/x", "mode": "cluster"},
        {"password": SECRET, "mode": "sentinel"},
        {"password": SECRET, "nodes": ["h"]},
        {"nodes": [f"redis://cache:{QUOTED}@h:6379"], "mode": "cluster"},
        {"nodes": ["h:6379", f"cache:{QUOTED}@h:6379"], "mode": "sentinel"},
        {"nodes": f"cache:{QUOTED}@h:6379,h:1", "mode": "cluster"},
        {"host": f"redis://cache:{QUOTED}@h"},
        {"password": SECRET, "key_prefix": "{tag}"},
        {"password": SECRET, "tls_cert": "/x"},
        {"password": SECRET, "prot": 3},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_wrong_settings_are_refused_without_telling_the_secret(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as refused:
        RedisSettings(**wrong)
    for words in (str(refused.value), repr(refused.value)):
        assert SECRET not in words
        assert QUOTED not in words


@pytest.mark.parametrize("node", ["h:1", "redis-1.example.com:6379", "10.0.0.1:65535", "[::1]:7000", "under_score:1"])
def test_a_node_is_a_host_and_a_port(node: str) -> None:
    assert RedisSettings(mode="cluster", nodes=node).nodes == (node,)


@pytest.mark.parametrize(
    "node", ["h", "h:", ":1", "h:65536", "h:x", "a@h:1", "redis://h:1", "h/1:1", "::1:7000", " h:1"]
)
def test_what_is_no_host_and_port_is_no_node(node: str) -> None:
    with pytest.raises(ValidationError, match="node 1 of 1 is not HOST:PORT"):
        RedisSettings(mode="cluster", nodes=[node])


def test_a_url_and_fields_say_the_same() -> None:
    url = RedisSettings(url=f"rediss://cache:{QUOTED}@[::1]:7000/3")
    assert (url.server, url.database, url.encrypted, url.credentials) == (("::1", 7000), 3, True, ("cache", SECRET))
    fields = RedisSettings(host="::1", port=7000, db=3, tls=True, username="cache", password=SECRET)
    assert (fields.server, fields.database, fields.encrypted, fields.credentials) == (
        url.server,
        url.database,
        url.encrypted,
        url.credentials,
    )
    unix = RedisSettings(url=f"unix://:{QUOTED}@/run/redis.sock?db=2")
    assert (unix.socket_path, unix.database, unix.credentials) == ("/run/redis.sock", 2, (None, SECRET))


def test_rights_that_are_missing_are_named(guarded: RedisServer, tier: Make) -> None:
    with guarded.door() as door:
        door.execute_command("ACL", "SETUSER", "cache", "-get", "-touch")
    adapter = tier(port=guarded.port, username="cache", password=SECRET)
    assert adapter.store(items(1), soon())[0].result is Result.DONE
    (outcome,) = adapter.load([LoadItem(bytes([1]) * 32, [memoryview(bytearray(1000))])], soon())
    assert "NOPERM" in outcome.error
    assert "+get" in outcome.error
    assert not outcome.retryable
    with pytest.raises(TierError, match=r"\+touch"):
        adapter.exists([bytes([1]) * 32], soon())


def test_check_reads_the_memory_policy(own_server: Callable[..., RedisServer]) -> None:
    server = own_server()
    settings = RedisSettings(port=server.port)
    with server.door() as door:
        assert [finding.ok for finding in checked(settings)] == [True, False]
        door.config_set("maxmemory", 100 << 20)
        finding = checked(settings)[1]
        assert not finding.ok
        assert "allkeys-lru" in finding.cure
        door.config_set("maxmemory-policy", "allkeys-lru")
        assert [finding.ok for finding in checked(settings)] == [True, True]
        assert door.dbsize() == 0
    with pytest.raises(TierError):
        checked(RedisSettings(port=1))


def test_a_server_that_is_killed_and_back_is_used_again_at_once(
    own_server: Callable[..., RedisServer], tier: Make
) -> None:
    server = own_server()
    adapter = tier(port=server.port)
    assert adapter.store(items(1), soon())[0].result is Result.DONE
    server.kill()
    (outcome,) = adapter.store(items(1), soon(5))
    assert outcome.result is Result.FAILED
    assert outcome.retryable
    with pytest.raises(TierError, match="cannot look up"):
        adapter.exists([b"k"], soon(5))
    server.start()
    assert adapter.store(items(1), soon())[0].result is Result.DONE


def test_idle_connections_are_closed_with_the_adapter(server: RedisServer, tier: Make) -> None:
    with server.door() as door:

        def connected() -> set[str]:
            return {each["id"] for each in door.client_list()}

        before = connected()
        adapter = tier(port=server.port)
        adapter.store(items(1), soon())
        ours = connected() - before
        assert len(ours) == 1
        adapter.close()
        deadline = soon()
        while ours & connected():
            assert time.monotonic() < deadline


def test_a_connection_in_use_when_the_adapter_closes_is_closed_by_its_user(
    own_server: Callable[..., RedisServer],
) -> None:
    server = own_server()
    adapter = RedisAdapter(RedisSettings(port=server.port), AdapterContext(tier="shared"))
    assert adapter.store(items(1), soon())[0].result is Result.DONE
    (pool,) = adapter.client.pools.values()  # held here: the collector must not be the one that closes
    with server.door() as door:
        ours = {each["id"] for each in door.client_list()} - {str(door.client_id())}
        door.client_pause(60_000, all=False)
        told: list[Any] = []
        busy = threading.Thread(target=lambda: told.extend(adapter.store(items(2), soon())))
        busy.start()
        try:
            while not any(each["id"] in ours and each["flags"] == "b" for each in door.client_list()):
                assert busy.is_alive(), "the store was not held up"
            adapter.close()
        finally:
            door.client_unpause()
            busy.join()
        assert told[0].result is Result.DONE, "what was under way ends well"
        deadline = soon(20)
        while ours & {each["id"] for each in door.client_list()}:
            assert time.monotonic() < deadline, f"{pool} keeps the connection"
