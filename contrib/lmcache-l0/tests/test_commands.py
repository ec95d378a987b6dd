"""`lmcache-core l0` and `bench l0`, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from lmcache_l0.errors import TableLoadWarning


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


@pytest.mark.slow
def test_the_bench_measures_everything_it_has_a_target_for():
    done = command("bench", "l0", "--quick", "--json", "--slots", "20000")
    assert done.returncode == 0, done.stderr
    results = {result["name"]: result for result in json.loads(done.stdout)["results"]}
    assert sum(result["target"] is not None for result in results.values()) >= 5
    assert all(result["value"] > 0 for name, result in results.items() if "less the copy" not in name)
