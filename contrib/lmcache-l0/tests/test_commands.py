"""`lmcache-core l0` and `bench l0`, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
from lmcache_l0 import SharedCache
from lmcache_l0.errors import TableLoadWarning
from lmcache_l0.sizing import plan_table


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lmcache_core.cli.main", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def table(make):
    cache = make(hash_slots=100)
    cache.set_many({f"key {i}": b"x" * i for i in range(50)})
    cache.set(b"\xff\x00", b"")
    for _ in range(20000):
        cache.get("key 7")
    return cache


def test_stats_says_what_the_table_holds(table):
    done = command("l0", "stats", table.path)
    assert done.returncode == 0, done.stderr
    assert "51.0%  (51 of 100 slots)" in done.stdout
    found = json.loads(command("l0", "stats", table.path, "--json").stdout)
    assert (found["keys"], found["value_bytes"], found["writers"]) == (51, sum(range(50)), 1)


def test_stats_warns_above_seventy_percent(make):
    cache = make(hash_slots=10)
    with pytest.warns(TableLoadWarning):
        cache.set_many({f"{i}": b"" for i in range(8)})
    assert "80% full" in command("l0", "stats", cache.path).stderr


def test_top_shows_the_hottest_first(table):
    done = command("l0", "top", table.path, "--count", "3")
    assert done.stdout.splitlines()[3].startswith("key 7 ")
    assert len(done.stdout.splitlines()) == 6
    rows = json.loads(command("l0", "top", table.path, "--json", "--count", "99").stdout)
    assert rows[0]["key"] == "key 7"
    assert "0xff00" in {row["key"] for row in rows}


def test_what_is_no_table_is_said_and_not_shown(folder):
    (folder / "x").write_bytes(b"no table" * 1000)
    for path, said in ((folder / "x", "is no L0 table"), (folder / "absent", "there is no table")):
        done = command("l0", "stats", str(path))
        assert done.returncode == 1
        assert said in done.stderr
        assert not done.stdout


def test_a_table_is_made_switched_and_changed_from_outside(folder):
    path = str(folder / "t")
    made = command("l0", "create", path, "--hash-slots", "1k", "--max-value-size", "4Ki", "--disabled")
    assert made.returncode == 0, made.stderr
    assert "1,000 slots (plan for 700 keys), values up to 4,096 bytes" in made.stdout
    with SharedCache(path) as cache:
        assert not cache.enabled
        command("l0", "set", path, "k", "lost")
        for words, wanted in (
            (("enabled",), True),
            (("disabled",), False),
            (("enabled", "on"), True),
            (("enabled", "off"), False),
            (("enabled=true",), True),
        ):
            assert command("l0", "set", path, *words).returncode == 0
            assert cache.enabled is wanted
        assert cache.get("k") is None
        assert command("l0", "set", path, "k", "value").returncode == 0
        assert command("l0", "set", path, "--key", "enabled", "off").returncode == 0
        assert cache.enabled
        assert dict(cache.items()) == {b"k": b"value", b"enabled": b"off"}
        assert command("l0", "get", path, "k").stdout == "value"
        assert sorted(command("l0", "keys", path).stdout.split()) == ["enabled", "k"]
        assert json.loads(command("l0", "keys", path, "--prefix", "en", "--json").stdout) == ["enabled"]
        assert command("l0", "delete", path, "k", "absent").returncode == 0
        gone = command("l0", "delete", path, "absent")
        assert gone.returncode == 1
        assert "absent is not there" in gone.stderr
        cache.enabled = False
        off = command("l0", "get", path, "enabled")
        assert off.returncode == 1
        assert "is switched off" in off.stderr
    refused = command("l0", "set", path, "enabled", "perhaps")
    assert refused.returncode == 1
    assert "say enabled, disabled" in refused.stderr


def test_a_rehash_from_outside_shortens_probes(make):
    cache = make(hash_slots=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableLoadWarning)
        cache.set_many({f"{i}": b"" for i in range(8)})
    for i in range(7):
        cache.delete(f"{i}")
    done = command("l0", "rehash", cache.path)
    assert done.returncode == 0, done.stderr
    assert "mean: " in done.stdout
    assert "1.00 now" in done.stdout
    assert cache.get("7") == b""


def test_the_value_comes_from_standard_input_as_it_is(make):
    cache = make()
    line = [sys.executable, "-m", "lmcache_core.cli.main", "l0", "set", cache.path, "k"]
    subprocess.run(line, input=bytes(range(256)), check=True, timeout=120)
    assert cache.get("k") == bytes(range(256))
    done = subprocess.run([*line[:4], "get", cache.path, "k"], capture_output=True, check=True, timeout=120)
    assert done.stdout == bytes(range(256))


def test_the_plan_says_what_a_table_takes_and_how_long_its_probes_are(make, folder):
    done = command("l0", "plan", "--keys", "10M", "--value", "512")
    assert done.returncode == 0, done.stderr
    assert "10,000,000 at a load of 70%" in done.stdout
    assert "hash_slots=14285715, max_value_size=512" in done.stdout
    found = json.loads(command("l0", "plan", "--keys", "7k", "--value", "4Ki", "--versions", "2", "--json").stdout)
    assert found["hash_slots"] == 10_001
    assert found["file_bytes"] == plan_table(hash_slots=10_001, versions=2).file_bytes
    means = [row["mean"] for row in found["probes"]]
    assert means == sorted(means)
    assert command("l0", "plan", "--keys", "1", "--value", "1", "--load", "1.5").returncode == 1
    assert command("l0", "plan", "--keys", "many", "--value", "1").returncode == 2


@pytest.mark.slow
def test_the_bench_measures_everything_it_has_a_target_for():
    done = command("bench", "l0", "--quick", "--json", "--slots", "20000")
    assert done.returncode == 0, done.stderr
    results = {result["name"]: result for result in json.loads(done.stdout)["results"]}
    assert sum(result["target"] is not None for result in results.values()) >= 5
    assert all(result["value"] > 0 for name, result in results.items() if "less the copy" not in name)


@pytest.mark.slow
def test_the_bench_asks_a_feature_server_over_every_store():
    for module in ("fastapi", "uvicorn", "lmdb", "redis"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    done = command("bench", "l0", "--server", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    found = {result["name"]: result["value"] for result in json.loads(done.stdout)["results"]}
    assert all(value > 0 for value in found.values())
    assert {"l0", "lmdb", "shared_memory", "dict"} <= {name.split(", ")[-1] for name in found}
