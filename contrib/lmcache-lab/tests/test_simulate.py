"""`lmcache-core simulate`, from its options to what it prints."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from lmcache_core.errors import PluginError, UsageError
from lmcache_core.policies.lru import LruEviction
from lmcache_lab import simulate
from lmcache_lab.simulation import Order, optimum, replay
from lmcache_lab.workloads import parse_synthetic, synthetic_trace


def command(*words: str) -> int:
    parser = ArgumentParser()
    simulate.add_options(parser)
    return simulate.run(parser.parse_args(words))


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([1, 2, 3, 4], [5], [1, 2, 3, 4])))
    return path


def test_json_has_a_record_for_each_trace_policy_and_capacity(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--synthetic", "sessions=5,seed=3", "--policy", "lru", "noop", "--capacity", "4", "9", "--json")
    assert command(str(trace_file), *words, "--order", "suffix-first") == 0
    records = json.loads(capsys.readouterr().out)
    assert [set(record) for record in records] == [{"trace", "policy", "capacity", "hit_rate"}] * 8
    rates = {(record["trace"], record["policy"], record["capacity"]): record["hit_rate"] for record in records}
    assert len(rates) == 8
    assert rates["mine", "lru", 4] == pytest.approx(3 / 9, abs=1e-6)
    assert rates["mine", "lru", 9] == pytest.approx(4 / 9, abs=1e-6)
    trace = synthetic_trace(parse_synthetic("sessions=5,seed=3"))
    expected = replay(trace, "lru", LruEviction(), 9, Order.SUFFIX_FIRST).hit_rate
    assert rates["synthetic-3", "lru", 9] == pytest.approx(expected, abs=1e-6)


def test_the_table_has_a_row_for_each_policy_and_a_column_for_each_capacity(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(trace_file), "--policy", "lru", "noop", "--capacity", "4", "1000") == 0
    title, head, _, lru, noop = capsys.readouterr().out.splitlines()
    assert title.startswith("mine: 3 requests, 9 blocks, 5 unique")
    assert head.split() == ["policy", "4", "1,000"]
    assert lru.split() == ["lru", "0.0000", "0.4444"]
    assert noop.split() == ["noop", "0.4444", "0.4444"]


def test_the_optimum_is_beaten_by_nobody_and_shown_beside_the_policies(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(trace_file), "--policy", "lru", "--capacity", "4", "--optimum") == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["optimum", "0.4444"]
    trace = synthetic_trace(parse_synthetic("sessions=60"))
    for capacity in (50, 200, 800):
        for order in Order:
            assert optimum(trace, capacity).hits > replay(trace, "lru", LruEviction(), capacity, order).hits


def test_prefixes_are_looked_up_forward_by_default(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(str(trace_file), "--policy", "lru", "--capacity", "4", "--json")
    assert json.loads(capsys.readouterr().out)[0]["hit_rate"] == 0.0


def test_the_plot_is_a_picture(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    words = ("--synthetic", "sessions=5", "--policy", "lru", "--capacity", "4", "40", "--plot", str(out))
    assert command(str(trace_file), *words) == 0
    picture = out.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000


def test_a_plot_that_cannot_be_written_is_an_error_with_its_path(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "absent" / "out.png"
    with pytest.raises(UsageError, match=r"cannot be written to .*absent"):
        command(str(trace_file), "--policy", "lru", "--capacity", "4", "--plot", str(out))


def test_a_tier_hits_what_the_pool_lost_and_its_writes_are_counted(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--policy", "lru", "--capacity", "1", "--tier", "5", "--order", "suffix-first")
    stores = ("--store-policy", "default", "wear_aware:writes_per_hit_max=0")
    assert command(str(trace_file), *words, *stores, "--json") == 0
    at_once, at_reuse = json.loads(capsys.readouterr().out)
    assert (at_once["trace"], at_once["policy"], at_once["capacity"], at_once["tier"]) == ("mine", "lru", 1, 5)
    assert at_once["tier_hit_rate"] == pytest.approx(4 / 9, abs=1e-6), "all of the third request"
    assert at_once["writes_per_hit"] == 5 / 4
    assert at_reuse["tier_hit_rate"] == 0.0, "they were asked for once before"
    assert at_reuse["writes_per_hit"] is None
    assert command(str(trace_file), *words, *stores) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ["0.0000", "0.0000", "-"]


def test_what_a_store_policy_drops_is_read_from_the_tier(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "lru", "--capacity", "9", "--tier", "9", "--store-policy", "default", "skip_l1", "--json")
    assert command(str(trace_file), *words) == 0
    kept, dropped = json.loads(capsys.readouterr().out)
    assert (kept["hit_rate"], kept["tier_hit_rate"]) == (pytest.approx(4 / 9, abs=1e-6), 0.0)
    assert (dropped["hit_rate"], dropped["tier_hit_rate"]) == (0.0, pytest.approx(4 / 9, abs=1e-6))


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("--policy", "lru", "--capacity", "4"), UsageError, "nothing to replay"),
        (("--synthetic", "default", "--policy", "lur", "--capacity", "4"), PluginError, "no eviction_policy 'lur'"),
        (("--synthetic", "default", "--policy", "lru:size=1", "--capacity", "4"), UsageError, "lru has no settings"),
        (("--synthetic", "default", "--policy", "lru:size", "--capacity", "4"), UsageError, "is not a setting"),
        (
            ("--synthetic", "sessions=1", "--policy", "lru", "--capacity", "0"),
            UsageError,
            "capacity must be 1 block or more",
        ),
        (
            ("--synthetic", "sessions=1", "--policy", "lru", "--capacity", "4", "--store-policy", "default"),
            UsageError,
            "add --tier",
        ),
        (
            ("--synthetic", "sessions=1", "--policy", "lru", "--capacity", "4", "--tier", "9", "--optimum"),
            UsageError,
            "neither --plot nor --optimum",
        ),
        (("--synthetic", "sessions=1", "--policy", "lru", "--capacity", "4", "--tier", "0"), UsageError, "got 0"),
        (("absent.jsonl", "--policy", "lru", "--capacity", "4"), UsageError, "absent.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_replayed_is_said(words: tuple[str, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        command(*words)


def test_a_trace_behind_the_capacities_is_no_riddle(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("--policy", "lru", "--capacity", "4", str(trace_file))
    assert "not a number of blocks; traces go before the options" in capsys.readouterr().err
