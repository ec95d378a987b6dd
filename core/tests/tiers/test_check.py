"""The check of an adapter: what comes of one object to its medium and back, and what stays behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Event

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import LoadItem, Outcome, Result, StoreItem
from lmcache_core.tiers.retry import call_batch

MemoryAdapter = pytest.importorskip("lmcache_mock.memory").MemoryAdapter


class Refusing(MemoryAdapter):
    """Stores the object and refuses all the same, as a service whose answer got lost."""

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        super().store(items, deadline)
        return [Outcome.of(TierError("the door is shut: for good", cure="open it", retryable=False)) for _ in items]


class Garbling(MemoryAdapter):
    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        outcomes = super().load(items, deadline)
        for item in items:
            item.buffers[0][0] ^= 1
        return outcomes


class Breaking(MemoryAdapter):
    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        raise ZeroDivisionError


def soon() -> float:
    return time.monotonic() + 30.0


def test_an_object_goes_and_comes_back_and_nothing_stays() -> None:
    adapter = MemoryAdapter()
    assert [each.message for each in adapter.check(soon())] == ["an object was stored, loaded and deleted"]
    assert not adapter.objects


def test_the_cure_arrives_apart_from_what_happened_and_nothing_stays() -> None:
    adapter = Refusing()
    with pytest.raises(TierError, match=r"^the door is shut: for good: open it$") as raised:
        list(adapter.check(soon()))
    assert (raised.value.cure, raised.value.retryable) == ("open it", False)
    assert not adapter.objects


@pytest.mark.parametrize(("adapter", "raises"), [(Garbling(), TierError), (Breaking(), ZeroDivisionError)])
def test_nothing_stays_whatever_goes_wrong(adapter: MemoryAdapter, raises: type[Exception]) -> None:
    with pytest.raises(raises):
        list(adapter.check(soon()))
    assert not adapter.objects


def test_the_object_is_no_larger_than_the_medium_takes() -> None:
    class Small(MemoryAdapter):
        capabilities = replace(MemoryAdapter.capabilities, object_bytes_max=1000)

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            assert [item.nbytes for item in items] == [1000]
            return super().store(items, deadline)

    list(Small().check(soon()))


def test_a_medium_that_deletes_nothing_gets_nothing() -> None:
    class Keeping(MemoryAdapter):
        capabilities = replace(MemoryAdapter.capabilities, delete=False)

    adapter = Keeping()
    assert ["nothing was stored" in each.message for each in adapter.check(soon())] == [True]
    assert not adapter.objects


def test_a_cure_survives_the_retries_and_steers_no_terminal() -> None:
    def fails(items: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        raise TierError("it is full", cure="free\n some", retryable=False)

    (outcome,) = call_batch(fails, [b"k"], soon(), Event())
    assert outcome == Outcome(Result.FAILED, error="it is full: free? some", cure="free? some")
    assert str(outcome.as_error()) == "it is full: free? some"
