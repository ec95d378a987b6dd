"""Batches: answers are in order, items fail one by one, and a batch equals single calls."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.contract import Contract, not_claimed
from lmcache_testing.machine import run_machine
from lmcache_testing.speeds import Kit

SIZE = 3000
BATCH_BYTES = 64 << 20  # the kernel's limit for one call, if the adapter sets none
QUICK_BATCH_BYTES = 12 << 20
SLOW_S = 0.005  # for one lookup


def items_of(numbers: Sequence[int], nbytes: int = SIZE) -> list[StoreItem]:
    return [StoreItem(material.key(n), [memoryview(material.content(n, nbytes))]) for n in numbers]


def load_all(adapter: L2Adapter, numbers: Sequence[int], nbytes: int = SIZE) -> tuple[Sequence[Outcome], list[bytes]]:
    targets = [bytearray([material.FILL]) * nbytes for _ in numbers]
    items = [LoadItem(material.key(n), [memoryview(t)]) for n, t in zip(numbers, targets, strict=True)]
    outcomes = adapter.load(items, material.soon())
    assert len(outcomes) == len(items), f"a load of {len(items)} objects gave {len(outcomes)} answers"
    return outcomes, [bytes(target) for target in targets]


def expect_all_stored(adapter: L2Adapter, items: Sequence[StoreItem]) -> None:
    """In one batch."""
    outcomes = adapter.store(items, material.soon())
    assert len(outcomes) == len(items), f"a store of {len(items)} objects gave {len(outcomes)} answers"
    for position, outcome in enumerate(outcomes):
        material.expect_result(outcome, Result.DONE, f"asked to store {len(items)} objects, for object {position}")


class BatchTests(Contract):
    """Every batch method answers in the order of its items, one answer each."""

    def test_an_empty_batch_is_an_empty_answer(self, adapter: L2Adapter) -> None:
        answers = {
            "store": adapter.store([], material.soon()),
            "exists": adapter.exists([], material.soon()),
            "load": adapter.load([], material.soon()),
        }
        if adapter.capabilities.delete:
            answers["delete"] = adapter.delete([], material.soon())
        for name, answer in answers.items():
            assert list(answer) == [], f"{name} of an empty batch gave {len(answer)} answers"

    def test_results_come_in_the_order_of_the_requests(self, adapter: L2Adapter) -> None:
        there = [9, 2, 14, 5, 11, 0, 7]
        expect_all_stored(adapter, items_of(there))
        numbers = [14, 3, 0, 9, 1, 5, 2, 8, 11, 7, 4]
        expected = [number in there for number in numbers]
        material.expect_exists(adapter, [material.key(number) for number in numbers], expected, "seven objects stored")
        outcomes, contents = load_all(adapter, numbers)
        for position, (number, outcome, found) in enumerate(zip(numbers, outcomes, contents, strict=True)):
            wanted = Result.DONE if number in there else Result.MISS
            material.expect_result(outcome, wanted, f"seven objects stored and eleven loaded, for object {position}")
            if outcome.result is Result.DONE:
                wrong = material.difference(found, material.content(number, SIZE))
                assert found == material.content(number, SIZE), f"object {position} of a batch came with {wrong}"

    def test_a_batch_may_succeed_in_part(self, adapter: L2Adapter) -> None:
        expect_all_stored(adapter, items_of([1, 2, 4]))
        room = [SIZE, SIZE - 1, SIZE, SIZE]  # the second target is too small, the third object was never stored
        targets = [bytearray(size) for size in room]
        items = [LoadItem(material.key(n + 1), [memoryview(target)]) for n, target in enumerate(targets)]
        found = material.results(adapter.load(items, material.soon()))
        expected = [Result.DONE, Result.DAMAGED, Result.MISS, Result.DONE]
        results = ", ".join(found)
        assert found == expected, f"of a sound, a too large, an absent and a sound object a load said {results}"
        for position, number in ((0, 1), (3, 4)):
            content = material.content(number, SIZE)
            wrong = material.difference(bytes(targets[position]), content)
            assert targets[position] == content, f"object {position} of a batch that failed in part came with {wrong}"

    def test_a_delete_in_a_batch_is_reported_for_each_key(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.delete:
            not_claimed("delete")
        expect_all_stored(adapter, items_of(range(1, 8)))
        going = [7, 9, 1, 3, 5, 6]  # the second and the fourth stay; the ninth does not exist
        material.expect_deleted(adapter, [material.key(number) for number in going], "five of six keys are there")
        left = [number not in going for number in range(1, 8)]
        keys = [material.key(number) for number in range(1, 8)]
        material.expect_exists(adapter, keys, left, "after a delete of five of seven in one batch")

    def test_a_batch_is_the_same_as_its_single_calls(self, adapter: L2Adapter) -> None:
        expect_all_stored(adapter, items_of(range(6)))
        for item in items_of(range(6, 12)):
            expect_all_stored(adapter, [item])
        numbers = range(14)
        outcomes, contents = load_all(adapter, numbers)
        for number in numbers:
            (single,), (content,) = load_all(adapter, [number])
            done = f"object {number}, loaded alone and in a batch that said {material.seen(outcomes[number])}"
            material.expect_result(single, outcomes[number].result, done)
            if number < 12:
                expected = material.content(number, SIZE)
                for way, found in (("in a batch", contents[number]), ("alone", content)):
                    wrong = material.difference(found, expected)
                    assert found == expected, f"object {number}, loaded {way}, came with {wrong}"
        keys = [material.key(number) for number in numbers]
        together = [bool(found) for found in adapter.exists(keys, material.soon())]
        alone = [bool(adapter.exists([key], material.soon())[0]) for key in keys]
        assert together == alone, f"exists says {sum(together)} of 14 in a batch, and {sum(alone)} one by one"

    def test_a_batch_of_the_largest_size(self, adapter: L2Adapter) -> None:
        """Every method, including keys that are missing."""
        count = min(1024, adapter.capabilities.batch_keys_max)
        numbers = range(0, 2 * count, 2)
        expect_all_stored(adapter, items_of(numbers, 200))
        outcomes, contents = load_all(adapter, numbers, 200)
        for number, outcome, found in zip(numbers, outcomes, contents, strict=True):
            done = f"{count} objects stored and loaded, for object {number // 2}"
            material.expect_result(outcome, Result.DONE, done)
            expected = material.content(number, 200)
            assert found == expected, f"{done}: {material.difference(found, expected)}"
        done = f"{count} objects stored"
        material.expect_exists(adapter, [material.key(n) for n in numbers], [True] * count, done)
        mixed = range(count, 2 * count)
        material.expect_exists(adapter, [material.key(n) for n in mixed], [n % 2 == 0 for n in mixed], done)
        if adapter.capabilities.delete:
            keys = [material.key(n) for n in numbers]
            material.expect_deleted(adapter, keys, done)
            material.expect_exists(adapter, keys, [False] * count, f"{done} and deleted in one batch")

    def test_a_batch_of_many_bytes(self, adapter: L2Adapter, kit: Kit) -> None:
        """As many bytes as the adapter says it gets, or 64 MiB; 12 MiB at the quick speed."""
        able = adapter.capabilities
        most = min(able.batch_bytes_max or BATCH_BYTES, QUICK_BATCH_BYTES if kit.quick else BATCH_BYTES)
        nbytes = material.fitting(adapter, 1 << 20)
        numbers = range(max(1, min(64, able.batch_keys_max, most // nbytes)))
        done = f"{len(numbers)} objects of {nbytes:,} bytes stored in one batch"
        expect_all_stored(adapter, items_of(numbers, nbytes))
        material.expect_exists(adapter, [material.key(n) for n in numbers], [True] * len(numbers), done)
        outcomes, contents = load_all(adapter, numbers, nbytes)
        for number, outcome, found in zip(numbers, outcomes, contents, strict=True):
            material.expect_result(outcome, Result.DONE, f"{done} and loaded in one, for object {number}")
            expected = material.content(number, nbytes)
            assert found == expected, f"{done}, object {number}: {material.difference(found, expected)}"

    def test_an_object_that_is_too_large_fails_alone(self, adapter: L2Adapter) -> None:
        """The objects before and after it in the batch are stored."""
        able = adapter.capabilities
        if able.object_bytes_max is None or able.batch_keys_max < 2:
            not_claimed("object_bytes_max, and batches of two")
        if able.object_bytes_max >= (able.batch_bytes_max or BATCH_BYTES):
            not_claimed("batches in which such an object has others beside it")
        large = bytes(able.object_bytes_max + 1)
        for at, numbers in ((1, (1, 2)), (0, (3, 4))):
            items = items_of(numbers)
            items[at] = StoreItem(items[at].key, [memoryview(large)])
            outcomes = adapter.store(items, material.soon())
            assert len(outcomes) == 2, f"a store of 2 objects gave {len(outcomes)} answers"
            done = f"one of two objects has a byte more than object_bytes_max, the {('first', 'second')[at]}"
            material.expect_result(outcomes[1 - at], Result.DONE, f"{done}: for the other one")
            refused = outcomes[at].result in (Result.FAILED, Result.FULL)
            assert refused, f"{done}, and it was answered {material.seen(outcomes[at])}: FAILED or FULL"
            there = [position != at for position in range(2)]
            material.expect_exists(adapter, [item.key for item in items], there, done)

    def test_a_key_that_is_named_twice_is_answered_twice(self, adapter: L2Adapter) -> None:
        """The kernel names a key once in a batch. A caller that names it twice gets two answers, as from two calls;
        after two stores under one key either object may remain, whole."""
        if adapter.capabilities.batch_keys_max < 3:
            not_claimed("batches of three")
        one, other = material.key(1), material.key(2)
        material.expect_stored(adapter, one, material.content(1, SIZE))
        material.expect_exists(adapter, [one, other, one], [True, False, True], "a key named twice in a batch")
        outcomes, contents = load_all(adapter, [1, 2, 1])
        for outcome, wanted in zip(outcomes, (Result.DONE, Result.MISS, Result.DONE), strict=True):
            material.expect_result(outcome, wanted, "a key named twice in a load")
        for found in (contents[0], contents[2]):
            wrong = material.difference(found, material.content(1, SIZE))
            assert found == material.content(1, SIZE), f"of a key named twice in a load, one answer came with {wrong}"
        versions = [material.content(number, size) for number, size in ((3, SIZE), (4, SIZE // 2))]
        expect_all_stored(adapter, [StoreItem(other, [memoryview(version)]) for version in versions])
        outcome, found = material.load(adapter, other, SIZE)
        material.expect_result(outcome, Result.DONE, "two objects stored under one key in one batch")
        assert found[: outcome.nbytes] in versions, "two objects stored under one key in one batch: it is neither"
        if adapter.capabilities.delete:
            material.expect_deleted(adapter, [one, other, one], "a key named twice in a delete")
            material.expect_exists(adapter, [one, other], [False, False], "a key named twice in a delete")

    def test_it_behaves_as_a_dictionary(self, adapter: L2Adapter, kit: Kit) -> None:
        run_machine(adapter, runs=_machine_runs(adapter, kit), shortest=not kit.quick)


def _machine_runs(adapter: L2Adapter, kit: Kit) -> int:
    """Each run has a hundred calls: at the quick speed a slow medium gets fewer runs."""
    if not kit.quick:
        return 40
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        adapter.exists(
            [material.key(number) for number in range(min(6, adapter.capabilities.batch_keys_max))], material.soon()
        )
        took_s.append(time.monotonic() - began_s)
    return 12 if min(took_s) < SLOW_S else 4
