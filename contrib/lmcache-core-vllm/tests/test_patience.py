"""How long a worker may wait for the server, over time."""

from __future__ import annotations

from lmcache_core_vllm.patience import Allowance


def test_an_allowance_is_spent_and_comes_back_with_time() -> None:
    now = [100.0]
    allowance = Allowance(0.25, 0.01, lambda: now[0])
    assert allowance.left_s == 0.25
    allowance.spend(0.3)
    assert allowance.left_s == 0.0
    now[0] += 10.0
    assert round(allowance.left_s, 6) == 0.05
    now[0] += 1000.0
    assert allowance.left_s == 0.25
