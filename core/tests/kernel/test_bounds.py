"""No call into the kernel costs more than its batch and one step; the fixture of every test holds that, and this it."""

from __future__ import annotations

import pytest
from kernel_words import NS, WORKER, keys, store

from lmcache_core.kernel import Kernel
from lmcache_core.limits import CALL_OBJECTS_MAX


def test_every_test_judges_the_calls_it_makes(kernel: Kernel) -> None:
    assert Kernel.call_objects_max == CALL_OBJECTS_MAX


def test_a_call_that_touches_too_much_is_noted(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "call_objects_max", 8)
    monkeypatch.setattr(Kernel, "long_calls", [])
    store(kernel, 1, 2)
    assert kernel.long_calls == []
    kernel.lookup(WORKER, NS, keys(*range(9)), 0.0)
    kernel.take_effects()
    assert kernel.long_calls == [9]


def test_a_turn_counts_what_its_calls_touched(kernel: Kernel) -> None:
    kernel.take_touched()
    kernel.lookup(WORKER, NS, keys(1, 2), 0.0)
    kernel.lookup(WORKER, NS, keys(3), 0.0)
    assert kernel.take_touched() == 3
    assert kernel.take_touched() == 0
