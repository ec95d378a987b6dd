"""A server's own table: made at its start, filled by what its workers read, and never older than L1."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from lmcache_l0 import ServedCache, SharedCache, engine
from lmcache_l0.engine import L0Engine
from lmcache_l0.errors import UsageError, ValueTooLargeError
from lmcache_l0.heat import COUNTED_KEYS_MAX, WINDOW_S, Heat
from lmcache_l0.records import l0_key, l1_key, prefix_of

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import SettingsError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until


@pytest.fixture
def serve(start, folder):
    """Start servers of one name; the table lies in `folder`."""
    name = f"l0-{uuid4().hex[:10]}"
    own = {"enabled": True, "hash_slots": 100, "promote_after": 1, "folder": str(folder)}

    def serve(l1_bytes: int = 32 << 20, **l0) -> Server:
        return start(name=name, l1={"size_bytes": l1_bytes}, l0=own | l0)

    return serve


@pytest.fixture
def connect():
    """Clients that ask the server for every hit, so that it hears of each at once."""
    with contextlib.ExitStack() as clients:
        yield lambda server, use_index=False: clients.enter_context(server.connect(use_index=use_index))


def figures(client) -> dict:
    return client.status()["companions"]["l0"]


def heat_up(cache: ServedCache, client, key: str, times: int = 1) -> None:
    """Read it in L1 so often, and wait until it stands in L0."""
    table = cache.l0
    for _ in range(times):
        assert cache.get(key) is not None
    until(lambda: l0_key(prefix_of(cache.namespace.id), key.encode()) in (table or cache.l0))


def test_what_is_read_goes_up_and_is_found_by_every_worker_also_without_the_server(serve, connect):
    server = serve()
    one, other = connect(server), connect(server)
    cache, reader = ServedCache(one, "f"), ServedCache(other, "f")
    assert cache.get("k") is None
    assert cache.set("k", b"value") is Status.STORED
    assert cache.set_numpy("e", np.arange(4, dtype=np.float32)) is Status.STORED
    assert len(cache.l0) == 0
    heat_up(cache, one, "k")
    heat_up(cache, one, "e")
    assert reader.get("none") is None  # attaches
    before = reader.l0.hits
    assert reader.get("k") == b"value"
    view = reader.get_numpy("e", shape=(2, 2), dtype=np.float32)
    assert view.tolist() == [[0, 1], [2, 3]]
    assert view.valid()
    assert reader.l0.hits == before + 2
    shown = figures(one)
    assert (shown["counts"]["promoted"], shown["keys"], shown["enabled"], shown["stuck"]) == (2, 2, True, 0)


def test_uses_of_all_workers_are_counted_together_also_those_without_a_call(serve, connect):
    server = serve(promote_after=2)
    one, other = connect(server, use_index=True), connect(server, use_index=True)
    a, b = ServedCache(one, "f"), ServedCache(other, "f")
    a.set("k", b"v")
    assert a.get("k") == b"v"
    until(lambda: figures(one)["counted_keys"] == 1)
    assert figures(one)["counts"]["promoted"] == 0
    calls = other.status()["counters"]["read"]
    assert b.get("k") == b"v"
    until(lambda: figures(one)["counts"]["promoted"] == 1)
    assert calls >= 1


def test_a_clear_takes_it_out_before_it_answers_and_so_does_a_new_value(serve, connect):
    server = serve()
    client = connect(server)
    cache, other = ServedCache(client, "f"), ServedCache(client, "g")
    for each in (cache, other):
        each.set("k", b"old")
        each.get("k")
        heat_up(each, client, "k")
    assert cache.clear() == 1
    assert len(cache.l0) == 1
    assert cache.get("k") is None
    assert other.get("k") == b"old"
    cache.l0.set(l0_key(cache.prefix, b"k"), b"older")  # as if a clear had left it
    assert cache.set("k", b"new") is Status.STORED
    assert cache.get("k") == b"new"
    assert cache.set("k", b"third") is Status.EXISTS
    assert cache.get("k") == b"new"
    client.clear()
    assert len(cache.l0) == 0


def test_what_l1_evicts_leaves_l0_and_what_is_read_in_l0_is_not_evicted(serve, connect, monkeypatch):
    monkeypatch.setattr(engine, "WALK_S", 0.02)
    monkeypatch.setattr(engine, "COOLING_WALKS", 4)
    server = serve(l1_bytes=4 << 20, hash_slots=1000)
    client = connect(server)
    cache = ServedCache(client, "f")
    for key in ("hot", "cold"):
        cache.set(key, key.encode())
        cache.get(key)
        heat_up(cache, client, key)
    number = 0
    cold = l0_key(cache.prefix, b"cold")
    while cold in cache.l0:
        for _ in range(200):
            assert cache.get("hot") == b"hot"
        assert cache.set(f"{number}", b"x") is Status.STORED
        number += 1
        time.sleep(0.001)  # the server's walk has its turn
        assert number < 20_000
    assert l0_key(cache.prefix, b"hot") in cache.l0
    assert client.lookup([l1_key(b"hot")], namespace=cache.namespace).hits == 1
    assert cache.get("cold") is None


def test_values_over_the_table_s_size_and_other_objects_stay_in_l1(serve, connect):
    server = serve(max_value_size=64)
    client = connect(server)
    cache = ServedCache(client, "f", max_value_size=1000)
    chunks = Namespace("model", Layout("uint8", (64,)))
    client.store([bytes(32)], [b"c" * 64], namespace=chunks)
    cache.set("large", b"x" * 65)
    cache.set("fits", b"x" * 64)
    cache.set("empty", b"")
    for _ in range(3):
        assert cache.get("large") == b"x" * 65
        into = bytearray(64)
        assert client.retrieve([bytes(32)], [into], namespace=chunks).hits
    for key in ("fits", "empty"):
        cache.get(key)
        heat_up(cache, client, key)
    assert cache.get("empty") == b""
    until(lambda: figures(client)["counts"]["too_large"] >= 1)
    assert len(cache.l0) == 2


def test_the_least_read_come_down_when_it_fills_and_are_still_in_l1(serve, connect):
    server = serve(hash_slots=40, demote_at=0.5, demote_to=0.25)
    client = connect(server)
    cache = ServedCache(client, "f")
    cache.set("hot", b"hot")
    cache.get("hot")
    heat_up(cache, client, "hot")
    number = 0
    while figures(client)["counts"]["demoted"] < 10:
        for _ in range(2000):
            assert cache.get("hot") == b"hot"
        cache.set(f"{number}", b"%d" % number)
        assert cache.get(f"{number}") == b"%d" % number
        assert len(cache.l0) <= 21
        number += 1
        assert number < 2000
    assert l0_key(cache.prefix, b"hot") in cache.l0
    assert cache.get_many([f"{i}" for i in range(number)]) == [b"%d" % i for i in range(number)]


def test_what_somebody_else_has_taken_out_first_is_counted_nowhere(serve, connect, monkeypatch):
    """The counts are metrics, which only grow."""
    server = serve(hash_slots=40, demote_at=0.5, demote_to=0.25)
    client = connect(server)
    cache = ServedCache(client, "f")
    cache.set("first", b"first")
    heat_up(cache, client, "first")
    scan, gone = SharedCache.scan, []

    def scanned(table, *wanted):
        cursor, rows = scan(table, *wanted)
        unread = [key for key, _, hits in rows if not hits]
        if unread and cache.l0.delete(unread[0]):  # as another process may
            gone.append(unread[0])
        return cursor, rows

    monkeypatch.setattr(SharedCache, "scan", scanned)
    number = 0
    while not gone or figures(client)["counts"]["demoted"] < 10:
        cache.set(f"{number}", b"%d" % number)
        assert cache.get(f"{number}") == b"%d" % number
        assert figures(client)["counts"]["taken_out"] == 0
        number += 1
        assert number < 2000


def test_the_server_rehashes_its_table_a_little_at_a_time(serve, connect, folder):
    client = connect(serve(hash_slots=40, max_value_size=64))
    caches = [ServedCache(client, name, max_value_size=64) for name in "ab"]
    for key in range(12):
        for cache in caches:
            assert cache.set(f"{key}", b"%d" % key) is Status.STORED
            heat_up(cache, client, f"{key}")
    caches[0].clear()

    def rehashed() -> bool:
        """Whether a copy of it has nothing to move."""
        copy = folder / "copy.l0"
        shutil.copyfile(caches[1].l0.path, copy)
        copy.chmod(0o600)
        with SharedCache(copy, create=False) as table:
            return table.rehash() == 0 and len(table) == 12

    until(rehashed)
    assert caches[1].get_many([f"{key}" for key in range(12)]) == [b"%d" % key for key in range(12)]
    assert caches[1].l0.stats.locked == 0


def test_the_switch_is_the_server_s_and_turns_it_off_for_every_process(serve, connect, tmp_path):
    server = serve(enabled=False)
    client = connect(server)
    cache = ServedCache(client, "f")
    cache.set("k", b"old")
    assert [cache.get("k"), cache.get("k"), len(cache.l0)] == [b"old", b"old", 0]
    assert client.operate("l0", "switch", enabled=True) == {"enabled": True}
    cache.get("k")
    heat_up(cache, client, "k")
    line = [
        sys.executable,
        "-m",
        "lmcache_core.cli.main",
        "l0",
        "set",
        f"server:{server.parts.settings.name}",
        "disabled",
    ]
    done = subprocess.run(
        line,
        env={**os.environ, "LMCACHE_CORE_RUNTIME_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, "disabled" in done.stdout) == (0, True), done.stderr
    assert not cache.l0.enabled
    assert cache.l0.get(l0_key(cache.prefix, b"k")) is None
    cache.clear()
    assert cache.set("k", b"new") is Status.STORED
    client.operate("l0", "switch", enabled=True)
    assert cache.get("k") == b"new"
    for operation, arguments in (("switch", {}), ("switch", {"enabled": 1}), ("explode", {"enabled": True})):
        with pytest.raises(UsageError, match=r"switch\(enabled\)"):
            client.operate("l0", operation, **arguments)


def test_a_next_server_takes_the_table_over_empty_and_one_of_other_sizes_makes_its_own(serve, connect, folder):
    former = serve()
    client = connect(former)
    cache = ServedCache(client, "f")
    cache.set("k", b"v")
    cache.get("k")
    heat_up(cache, client, "k")
    path, left, held = cache.l0.path, folder / "left", SharedCache(cache.l0.path)

    def leave(server: Server) -> None:
        """End it, and leave its table as a kill would."""
        os.link(path, left)
        server.stop()
        assert not Path(path).exists()  # an orderly end leaves nothing
        assert held.get(l0_key(cache.prefix, b"k")) is None
        held.enabled = True
        left.rename(path)

    leave(former)
    assert held.get(l0_key(cache.prefix, b"k")) == b"v"
    second = serve()
    assert [held.enabled, len(held)] == [True, 0]
    assert figures(connect(second))["keys"] == 0
    leave(second)
    third = serve(hash_slots=200)
    assert figures(connect(third))["hash_slots"] == 200
    assert not held.enabled
    assert held.table_id != SharedCache(path).table_id
    held.close()


def test_a_table_that_a_living_server_keeps_is_refused_to_another(serve, folder, tmp_path):
    server = serve()
    settings = make_settings(
        name=server.parts.settings.name,
        runtime_dir=str(tmp_path / "elsewhere"),
        state_dir=str(tmp_path / "elsewhere"),
        l1={"size_bytes": 32 << 20, "backing": "memfd"},
        l0={"folder": str(folder), "hash_slots": 100},
    )
    with pytest.raises(Exception, match="is kept by another server of this name"):
        Server(settings)


def test_a_client_follows_the_server_s_table(serve, connect, tmp_path):
    server = serve()
    with Client.connect(server.parts.settings.name, runtime_dir=tmp_path / "run", use_index=False) as client:
        cache = ServedCache(client, "f")
        cache.set("k", b"v")
        assert cache.get("k") == b"v"
        until(lambda: cache.get("k") is not None and len(cache.l0) == 1)
        first = cache.l0.table_id
        server.stop()
        server = serve(hash_slots=300)
        cache.set("k", b"w")
        until(lambda: cache.get("k") in (None, b"w") and cache.l0.table_id != first)
        until(lambda: cache.set("k", b"w") in (Status.STORED, Status.EXISTS))
        until(lambda: cache.get("k") == b"w" and len(cache.l0) == 1)
        assert cache.l0.hash_slots == 300
        cache.close()
        assert cache.get("k") == b"w"
        assert cache.l0 is None


def test_a_writer_stopped_in_the_middle_turns_the_table_off_until_it_goes_on(serve, connect):
    server = serve()
    client = connect(server)
    cache = ServedCache(client, "f")
    cache.set("k", b"old")
    cache.get("k")
    heat_up(cache, client, "k")
    table, key = cache.l0, l0_key(cache.prefix, b"k")
    code = (
        "import sys; from lmcache_l0 import SharedCache\n"
        "table = SharedCache(sys.argv[1], create=False); value = bytes(4096)\n"
        "print('on', flush=True)\n"
        "while table.enabled: table.set(bytes.fromhex(sys.argv[2]), value)\n"
        "print('off', flush=True)\n"
    )
    line = [sys.executable, "-c", code, table.path, key.hex()]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout.readline() == "on\n"
            end = time.monotonic() + 60
            while True:
                writer.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
                if table.stats.locked:
                    break
                writer.send_signal(signal.SIGCONT)
                assert time.monotonic() < end
            cache.clear()
            assert not table.enabled
            assert cache.get("k") is None
            assert figures(client)["stuck"] == 1
            assert client.operate("l0", "switch", enabled=True) == {"enabled": False}  # as soon as it can be
            cache.set("k", b"new")
            assert cache.get("k") == b"new"
            writer.send_signal(signal.SIGCONT)
            until(lambda: figures(client)["stuck"] == 0)
            until(lambda: table.enabled)
        finally:
            writer.kill()
    assert cache.get("k") in (b"new", bytes(4096))  # the writer wrote into a table that is the server's


def test_an_engine_that_fails_is_abandoned_and_its_table_serves_nobody(serve, connect, monkeypatch):
    server = serve()
    client = connect(server)
    cache = ServedCache(client, "f")
    cache.set("k", b"old")
    cache.get("k")
    heat_up(cache, client, "k")
    path = cache.l0.path

    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(L0Engine, "left", fail)
    cache.clear()
    assert cache.get("k") is None
    assert not cache.l0.enabled
    assert not Path(path).exists()
    assert "a bug" in figures(client)["disabled"]
    with pytest.raises(UsageError, match=r"no companion 'l0'.*a bug"):
        client.operate("l0", "switch", enabled=True)
    assert cache.set("k", b"new") is Status.STORED
    assert cache.get("k") == b"new"


def test_without_a_table_l1_alone_is_read(connect, server):
    client = connect(server)
    cache = ServedCache(client, "f", max_value_size=100)
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert cache.set_many({"a": b"1", "b": b"22"}) == [Status.STORED] * 2
    assert cache.set_numpy("n", array) is Status.STORED
    assert cache.get_many(["b", "c", "a"]) == [b"22", None, b"1"]
    assert cache.get("c", b"default") == b"default"
    found = cache.get_numpy("n", (2, 3), np.int16)
    assert np.array_equal(found, array)
    assert found.valid()
    assert not found.flags.writeable
    assert cache.get_numpy("n", 6, np.int16, snapshot=True).flags.writeable
    assert cache.get_numpy("nothing", 6, np.int16) is None
    assert "no [l0]" in cache.why_no_l0
    with pytest.raises(UsageError, match="another type"):
        cache.get_numpy("n", (3,), np.float32)
    with pytest.raises(UsageError, match="12 bytes"):
        cache.get_numpy("n", (7,), np.int16)
    with pytest.raises(UsageError, match="C-contiguous"):
        cache.set_numpy("t", array.T)
    with pytest.raises(ValueTooLargeError, match="takes 100"):
        cache.set("a", bytes(101))
    with pytest.raises(UsageError, match="no companion 'l0'"):
        client.operate("l0", "switch", enabled=True)


def test_tensors_come_from_l0_in_its_own_memory_and_from_l1_as_copies(serve, connect):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    client = connect(serve())
    cache = ServedCache(client, "f")
    assert cache.set_numpy("emb", np.arange(8, dtype=np.float32)) is Status.STORED
    assert cache.get_torch("absent", (8,), torch.float32) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that may not be written
        below = cache.get_torch("emb", shape=(2, 4), dtype=torch.float32)
        heat_up(cache, client, "emb")
        above = cache.get_torch("emb", shape=(2, 4), dtype=torch.float32)
    copy = cache.get_torch("emb", 8, torch.float32, snapshot=True)
    assert above.data_ptr() == cache.get_numpy("emb", 8, np.float32).ctypes.data
    for tensor in (below, above, copy):
        assert tensor.flatten().tolist() == list(range(8))
        assert tensor.valid()
    with pytest.raises(UsageError, match="stored as <f4"):
        cache.get_torch("emb", 8, torch.int32)
    key = l0_key(prefix_of(cache.namespace.id), b"emb")
    writer = SharedCache(cache.l0.path)
    for _ in range(3):
        writer.set(key, bytes(32))
    assert [tensor.valid() for tensor in (below, above, copy)] == [True, False, True]
    writer.close()


def test_check_says_whether_there_is_room(folder):
    registry = load_plugins()
    for sizes, ok in (({"size_gb": 0.01}, True), ({"size_gb": 10_000}, False)):
        settings = make_settings(registry, l0={"folder": str(folder), **sizes})
        ((finding,),) = registry.call("lmcache_check", {"l0"}, settings=settings)
        assert (finding.ok, finding.subject) == (ok, "l0"), finding
        assert ok or "l0.size_gb" in finding.cure


def test_settings_that_contradict_each_other_are_refused():
    for wrong, words in (
        ({"demote_at": 0.3, "demote_to": 0.4}, "must be below"),
        ({"demote_at": 0.9}, "less than or equal to 0.7"),
        ({"promote_after": 0}, "greater than or equal to 1"),
        ({"size": 1}, "not a setting: did you mean"),
    ):
        with pytest.raises(SettingsError, match=words):
            make_settings(l0=wrong)


def test_a_key_that_was_demoted_needs_twice_the_uses_and_the_counts_are_bounded():
    heat = Heat(2)
    assert [heat.use((1, b"k"), 0.0) for _ in range(3)] == [False, True, False]
    heat.demoted((1, b"k"), 1.0)
    assert [heat.use((1, b"k"), 1.0) for _ in range(4)] == [False, False, False, True]
    assert not heat.use((1, b"old"), 2.0)
    assert heat.use((1, b"old"), WINDOW_S + 3)  # one window ago still counts, two do not
    assert not heat.use((1, b"older"), WINDOW_S + 3)
    heat.use((1, b"x"), 2 * WINDOW_S + 4)
    assert not heat.use((1, b"older"), 3 * WINDOW_S + 5)
    for number in range(5 * COUNTED_KEYS_MAX):
        heat.use((number, b""), 3 * WINDOW_S + 5)
    assert len(heat) <= 2 * COUNTED_KEYS_MAX
