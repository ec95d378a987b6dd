"""`trace` and `simulate` from the command line, and the tables that they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.cli.main import main
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings

Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> str:
        capsys.readouterr()
        assert main(list(words)) == 0
        return capsys.readouterr().out

    return call


def test_simulate_compares_all_policies_that_are_named(printed: Printed) -> None:
    small = ["--synthetic", "sessions=4,turns=2", "--capacity", "10", "--capacity", "20"]
    rows = json.loads(printed("simulate", *small, "--policy", "lru", "--policy", "noop", "--json"))
    assert sorted((row["policy"], row["capacity"]) for row in rows) == [
        ("lru", 10), ("lru", 20), ("noop", 10), ("noop", 20),
    ]  # fmt: skip


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", "x", "--l1.size_bytes", "1"]) == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: --l1.size_bytes 1: see lmcache-core trace info --help" in said


def test_a_recording_is_replayed_and_every_table_fits_80_columns(tmp_path: Path, printed: Printed) -> None:
    registry = load_plugins()
    settings = server_settings(tmp_path, registry, l1={"size_bytes": 8 << 20, "backing": "memfd"})
    space = Namespace("studied", Layout("uint8", (4096,)))
    where = ["--name", settings.name, "--runtime-dir", str(settings.runtime_dir)]
    trace = str(tmp_path / "trace")
    with Server(settings, registry).start(wait=True) as server, server.connect() as client:
        printed("trace", "start", trace, *where)
        keys = [number.to_bytes(32, "big") for number in range(4)]
        client.store(keys, [bytes(4096)] * 4, namespace=space)
        assert client.lookup(keys, namespace=space).hits == 4
        printed("trace", "stop", *where)
        replayed = json.loads(printed("trace", "replay", trace, "--speed", "max", "--json", *where))
        tables = {"info": printed("trace", "info", trace), "replay": printed("trace", "replay", trace, *where)}
    assert (replayed["hit_rate"], replayed["recorded_hit_rate"]) == (1.0, 1.0)
    capacities = [str(1000 * number) for number in range(1, 9)]
    words = ("--synthetic", "sessions=4", "--policy", "lru", "noop", "--capacity", *capacities)
    tables["simulate"] = printed("simulate", *words)
    for name, text in tables.items():
        assert not [line for line in text.splitlines() if len(line) > 80], name
        assert text.count("\n") > 2, name
