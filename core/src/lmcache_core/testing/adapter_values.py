"""One object: what goes in comes out, and the buffers are the caller's."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import ClassVar

import pytest

from lmcache_core.testing import material
from lmcache_core.testing.contract import Contract
from lmcache_core.tiers.contract import Capabilities, L2Adapter, LoadItem, Result, StoreItem

HEADER_BYTES = 4096  # as the kernel's own objects have
_HUGE_BYTES = 256 << 20  # a declared largest object beyond this is taken at its word


class ValueTests(Contract):
    """Store, exists, load and delete of single objects."""

    largest_object_bytes: ClassVar[int]

    def test_it_is_an_adapter_that_says_what_it_can_do(self, adapter: L2Adapter) -> None:
        assert isinstance(adapter, L2Adapter)
        assert isinstance(adapter.capabilities, Capabilities)
        assert adapter.capabilities.key_bytes_max >= 44, "the kernel's keys have 44 bytes"
        assert adapter.capabilities.batch_keys_max >= 1

    @pytest.mark.parametrize("nbytes", [1, 7, 511, 4096, 4097, 65536, 1 << 20])
    def test_what_was_stored_is_read_back(self, adapter: L2Adapter, nbytes: int) -> None:
        header, payload = material.content(1, HEADER_BYTES), material.content(2, nbytes)
        assert material.store(adapter, material.key(1), header, payload).result is Result.DONE
        assert list(adapter.exists([material.key(1)], material.soon())) == [True]
        outcome, found = material.load(adapter, material.key(1), HEADER_BYTES, nbytes)
        assert (outcome.result, outcome.nbytes) == (Result.DONE, HEADER_BYTES + nbytes), outcome
        assert found == header + payload

    @pytest.mark.parametrize("cuts", [(0,), (1,), (4096,), (9999,), (10_000,), (1, 2, 3), (0, 5000, 5000)])
    def test_an_object_does_not_remember_how_its_buffers_were_cut(
        self, adapter: L2Adapter, cuts: Sequence[int]
    ) -> None:
        whole = material.content(3, 10_000)
        edges = [0, *cuts, len(whole)]
        parts = [whole[start:end] for start, end in itertools.pairwise(edges)]
        assert material.store(adapter, material.key(1), *parts).result is Result.DONE
        for sizes in ([len(whole)], [len(part) for part in parts], [4096, len(whole) - 4096], [1, len(whole) - 1]):
            outcome, found = material.load(adapter, material.key(1), *sizes)
            assert (outcome.result, outcome.nbytes) == (Result.DONE, len(whole)), (sizes, outcome)
            assert found == whole, sizes

    def test_a_miss_is_a_value(self, adapter: L2Adapter) -> None:
        material.store(adapter, material.key(1), b"another object")
        outcome, _ = material.load(adapter, material.key(2), HEADER_BYTES, 100)
        assert outcome.result is Result.MISS
        assert list(adapter.exists([material.key(2)], material.soon())) == [False]

    @pytest.mark.parametrize(("first_bytes", "second_bytes"), [(5000, 5000), (9000, 100), (100, 9000), (5000, 0)])
    def test_a_second_store_replaces_the_first(self, adapter: L2Adapter, first_bytes: int, second_bytes: int) -> None:
        material.store(adapter, material.key(1), material.content(1, first_bytes))
        second = material.content(2, second_bytes)
        assert material.store(adapter, material.key(1), second).result is Result.DONE
        outcome, found = material.load(adapter, material.key(1), 9000)
        assert (outcome.result, outcome.nbytes) == (Result.DONE, second_bytes), outcome
        assert found[:second_bytes] == second

    def test_an_empty_object_is_an_object(self, adapter: L2Adapter) -> None:
        assert material.store(adapter, material.key(1), b"").result is Result.DONE
        assert material.store(adapter, material.key(2), b"", b"").result is Result.DONE
        assert list(adapter.exists([material.key(1), material.key(2)], material.soon())) == [True, True]
        for number, sizes in ((1, (0,)), (1, (100,)), (2, (0, 0)), (2, (10, 10))):
            outcome, _ = material.load(adapter, material.key(number), *sizes)
            assert (outcome.result, outcome.nbytes) == (Result.DONE, 0), (sizes, outcome)

    def test_the_largest_object(self, adapter: L2Adapter) -> None:
        declared = adapter.capabilities.object_bytes_max
        limit = declared if declared is not None and declared <= _HUGE_BYTES else None
        largest = self.largest_object_bytes if limit is None else limit
        whole = material.content(1, largest)
        assert material.store(adapter, material.key(1), whole).result is Result.DONE
        assert material.holds(adapter, material.key(1), whole)
        if limit is not None:
            refused = material.store(adapter, material.key(2), whole, b"one byte more")
            assert refused.result in (Result.FAILED, Result.FULL), refused
            assert not refused.retryable, "no second try makes an object smaller"
            assert list(adapter.exists([material.key(2)], material.soon())) == [False]

    def test_difficult_keys(self, adapter: L2Adapter) -> None:
        longest = adapter.capabilities.key_bytes_max
        keys = [key for key in (*material.DIFFICULT_KEYS, b"k" * longest, b"\xff" * longest) if len(key) <= longest]
        for number, key in enumerate(keys):
            assert material.store(adapter, key, b"%d of " % number + key).result is Result.DONE, key
        assert list(adapter.exists(keys[:32], material.soon())) == [True] * len(keys[:32])
        for number, key in enumerate(keys):
            assert material.holds(adapter, key, b"%d of " % number + key), key
        if adapter.capabilities.delete:
            for key in keys:
                assert adapter.delete([key], material.soon())[0].result is Result.DONE, key
                assert list(adapter.exists([key], material.soon())) == [False], key

    def test_keys_that_resemble_each_other_do_not_meet(self, adapter: L2Adapter) -> None:
        for one, other in material.SIMILAR_KEYS:
            material.store(adapter, one, b"content of the one")
            assert list(adapter.exists([other], material.soon())) == [False], (one, other)
            material.store(adapter, other, b"content of the other")
            assert material.holds(adapter, one, b"content of the one"), (one, other)
            assert material.holds(adapter, other, b"content of the other"), (one, other)
            if adapter.capabilities.delete:
                adapter.delete([one], material.soon())
                assert list(adapter.exists([one, other], material.soon())) == [False, True], (one, other)
                adapter.delete([other], material.soon())

    def test_an_object_larger_than_the_buffers_is_damaged(self, adapter: L2Adapter) -> None:
        material.store(adapter, material.key(1), material.content(1, 5000))
        for sizes in ((4096, 903), (4999,), (1,), (0,)):
            # Stored anew each time: an adapter may put an object aside that it has found to be damaged.
            material.store(adapter, material.key(1), material.content(1, 5000))
            outcome, _ = material.load(adapter, material.key(1), *sizes)
            assert outcome.result is Result.DAMAGED, (sizes, outcome)

    def test_an_object_smaller_than_the_buffers_says_its_length(self, adapter: L2Adapter) -> None:
        whole = material.content(1, 5000)
        material.store(adapter, material.key(1), whole)
        outcome, found = material.load(adapter, material.key(1), HEADER_BYTES, 65536)
        assert (outcome.result, outcome.nbytes) == (Result.DONE, 5000), outcome
        assert found[:5000] == whole

    # --- buffers --------------------------------------------------------------------------------------------
    def test_the_source_is_not_written_to(self, adapter: L2Adapter) -> None:
        header, payload = bytearray(material.content(1, 4096)), bytearray(material.content(2, 50_000))
        material.store(adapter, material.key(1), header, payload)  # type: ignore[arg-type]  # writable on purpose
        assert bytes(header) == material.content(1, 4096)
        assert bytes(payload) == material.content(2, 50_000)

    def test_the_source_may_be_read_only(self, adapter: L2Adapter) -> None:
        views = [memoryview(material.content(n, 5000)).toreadonly() for n in (1, 2)]
        outcome = adapter.store([StoreItem(material.key(1), views)], material.soon())[0]
        assert outcome.result is Result.DONE
        assert material.holds(adapter, material.key(1), material.content(1, 5000) + material.content(2, 5000))

    def test_the_source_is_not_kept(self, adapter: L2Adapter) -> None:
        source = bytearray(material.content(1, 50_000))
        kept = _store_and_forget(adapter, source)
        gc.collect()
        assert kept() is None, "a view of the source is still referred to after the store has returned"
        source[:] = material.content(2, 50_000)  # the pool's slot is someone else's by now
        assert material.holds(adapter, material.key(1), material.content(1, 50_000))
        _assert_free(source)

    def test_the_target_is_not_kept(self, adapter: L2Adapter) -> None:
        material.store(adapter, material.key(1), material.content(1, 50_000))
        target = bytearray(50_000)
        kept = _load_and_forget(adapter, target)
        assert bytes(target) == material.content(1, 50_000)
        gc.collect()
        assert kept() is None, "a view of the target is still referred to after the load has returned"
        target[:] = bytes(50_000)
        assert material.holds(adapter, material.key(1), material.content(1, 50_000))
        assert bytes(target) == bytes(50_000), "a target was written to after the load had returned"
        _assert_free(target)

    def test_only_the_target_is_written_to(self, adapter: L2Adapter) -> None:
        material.store(adapter, material.key(1), material.content(1, 5000))
        memory = bytearray([material.FILL]) * 9000
        target = memoryview(memory)[1000:8000]
        outcome = adapter.load([LoadItem(material.key(1), [target[:3], target[3:]])], material.soon())[0]
        assert (outcome.result, outcome.nbytes) == (Result.DONE, 5000), outcome
        assert bytes(memory[1000:6000]) == material.content(1, 5000)
        assert set(memory[:1000]) | set(memory[8000:]) == {material.FILL}, "bytes beside the target were changed"

    # --- delete ---------------------------------------------------------------------------------------------
    def test_deletes_are_idempotent(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.delete:
            pytest.skip("the adapter does not claim delete")
        material.store(adapter, material.key(1), b"object")
        for _ in range(3):
            assert adapter.delete([material.key(1)], material.soon())[0].result is Result.DONE
            assert list(adapter.exists([material.key(1)], material.soon())) == [False]
            assert material.load(adapter, material.key(1), 100)[0].result is Result.MISS
        assert adapter.delete([material.key(2)], material.soon())[0].result is Result.DONE, "it never was there"
        material.store(adapter, material.key(1), b"again")
        assert material.holds(adapter, material.key(1), b"again")

    def test_what_is_set_aside_is_not_there_any_more(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.delete:
            pytest.skip("the adapter does not claim delete")
        material.store(adapter, material.key(1), b"object")
        for _ in range(2):
            assert adapter.set_aside([material.key(1)], material.soon())[0].result is Result.DONE
            assert material.load(adapter, material.key(1), 100)[0].result is Result.MISS
        material.store(adapter, material.key(1), b"again")
        assert material.holds(adapter, material.key(1), b"again")


def _store_and_forget(adapter: L2Adapter, source: bytearray) -> weakref.ref[memoryview]:
    view = memoryview(source)
    adapter.store([StoreItem(material.key(1), [view])], material.soon())
    return weakref.ref(view)


def _load_and_forget(adapter: L2Adapter, target: bytearray) -> weakref.ref[memoryview]:
    view = memoryview(target)
    adapter.load([LoadItem(material.key(1), [view])], material.soon())
    return weakref.ref(view)


def _assert_free(buffer: bytearray) -> None:
    try:
        buffer.append(0)  # refused while anyone exports the buffer
    except BufferError as error:
        raise AssertionError("a buffer of the caller is still exported after the call has returned") from error
