"""The bench runs and makes its records; the figures are not checked here."""

from __future__ import annotations

import argparse

from lmcache_bench import alloc
from lmcache_core.cli.bench.harness import Bench


def test_the_bench_records_each_size_fill_and_count() -> None:
    parser = argparse.ArgumentParser()
    alloc.add_options(parser)
    bench = Bench("alloc", quick=True, as_json=True)
    alloc.run(parser.parse_args(["--residents-max", "2000"]), bench)
    names = [result.name for result in bench.results]
    for sizes in ("uniform", "mixed"):
        for fill in ("empty", "95 % full"):
            assert f"allocate + free {sizes}, {fill}, 1,000" in names
            assert f"allocate + free {sizes}, {fill}, 1,000: worst stall" in names
    assert "heap a resident, 1,000" in names
    assert "kernel store, evicting, 1,000 residents" in names
    assert all(result.value > 0 for result in bench.results)
