"""Tiers that come, change and go under a running server, and the commands that walk them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import PluginError, SettingsError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

from ..conftest import Node

OBJECT_BYTES = 65536


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "objects").rglob("*") if path.is_file()]


def tier(client: Client, name: str) -> Json:
    return next(each for each in client.tiers_list() if each["name"] == name)


def fill(node: Node, client: Client, first: int, count: int) -> list[bytes]:
    keys = [node.key(i) for i in range(first, first + count)]
    sources = [node.payload(i) for i in range(first, first + count)]
    assert client.store(keys, sources, namespace=node.namespace).stored == count
    return keys


def read_back(node: Node, client: Client, keys: list[bytes]) -> int:
    found = client.lookup(keys, namespace=node.namespace, hold=True, wait_s=30)
    into = [bytearray(OBJECT_BYTES) for _ in keys]
    result = client.retrieve(keys, into, namespace=node.namespace, promise=found.promise)
    for at in range(result.hits):
        assert bytes(into[at]) == node.payload(int(keys[at].lstrip(b"\0") or b"0"))
    return int(result.hits)


def command(node: Node, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LMCACHE_CORE_NAME": node.name, "LMCACHE_CORE_RUNTIME_DIR": str(node.run), **(env or {})}
    argv = [sys.executable, "-m", "lmcache_core.cli.main", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environ, timeout=120)


def tiers(node: Node, action: str, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return command(node, "tiers", action, "--runtime-dir", str(node.run), *words, env=env)


def disk(folder: Path, name: str = "disk") -> list[str]:
    return [f"--l2.{name}.type", "fs", f"--l2.{name}.path", str(folder)]


# --- at run time ----------------------------------------------------------------------------------------------


def test_a_server_without_tiers_gets_one_and_uses_it_at_once(node: Node, tmp_path: Path) -> None:
    node.serve()
    client = node.client()
    assert client.tiers_list() == []
    client.tiers_add("disk", {"type": "fs", "path": str(tmp_path / "a")})
    keys = fill(node, client, 0, 20)
    until(lambda: len(files(tmp_path / "a")) == 20, "the files")
    client.clear(node.namespace)
    assert read_back(node, client, keys) == 20
    assert [each["name"] for each in client.status()["tiers"]["tiers"]] == ["disk"]


def test_tiers_change_under_load_and_every_byte_that_is_read_is_right(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"))
    client = node.client()
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0]

    def load() -> None:
        with node.client() as own:
            try:
                while not stop.is_set():
                    keys = fill(node, own, 40 * (rounds[0] % 20), 40)
                    read_back(node, own, keys)
                    own.clear(node.namespace)
                    read_back(node, own, keys)
                    rounds[0] += 1
            except BaseException as error:  # noqa: BLE001  # whatever it is, the test's own thread tells
                failures.append(error)

    worker = threading.Thread(target=load)
    worker.start()
    try:
        for turn in range(4):
            seen = rounds[0]
            client.tiers_add("extra", {"type": "fs", "path": str(tmp_path / "b")})
            client.tiers_reconfigure("disk", {"capacity_bytes": (turn + 1) << 20})
            client.tiers_reconfigure("extra", {"connections": 2 + turn})  # a new adapter
            client.tiers_drain("extra")
            until(lambda seen=seen: failures or rounds[0] > seen, "the worker")
            client.tiers_remove("extra")
    finally:
        stop.set()
        worker.join()
    assert not failures, failures
    assert [each["name"] for each in client.tiers_list()] == ["disk"]
    assert tier(client, "disk")["capacity_bytes"] == 4 << 20
    until(lambda: client.status()["tiers"]["stores"]["in_flight_bytes"] == 0, "the stores")
    assert client.status()["counters"].get("internal_errors", 0) == 0
    assert client.status()["tiers"]["faults"] == 0


def test_a_drained_tier_is_read_and_no_longer_stored_to_until_it_is_reconfigured(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"))
    client = node.client()
    keys = fill(node, client, 0, 5)
    until(lambda: len(files(tmp_path / "a")) == 5, "the files")
    client.tiers_drain("disk")
    fill(node, client, 5, 5)
    until(lambda: client.status()["tiers"]["stores"]["arrived"] == 0, "the plan")
    assert len(files(tmp_path / "a")) == 5
    client.clear(node.namespace)
    assert read_back(node, client, keys) == 5
    client.tiers_reconfigure("disk", {"deadline_s": 20.0})
    fill(node, client, 10, 5)
    until(lambda: len(files(tmp_path / "a")) == 10, "the files after")


def test_a_smaller_capacity_is_kept_at_once(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"))
    client = node.client()
    fill(node, client, 0, 100)
    until(lambda: tier(client, "disk")["objects"] == 100, "the stores")
    client.tiers_reconfigure("disk", {}, {"capacity_bytes": "2MiB"})
    until(lambda: tier(client, "disk")["bytes_used"] <= 2 << 20, "the evictions")
    until(lambda: sum(path.stat().st_size for path in files(tmp_path / "a")) <= 2 << 20, "the medium")


def test_what_waits_for_a_tier_that_is_replaced_goes_to_its_successor(node: Node, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the directory should be")
    node.serve(*disk(blocked))
    client = node.client()
    fill(node, client, 0, 10)
    until(lambda: tier(client, "disk")["last_error"], "the failure")
    fill(node, client, 10, 10)
    client.tiers_reconfigure("disk", {"path": str(tmp_path / "good")})
    fill(node, client, 20, 1)

    def settled() -> int:
        counts = client.status()["tiers"]["stores"]["counts"]
        return int(counts.get("stored", 0) + counts.get("lost_tier_error", 0))

    until(lambda: settled() == 21, "every object's end")
    assert len(files(tmp_path / "good")) == client.status()["tiers"]["stores"]["counts"]["stored"] >= 1


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"type": "fs"}, SettingsError, "path"),
        ({"type": "fs", "path": "/x", "pth": 1}, SettingsError, "pth"),
        ({"type": "sf", "path": "/x"}, PluginError, "sf"),
        ({"type": "fs", "path": "relative"}, SettingsError, "absolute"),
    ],
)
def test_settings_are_refused_as_at_the_start(
    shared_node: Node, settings: dict[str, object], error: type[Exception], words: str
) -> None:
    client = shared_node.client()
    with pytest.raises(error, match=words):
        client.tiers_add("disk", settings)
    assert client.tiers_list() == []
    client.noop()


def test_misuse_of_tiers_is_refused_with_the_names_of_the_tiers(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"))
    client = node.client()
    with pytest.raises(UsageError, match="tier 'disk' already exists"):
        client.tiers_add("disk", {"type": "fs", "path": str(tmp_path / "b")})
    for call in (client.tiers_drain, client.tiers_remove, lambda name: client.tiers_reconfigure(name, {})):
        with pytest.raises(UsageError, match=r"no tier is named 'nowhere'.*disk"):
            call("nowhere")
    with pytest.raises(SettingsError, match="not a tier name"):
        client.tiers_add("Not-A-Name", {"type": "fs"})


def test_the_command_adds_lists_and_removes_and_shows_no_secret(node: Node, tmp_path: Path) -> None:
    node.serve("--zmq.ipc", "true")
    done = tiers(node, "add", "disk", "--set", "type=fs", "--set", f"path={tmp_path / 'a'}")
    assert done.returncode == 0, done.stderr
    listed = json.loads(tiers(node, "list", "--json").stdout)
    assert [(each["name"], each["settings"]["type"]) for each in listed] == [("disk", "fs")]
    assert "disk" in tiers(node, "list").stdout
    # what is wrong is one line, and it never repeats a value that may be a secret
    done = tiers(node, "add", "more", env={"LMCACHE_CORE_L2__MORE__TYPE": "fs", "LMCACHE_CORE_L2__MORE__TOKEN": "hush"})
    assert done.returncode == 2
    assert "token" in done.stderr
    assert "hush" not in done.stdout + done.stderr
    assert tiers(node, "remove", "disk", "--yes").returncode == 0
    assert json.loads(tiers(node, "list", "--json").stdout) == []


def test_the_command_takes_a_tier_from_every_source_of_settings(node: Node, tmp_path: Path) -> None:
    node.serve()
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/l2.disk.path").write_text(f"{tmp_path / 'a'}\n")
    (tmp_path / "server.env").write_text("LMCACHE_CORE_L2__DISK__CAPACITY_BYTES=1GiB\n")
    (tmp_path / "lmcache.toml").write_text('[l2.disk]\ntype = "fs"\npath = "/of/the/file"\nconnections = 3\n')
    words = ["--config", str(tmp_path / "lmcache.toml"), "--env-file", str(tmp_path / "server.env")]
    env = {"LMCACHE_CORE_SECRETS_DIR": str(tmp_path / "secrets")}
    done = tiers(node, "add", "disk", *words, "--set", "deadline_s=7", env=env)
    assert done.returncode == 0, done.stderr
    (listed,) = json.loads(tiers(node, "list", "--json").stdout)
    settings = {
        name: listed["settings"][name] for name in ("type", "path", "capacity_bytes", "connections", "deadline_s")
    }
    assert list(settings.values()) == ["fs", str(tmp_path / "a"), 1 << 30, 3, 7.0]


def test_only_the_lifeline_may_change_tiers(node: Node, tmp_path: Path) -> None:
    node.serve("--zmq.ipc", "true")
    with node.client(address=f"ipc://{node.run / node.name / 'zmq'}", maps_pool=False) as remote:
        with pytest.raises(UsageError, match="over the lifeline"):
            remote.tiers_add("disk", {"type": "fs", "path": str(tmp_path / "a")})
        assert remote.tiers_list() == []


# --- servers that share a medium ------------------------------------------------------------------------------


def test_two_servers_on_one_directory_count_the_same_and_one_of_them_leads(node: Node, tmp_path: Path) -> None:
    from lmcache_core.client.client import Client

    often = ["--l2.disk.rescan_s", "0.05"]
    node.serve(*disk(tmp_path / "a"), *often)
    one = node.client()
    until(lambda: tier(one, "disk")["scan"] == "done", "the first scan")
    first_name, node.name = node.name, node.name + "b"
    node.serve(*disk(tmp_path / "a"), *often)
    with Client.connect(node.name, runtime_dir=node.run) as two:
        fill(node, one, 0, 30)
        fill(node, two, 100, 20)
        until(lambda: tier(one, "disk")["objects"] == tier(two, "disk")["objects"] == 50, "both to count")
        assert [tier(each, "disk")["leads"] for each in (one, two)] == [True, False]
        for path in files(tmp_path / "a")[:10]:
            path.unlink()
        until(lambda: tier(one, "disk")["objects"] == tier(two, "disk")["objects"] == 40, "both to forget")
        one.tiers_remove("disk")
        until(lambda: tier(two, "disk")["leads"], "the other to lead")
    node.name = first_name


# --- lookups --------------------------------------------------------------------------------------------------


def test_a_window_asks_for_the_last_keys_of_the_longest_run_only(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"))
    client = node.client()
    keys = fill(node, client, 0, 20)
    until(lambda: len(files(tmp_path / "a")) == 20, "the files")
    client.clear(node.namespace)
    nowhere = [node.key("nowhere")]
    found = client.lookup([*keys, *nowhere], namespace=node.namespace, window=4, wait_s=30)
    assert found.hits == 20
    assert [status is Status.HIT or status is Status.GRANTED for status in found.statuses] == (
        [False] * 16 + [True] * 4 + [False]
    )
    assert client.status()["counters"]["loaded"] == 4
    sparse = client.lookup([keys[0], *nowhere, keys[5]], namespace=node.namespace, prefix=False, wait_s=30)
    assert sparse.hits == 2
    assert sparse.statuses[1] is Status.MISS


def test_a_window_over_many_pages_is_found_from_the_end(shared_node: Node) -> None:
    node, client = shared_node, shared_node.client()
    fill(node, client, 0, 8)
    fill(node, client, 1018, 12)  # across the border of two pages
    keys = [node.key(i) for i in range(8)] + [node.key(f"no {i}") for i in range(1010)]
    keys += [node.key(i) for i in range(1018, 1030)] + [node.key(f"no {i}") for i in range(1500)]
    assert client.lookup(keys, namespace=node.namespace, window=12).hits == 1030
    assert client.lookup(keys, namespace=node.namespace, window=13).hits == 8


def test_what_a_lookup_finds_can_be_pinned_with_it(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"))
    client = node.client()
    keys = fill(node, client, 0, 10)
    until(lambda: len(files(tmp_path / "a")) == 10, "the files")
    client.clear(node.namespace)
    assert client.lookup(keys, namespace=node.namespace, wait_s=30, pin_s=600).hits == 10
    for first in range(1000, 2000, 50):  # four times the pool

        def settled() -> bool:
            stores = client.status()["tiers"]["stores"]
            return not stores["arrived"] and not any(stores["dirty"].values()) and not stores["in_flight_bytes"]

        until(settled, "the disk to keep up")
        fill(node, client, first, 50)
    assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == 10
    assert client.unpin(keys, namespace=node.namespace) == [Status.GRANTED] * 10


def test_a_lookup_names_its_own_policy(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"), "--l1.eviction", "noop")  # else all of it stays while there is room
    client = node.client()
    keys = fill(node, client, 0, 4)
    until(lambda: len(files(tmp_path / "a")) == 4, "the files")
    client.clear(node.namespace)
    for policy, stays, reads in (("", 0, 4), ("retain", 4, 8)):
        assert client.lookup(keys, namespace=node.namespace, wait_s=30, policy=policy).hits == 4
        assert client.retrieve(keys, [bytearray(OBJECT_BYTES) for _ in keys], namespace=node.namespace).hits == 4
        until(lambda: client.status()["counters"].get("read", 0) >= reads, "the server to hear of it")  # noqa: B023
        assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == stays
    with pytest.raises(UsageError, match="prefetch policy 'nonsense'"):
        client.lookup(keys, namespace=node.namespace, policy="nonsense")


# --- commands that walk a tier --------------------------------------------------------------------------------


@pytest.fixture
def config(node: Node, tmp_path: Path) -> Path:
    path = tmp_path / "lmcache.toml"
    path.write_text(
        f'name = "{node.name}"\nruntime_dir = "{node.run}"\n'
        f'[l2.disk]\ntype = "fs"\npath = "{tmp_path / "a"}"\n[l2.other]\ntype = "fs"\npath = "{tmp_path / "b"}"\n'
    )
    return path


def filled(node: Node, tmp_path: Path, count: int) -> list[bytes]:
    """A directory that a server has filled and left."""
    server = node.serve(*disk(tmp_path / "a"))
    with node.client() as client:
        keys = fill(node, client, 0, count)
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert len(files(tmp_path / "a")) == count
    return keys


def test_verify_finds_what_is_damaged_and_takes_it_away(node: Node, tmp_path: Path, config: Path) -> None:
    keys = filled(node, tmp_path, 12)
    for index, damage in ((3, "flip"), (7, "cut")):
        victim = next(path for path in files(tmp_path / "a") if keys[index].hex() in path.name)
        content = bytearray(victim.read_bytes())
        content[5000] ^= 1
        victim.write_bytes(content if damage == "flip" else content[:-3000])
    done = command(node, "verify", "--tier", "disk", "--config", str(config), "--json")
    figures = json.loads(done.stdout)
    assert (done.returncode, figures["whole"], figures["damaged"]) == (1, 10, 2)
    left = len(files(tmp_path / "a"))
    done = command(node, "verify", "--tier", "disk", "--config", str(config), "--json", "--delete")
    assert done.returncode == 0, done.stderr
    assert left >= len(files(tmp_path / "a")) == 10
    assert (
        json.loads(command(node, "verify", "--tier", "disk", "--config", str(config), "--json").stdout)["whole"] == 10
    )


def test_verify_takes_a_large_damaged_object_away_among_many_small_ones(
    node: Node, tmp_path: Path, config: Path
) -> None:
    small = Namespace("small", Layout("uint8", (4096,)))
    server = node.serve(*disk(tmp_path / "a"))
    with node.client() as client:
        large = fill(node, client, 0, 2)
        many = [at.to_bytes(32, "big") for at in range(30)]
        assert client.store(many, [bytes(4096)] * 30, namespace=small).stored == 30
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    victim = next(path for path in files(tmp_path / "a") if large[0].hex() in path.name)
    content = bytearray(victim.read_bytes())
    content[5000] ^= 1
    victim.write_bytes(content)
    done = command(node, "verify", "--tier", "disk", "--config", str(config), "--json", "--delete")
    assert done.returncode == 0, done.stderr
    assert not victim.exists()


def test_copy_fills_another_tier_and_a_second_run_copies_only_the_rest(
    node: Node, tmp_path: Path, config: Path
) -> None:
    keys = filled(node, tmp_path, 15)
    words = ("copy", "--from", "disk", "--to", "other", "--config", str(config), "--json")
    figures = json.loads(command(node, *words).stdout)
    assert (figures["copied"], figures["there_already"]) == (15, 0)
    for path in files(tmp_path / "b")[:5]:
        path.unlink()
    figures = json.loads(command(node, *words).stdout)
    assert (figures["copied"], figures["there_already"]) == (5, 10)
    node.serve(*disk(tmp_path / "b"))
    assert read_back(node, node.client(), keys) == 15


def test_copy_encodes_anew_where_the_other_tier_has_another_codec_chain(
    node: Node, tmp_path: Path, config: Path
) -> None:
    pytest.importorskip("lmcache_compress")
    keys = filled(node, tmp_path, 6)
    zstd = ["--l2.other.serde", "zstd"]
    done = command(node, "copy", "--from", "disk", "--to", "other", "--config", str(config), *zstd)
    assert done.returncode == 0, done.stderr
    sizes = [sum(path.stat().st_size for path in files(tmp_path / name)) for name in ("a", "b")]
    assert sizes[1] < sizes[0] / 2
    node.serve(*disk(tmp_path / "b", "other"), *zstd)
    assert read_back(node, node.client(), keys) == 6


def test_an_interrupted_verify_goes_on_from_its_cursor(node: Node, tmp_path: Path, config: Path) -> None:
    filled(node, tmp_path, 30)
    cursor = tmp_path / "cursor"
    shards = sorted(path.name for path in (tmp_path / "a" / "objects").iterdir())
    cursor.write_text(json.dumps({"tier": "disk", "cursor": shards[9]}))
    words = ("verify", "--tier", "disk", "--config", str(config), "--json", "--cursor", str(cursor))
    after = sum(len(list((tmp_path / "a" / "objects" / shard).iterdir())) for shard in shards[10:])
    assert json.loads(command(node, *words).stdout)["whole"] == after
    assert not cursor.exists()
    cursor.write_text(json.dumps({"tier": "other", "cursor": "000"}))
    done = command(node, *words)
    assert done.returncode == 2
    assert "other" in done.stderr


def test_warm_loads_ahead_of_requests_and_what_it_loads_stays(node: Node, tmp_path: Path, config: Path) -> None:
    keys = filled(node, tmp_path, 20)
    node.serve(*disk(tmp_path / "a"), *disk(tmp_path / "b", "other"))
    done = command(node, "warm", "--tier", "disk", "--config", str(config), "--limit-bytes", "640KiB", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loaded"] == 10
    done = command(node, "warm", "--tier", "disk", "--config", str(config), "--json")
    figures = json.loads(done.stdout)
    assert (figures["loaded"], figures["there_already"]) == (10, 10)
    client = node.client()
    for _ in range(2):  # the first reader does not use them up
        assert client.lookup(keys, namespace=node.namespace, tiers=[]).hits == 20
        assert read_back(node, client, keys) == 20
    other = command(node, "warm", "--tier", "disk", "--config", str(config), "--namespace", "abcd", "--json")
    assert json.loads(other.stdout)["objects"] == 0


def test_without_its_tier_a_key_is_missed_for_the_reason_that_the_pool_knows(node: Node, tmp_path: Path) -> None:
    node.serve(*disk(tmp_path / "a"))
    client = node.client()
    keys = fill(node, client, 0, 3)
    until(lambda: len(files(tmp_path / "a")) == 3, "the files")
    client.clear(node.namespace)
    client.tiers_remove("disk")
    found = client.lookup(keys, namespace=node.namespace, wait_s=5)
    assert found.hits == 0
    assert found.reasons[0] is Reason.CLEARED
