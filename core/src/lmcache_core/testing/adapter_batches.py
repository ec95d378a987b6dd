"""Batches: answers in order, failures one by one, and the same as single calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from lmcache_core.testing import material
from lmcache_core.testing.contract import Contract
from lmcache_core.testing.machine import run_machine
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem

SIZE = 3000


def _items(numbers: Sequence[int], nbytes: int = SIZE) -> list[StoreItem]:
    return [StoreItem(material.key(n), [memoryview(material.content(n, nbytes))]) for n in numbers]


def _load(adapter: L2Adapter, numbers: Sequence[int], nbytes: int = SIZE) -> tuple[Sequence[Outcome], list[bytes]]:
    targets = [bytearray([material.FILL]) * nbytes for _ in numbers]
    items = [LoadItem(material.key(n), [memoryview(t)]) for n, t in zip(numbers, targets, strict=True)]
    return adapter.load(items, material.soon()), [bytes(target) for target in targets]


class BatchTests(Contract):
    """Every batch method answers in the order of its items, one answer each."""

    scan_objects: ClassVar[int]

    def test_an_empty_batch_is_an_empty_answer(self, adapter: L2Adapter) -> None:
        assert list(adapter.store([], material.soon())) == []
        assert list(adapter.exists([], material.soon())) == []
        assert list(adapter.load([], material.soon())) == []
        if adapter.capabilities.delete:
            assert list(adapter.delete([], material.soon())) == []

    def test_results_come_in_the_order_of_the_requests(self, adapter: L2Adapter) -> None:
        there = [9, 2, 14, 5, 11, 0, 7]
        assert material.results(adapter.store(_items(there), material.soon())) == [Result.DONE] * len(there)
        asked = [14, 3, 0, 9, 1, 5, 2, 8, 11, 7, 4]
        expected = [number in there for number in asked]
        keys = [material.key(number) for number in asked]
        assert [bool(one) for one in adapter.exists(keys, material.soon())] == expected
        outcomes, contents = _load(adapter, asked)
        assert [outcome.result is Result.DONE for outcome in outcomes] == expected
        for number, outcome, found in zip(asked, outcomes, contents, strict=True):
            if outcome.result is Result.DONE:
                assert found == material.content(number, SIZE), f"object {number} came with the bytes of another"

    def test_a_batch_may_succeed_in_part(self, adapter: L2Adapter) -> None:
        adapter.store(_items([1, 2, 4]), material.soon())
        room = [SIZE, SIZE - 1, SIZE, SIZE]  # the second one's target is too small, the third was never stored
        targets = [bytearray(size) for size in room]
        items = [LoadItem(material.key(n + 1), [memoryview(target)]) for n, target in enumerate(targets)]
        outcomes = adapter.load(items, material.soon())
        assert material.results(outcomes) == [Result.DONE, Result.DAMAGED, Result.MISS, Result.DONE]
        assert bytes(targets[0]) == material.content(1, SIZE)
        assert bytes(targets[3]) == material.content(4, SIZE)

    def test_a_delete_in_a_batch_is_reported_for_each_key(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.delete:
            pytest.skip("the adapter does not claim delete")
        adapter.store(_items([1, 2, 3]), material.soon())
        keys = [material.key(number) for number in (3, 9, 1)]
        assert material.results(adapter.delete(keys, material.soon())) == [Result.DONE] * 3
        assert list(adapter.exists([material.key(n) for n in (1, 2, 3)], material.soon())) == [False, True, False]

    def test_a_batch_is_the_same_as_its_single_calls(self, adapter: L2Adapter) -> None:
        adapter.store(_items(range(6)), material.soon())
        for item in _items(range(6, 12)):
            assert adapter.store([item], material.soon())[0].result is Result.DONE
        numbers = range(14)
        outcomes, contents = _load(adapter, numbers)
        singles = [_load(adapter, [number]) for number in numbers]
        assert material.results(outcomes) == [single[0][0].result for single in singles]
        for number in range(12):
            assert contents[number] == singles[number][1][0] == material.content(number, SIZE)
        keys = [material.key(number) for number in numbers]
        together = [bool(found) for found in adapter.exists(keys, material.soon())]
        assert together == [bool(adapter.exists([key], material.soon())[0]) for key in keys]

    def test_a_batch_of_the_largest_size(self, adapter: L2Adapter) -> None:
        numbers = range(min(1024, adapter.capabilities.batch_keys_max))
        assert set(material.results(adapter.store(_items(numbers, 200), material.soon()))) == {Result.DONE}
        outcomes, contents = _load(adapter, numbers, 200)
        assert set(material.results(outcomes)) == {Result.DONE}
        assert contents == [material.content(number, 200) for number in numbers]

    def test_it_behaves_as_a_dictionary(self, adapter: L2Adapter) -> None:
        run_machine(adapter)

    # --- what is there --------------------------------------------------------------------------------------
    def test_a_scan_sees_exactly_what_is_there(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.scan:
            pytest.skip("the adapter does not claim scan")
        assert material.scan(adapter) == []
        expected: dict[bytes, int] = {}
        for number in range(self.scan_objects):
            size = 100 + number
            material.store(adapter, material.key(number), material.content(number, 40), bytes(size - 40))
            expected[material.key(number)] = size
        for number in range(0, self.scan_objects, 5):
            material.store(adapter, material.key(number), bytes(7))
            expected[material.key(number)] = 7
        if adapter.capabilities.delete:
            for number in range(0, self.scan_objects, 3):
                adapter.delete([material.key(number)], material.soon())
                del expected[material.key(number)]
        material.load(adapter, next(iter(expected)), 200)  # a use must not change what is there
        found = material.scan(adapter)
        assert len(found) == len({entry.key for entry in found}), "a scan gave a key twice"
        assert {entry.key: entry.nbytes for entry in found} == expected
        assert all(entry.used_at_s >= 0 for entry in found)

    def test_a_scan_gives_keys_as_they_were_stored(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.scan:
            pytest.skip("the adapter does not claim scan")
        keys = [key for key in material.DIFFICULT_KEYS if len(key) <= adapter.capabilities.key_bytes_max]
        for key in keys:
            material.store(adapter, key, b"x")
        assert sorted(entry.key for entry in material.scan(adapter)) == sorted(keys)

    def test_usage_follows_what_is_stored(self, adapter: L2Adapter) -> None:
        before = adapter.usage()
        nbytes = 100_000  # media round up, and count things of their own: the objects must outweigh those
        adapter.store(_items(range(10), nbytes), material.soon())
        after = adapter.usage()
        for figure in (*before, *after):
            assert figure is None or figure >= 0
        if before.objects is not None and after.objects is not None:
            assert after.objects - before.objects == 10
        if before.bytes_used is not None and after.bytes_used is not None:
            assert after.bytes_used - before.bytes_used >= 10 * nbytes
        if adapter.capabilities.delete:
            adapter.delete([material.key(number) for number in range(10)], material.soon())
            last = adapter.usage()
            if last.objects is not None:
                assert last.objects == before.objects
            if last.bytes_used is not None and after.bytes_used is not None:
                assert last.bytes_used < after.bytes_used

    def test_a_full_medium_is_an_ordinary_answer(self, adapter: L2Adapter, small_adapter: Any) -> None:
        able = adapter.capabilities
        if small_adapter is None:
            if able.evicts:
                pytest.fail(f"{type(self).__name__} claims evicts: give it a fixture 'small_adapter'", pytrace=False)
            pytest.skip("no fixture 'small_adapter'")
        numbers, nbytes = range(40), 200_000  # 8 MB for a medium of 4 MiB at most
        outcomes = [small_adapter.store(_items([number], nbytes), material.soon())[0] for number in numbers]
        there = [bool(one) for one in small_adapter.exists([material.key(n) for n in numbers], material.soon())]
        if able.evicts:
            assert set(material.results(outcomes)) == {Result.DONE}
            assert there[-1], "the newest object was dropped to make room for it"
        else:
            assert set(material.results(outcomes)) == {Result.DONE, Result.FULL}, outcomes
            assert [outcome.result is Result.DONE for outcome in outcomes] == there
        for number, is_there in enumerate(there):
            if is_there:
                assert material.holds(small_adapter, material.key(number), material.content(number, nbytes))
        if able.delete and not able.evicts:
            small_adapter.delete([material.key(number) for number in numbers], material.soon())
            assert small_adapter.store(_items([99], nbytes), material.soon())[0].result is Result.DONE
