"""Benches: what a figure means, what is printed, and when a bench module is imported."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from lmcache_core.cli.bench import add_bench
from lmcache_core.cli.bench.harness import Bench, machine, number
from lmcache_core.cli.lazy import LazyParser

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("value", "floor", "target", "lower", "on", "ratio", "met"),
    [
        (9.0, 10.0, 0.8, False, None, 0.9, True),  # a rate: 0.9 of the floor, wanted at least 0.8
        (7.0, 10.0, 0.8, False, None, 0.7, False),
        (30.0, 20.0, 2.0, True, None, 1.5, True),  # a time: 1.5 times the floor, wanted at most 2
        (50.0, 20.0, 2.0, True, None, 2.5, False),
        (2.0, None, 2.5, True, None, None, True),  # no floor: the target is on the value
        (3.0, None, 2.5, True, None, None, False),
        (2.0, 1.0, 2.5, True, "value", 2.0, True),  # said outright
        (2.0, 1.0, None, True, None, 2.0, None),  # no target
    ],
)
def test_a_target_is_on_the_ratio_where_there_is_a_floor_and_on_the_value_elsewhere(
    value: float, floor: float | None, target: float | None, lower: bool, on: str | None, ratio: float, met: bool
) -> None:
    bench = Bench("x", as_json=True)
    result = bench.record("a", value, "u", floor=floor, target=target, lower_is_better=lower, target_on=on)  # type: ignore[arg-type]
    assert (result.ratio, result.met) == (ratio, met)
    assert bench.met is (met is not False)


def test_a_target_on_a_ratio_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no floor"):
        Bench("x").record("a", 1.0, "u", target=1.0, target_on="ratio")


def test_json_is_one_object_with_the_machine_and_every_result(run: Run) -> None:
    done = run("bench", "acme", "--json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["bench"] == "acme"
    assert set(report["machine"]) == {"cpu", "cores", "memory", "kernel", "python", "lmcache_core"}
    assert report["results"] == [
        {
            "name": "rounds",
            "value": 3,
            "unit": "n",
            "floor": None,
            "ratio": None,
            "target": 5,
            "met": False,
            "doubt": "",
        }
    ]


def test_a_missed_target_changes_the_exit_status_only_when_strict(run: Run) -> None:
    assert run("bench", "acme").returncode == 0
    assert run("bench", "acme", "--strict").returncode == 1
    assert run("bench", "acme", "--strict", "--rounds", "5").returncode == 0


def test_without_a_terminal_progress_is_plain_lines_and_the_table_is_aligned(run: Run) -> None:
    done = run("bench", "acme")
    assert done.stderr == "bench acme [1/1] going round\n"
    title, head, rule, row = done.stdout.splitlines()
    assert title.startswith("bench acme: ")
    assert head.split() == ["name", "value", "unit", "floor", "ratio", "target", "met"]
    assert set(rule) == {"-", " "}
    assert row.split() == ["rounds", "3", "n", "5", "no"]


def test_what_a_run_cannot_tell_is_not_met_and_says_why() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), Bench("x") as bench:
        bench.record("a", 1.0, "x", target=1.05, doubt="too noisy")
        bench.record("b", 1.0, "x", target=1.05)
    assert [result.met for result in bench.results] == [False, True]
    assert not bench.met
    assert ["too noisy" in line for line in out.getvalue().splitlines()[-2:]] == [True, False]


def test_a_bench_module_is_imported_only_when_it_was_chosen() -> None:
    parser = LazyParser()
    benches = parser.add_subparsers(parser_class=LazyParser)
    for name in ("chosen", "other"):
        add_bench(benches, name, "a summary", f"bench_module_{name}_that_is_not_there")
    assert "a summary" in parser.format_help()
    with pytest.raises(ModuleNotFoundError, match="bench_module_chosen"):
        parser.parse_args(["chosen"])


def test_a_bench_report_names_cores_memory_and_processor() -> None:
    here = machine()
    assert here["cores"] >= 1
    assert here["memory"] > 1 << 28
    assert here["cpu"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (0.123456, "0.123"),
        (12.345, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (0.00012, "1.20e-04"),
    ],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("without_rich", [False, True])
def test_progress_is_shown_with_rich_and_without_it(monkeypatch: pytest.MonkeyPatch, without_rich: bool) -> None:
    if without_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    else:
        pytest.importorskip("rich")
    err, out = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "stdout", out)
    with Bench("x") as bench:
        bench.steps(2)
        bench.step("first thing")
        bench.step("second thing")
        bench.record("a", 1.0, "u")
    assert ("bench x [2/2] second thing\n" in err.getvalue()) is without_rich
    assert err.getvalue()
    assert "a" in out.getvalue()


def test_a_run_that_raises_prints_no_half_report(capsys: pytest.CaptureFixture[str]) -> None:
    def break_off() -> None:
        with Bench("x", as_json=True) as bench:
            bench.record("a", 1.0, "u")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        break_off()
    assert capsys.readouterr().out == ""


def test_abbreviations_are_no_options() -> None:
    """`--conf` for `--config` would also swallow a setting that begins so."""
    parser = LazyParser()
    parser.add_argument("--config")
    found, rest = parser.parse_known_args(["--conf", "x"])
    assert (found.config, rest) == (None, ["--conf", "x"])
