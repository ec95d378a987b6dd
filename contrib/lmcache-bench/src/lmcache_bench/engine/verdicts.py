"""What noise means for a target, for every engine alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_bench.pairs import NOISE_MAX, Interval

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench


def doubt(same: Interval) -> str:
    """Why the machine is too noisy to judge a target; empty if it is not."""
    return "too noisy" if same.too_noisy else ""


def record_noise(bench: Bench, name: str, same: Interval) -> None:
    """How far noise alone moves the bound."""
    bench.record(f"{name}, upper 95 % bound (too noisy above {NOISE_MAX})", max(same.high, 1 / same.low), "x")
