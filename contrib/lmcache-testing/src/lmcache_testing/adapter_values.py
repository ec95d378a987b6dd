"""One object: a load returns what was stored, and the buffers stay the caller's."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import ClassVar

import pytest

from lmcache_core.tiers.contract import Capabilities, L2Adapter, LoadItem, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.contract import Contract, not_claimed

HEADER_BYTES = 4096  # as in the kernel's own objects
_HUGE_BYTES = 256 << 20  # a declared maximum beyond this is not tested


class ValueTests(Contract):
    """Store, exists, load and delete of single objects."""

    largest_object_bytes: ClassVar[int]

    def test_it_is_an_adapter_that_says_what_it_can_do(self, adapter: L2Adapter) -> None:
        assert isinstance(adapter, L2Adapter), f"a {type(adapter).__name__} is no L2Adapter"
        able = adapter.capabilities
        assert isinstance(able, Capabilities), f"its capabilities are a {type(able).__name__}"
        assert able.key_bytes_max >= 44, f"it takes keys of {able.key_bytes_max} bytes, and the kernel's have 44"
        assert able.batch_keys_max >= 1, f"it takes batches of {able.batch_keys_max} keys"
        largest = able.object_bytes_max
        assert largest is None or largest > HEADER_BYTES, (
            f"its largest object has {largest:,} bytes, and the kernel's header alone has {HEADER_BYTES:,}"
        )

    @pytest.mark.parametrize("nbytes", [1, 7, 511, 4096, 4097, 65536, 1 << 20])
    def test_what_was_stored_is_read_back(self, adapter: L2Adapter, nbytes: int) -> None:
        nbytes = material.fitting(adapter, HEADER_BYTES + nbytes) - HEADER_BYTES
        header, payload = material.content(1, HEADER_BYTES), material.content(2, nbytes)
        material.expect_stored(adapter, material.key(1), header, payload)
        material.expect_exists(adapter, [material.key(1)], [True], "after a store")
        done = f"after a store of a header and {nbytes:,} bytes"
        material.expect_holds(adapter, material.key(1), header + payload, done, HEADER_BYTES, nbytes)

    @pytest.mark.parametrize("cuts", [(0,), (1,), (4096,), (9999,), (10_000,), (1, 2, 3), (0, 5000, 5000)])
    def test_an_object_does_not_remember_how_its_buffers_were_cut(
        self, adapter: L2Adapter, cuts: Sequence[int]
    ) -> None:
        whole = material.content(3, 10_000)
        edges = [0, *cuts, len(whole)]
        parts = [whole[start:end] for start, end in itertools.pairwise(edges)]
        material.expect_stored(adapter, material.key(1), *parts)
        for sizes in ([len(whole)], [len(part) for part in parts], [4096, len(whole) - 4096], [1, len(whole) - 1]):
            done = f"stored from buffers cut at {cuts} and loaded into buffers of {sizes} bytes"
            material.expect_holds(adapter, material.key(1), whole, done, *sizes)

    def test_an_object_may_come_in_many_buffers(self, adapter: L2Adapter) -> None:
        """More than the system takes in one call (IOV_MAX: 1,024), or none at all."""
        whole = material.content(5, 4500)
        material.expect_stored(adapter, material.key(1), *(whole[at : at + 3] for at in range(0, 4500, 3)))
        for sizes in ([4500], [3] * 1500):
            done = f"stored from 1,500 buffers and loaded into {len(sizes):,}"
            material.expect_holds(adapter, material.key(1), whole, done, *sizes)
        material.expect_stored(adapter, material.key(2))
        material.expect_holds(adapter, material.key(2), b"", "stored from no buffers at all", 10)

    def test_a_miss_is_a_value(self, adapter: L2Adapter) -> None:
        material.expect_stored(adapter, material.key(1), b"another object")
        material.expect_miss(adapter, material.key(2), "after a store of another key")
        material.expect_exists(adapter, [material.key(2)], [False], "after a store of another key")

    @pytest.mark.parametrize(("first_bytes", "second_bytes"), [(5000, 5000), (9000, 100), (100, 9000), (5000, 0)])
    def test_a_second_store_replaces_the_first(self, adapter: L2Adapter, first_bytes: int, second_bytes: int) -> None:
        material.expect_stored(adapter, material.key(1), material.content(1, first_bytes))
        second = material.content(2, second_bytes)
        material.expect_stored(adapter, material.key(1), second)
        done = f"stored with {first_bytes:,} bytes and then with {second_bytes:,}"
        material.expect_holds(adapter, material.key(1), second, done, 9000)

    def test_an_empty_object_is_an_object(self, adapter: L2Adapter) -> None:
        material.expect_stored(adapter, material.key(1), b"")
        material.expect_stored(adapter, material.key(2), b"", b"")
        material.expect_exists(adapter, [material.key(1), material.key(2)], [True, True], "after stores of no bytes")
        for number, sizes in ((1, (0,)), (1, (100,)), (2, (0, 0)), (2, (10, 10))):
            done = f"stored with no bytes and loaded into buffers of {sizes} bytes"
            material.expect_holds(adapter, material.key(number), b"", done, *sizes)

    def test_the_largest_object(self, adapter: L2Adapter) -> None:
        declared = adapter.capabilities.object_bytes_max
        limit = declared if declared is not None and declared <= _HUGE_BYTES else None
        largest = self.largest_object_bytes if limit is None else limit
        whole = material.content(1, largest)
        material.expect_stored(adapter, material.key(1), whole)
        material.expect_holds(adapter, material.key(1), whole, "after a store of the largest object")
        if limit is not None:
            refused = material.store(adapter, material.key(2), whole, b"one byte more")
            assert refused.result in (Result.FAILED, Result.FULL), (
                f"a store of 13 bytes more than object_bytes_max was answered {material.seen(refused)}: FAILED or FULL"
            )
            assert not refused.retryable, "a store beyond object_bytes_max may be tried again, and it stays as large"
            material.expect_exists(adapter, [material.key(2)], [False], "after a store that was refused")

    def test_difficult_keys(self, adapter: L2Adapter) -> None:
        longest = adapter.capabilities.key_bytes_max
        tried = dict.fromkeys((*material.DIFFICULT_KEYS, b"k" * longest, b"\xff" * longest))
        keys = [key for key in tried if len(key) <= longest]
        for number, key in enumerate(keys):
            material.expect_stored(adapter, key, b"%d of " % number + key)
        some = keys[: min(32, adapter.capabilities.batch_keys_max)]
        material.expect_exists(adapter, some, [True] * len(some), "after stores of difficult keys")
        for number, key in enumerate(keys):
            material.expect_holds(adapter, key, b"%d of " % number + key, "after stores of difficult keys")
        if adapter.capabilities.delete:
            for key in keys:
                material.expect_deleted(adapter, [key], "after stores of difficult keys")
                material.expect_exists(adapter, [key], [False], "after its delete")

    def test_keys_that_resemble_each_other_do_not_meet(self, adapter: L2Adapter) -> None:
        longest = adapter.capabilities.key_bytes_max
        held: dict[bytes, bytes] = {}  # without delete, the objects of one pair are still there for the next
        for number, (one, other) in enumerate(material.similar_keys(longest)):
            for key, content in ((one, b"%d, the one" % number), (other, b"%d, the other" % number)):
                material.expect_stored(adapter, key, content)
                held[key] = content
                done = f"after a store of {material.shown(key)}"
                material.expect_exists(adapter, [one, other], [one in held, other in held], done)
            done = f"after stores of {material.shown(one)} and {material.shown(other)}"
            material.expect_holds(adapter, one, held[one], done)
            material.expect_holds(adapter, other, held[other], done)
            if adapter.capabilities.delete:
                material.expect_deleted(adapter, [one], done)
                material.expect_exists(adapter, [one, other], [False, True], f"after a delete of {material.shown(one)}")
                material.expect_deleted(adapter, [other], done)
                held.clear()

    def test_an_object_larger_than_the_buffers_is_damaged(self, adapter: L2Adapter) -> None:
        for sizes in ((4096, 903), (4999,), (1,), (0,)):
            # Stored again each time: an adapter may set an object aside once it has found it damaged.
            material.expect_stored(adapter, material.key(1), material.content(1, 5000))
            outcome, _ = material.load(adapter, material.key(1), *sizes)
            done = f"5,000 bytes stored, and loaded into buffers of {sizes} bytes"
            material.expect_result(outcome, Result.DAMAGED, done)

    def test_an_object_smaller_than_the_buffers_says_its_length(self, adapter: L2Adapter) -> None:
        whole = material.content(1, 5000)
        material.expect_stored(adapter, material.key(1), whole)
        done = "5,000 bytes stored, and loaded into buffers of 69,632"
        material.expect_holds(adapter, material.key(1), whole, done, HEADER_BYTES, 65536)

    # --- buffers --------------------------------------------------------------------------------------------
    def test_the_source_is_not_written_to(self, adapter: L2Adapter) -> None:
        before = material.content(1, 4096), material.content(2, 50_000)
        parts = [bytearray(part) for part in before]
        material.store(adapter, material.key(1), *parts)  # type: ignore[arg-type]  # writable on purpose
        for part, expected in zip(parts, before, strict=True):
            message = f"after its store, of a source {material.difference(bytes(part), expected)}"
            assert part == expected, message

    def test_the_source_may_be_read_only(self, adapter: L2Adapter) -> None:
        contents = [material.content(n, 5000) for n in (1, 2)]
        views = [memoryview(content).toreadonly() for content in contents]
        outcome = adapter.store([StoreItem(material.key(1), views)], material.soon())[0]
        material.expect_result(outcome, Result.DONE, "asked to store from read-only buffers")
        material.expect_holds(adapter, material.key(1), b"".join(contents), "stored from read-only buffers")

    def test_the_callers_views_stay_open(self, adapter: L2Adapter) -> None:
        """The caller goes on using a view that it lent: only the caller may release it, or the array behind it."""
        views = [memoryview(bytearray(material.content(1, 500))) for _ in range(2)]
        outcome = adapter.store([StoreItem(material.key(1), [views[0]])], material.soon())[0]
        material.expect_result(outcome, Result.DONE, "asked to store 500 bytes")
        material.expect_result(
            adapter.load([LoadItem(material.key(1), [views[1]])], material.soon())[0], Result.DONE, "asked to load them"
        )
        for view, call in zip(views, ("store", "load"), strict=True):
            try:
                view[0]
            except ValueError as error:
                raise AssertionError(f"after a {call}, the view that it was given is released: {error}") from None

    def test_the_source_is_not_kept(self, adapter: L2Adapter) -> None:
        source = bytearray(material.content(1, 50_000))
        kept = _store_and_forget(adapter, source)
        gc.collect()
        assert kept() is None, "a view of the source is still referred to after the store has returned"
        source[:] = material.content(2, 50_000)  # the pool's slot is someone else's by now
        done = "its source was used for other bytes after the store"
        material.expect_holds(adapter, material.key(1), material.content(1, 50_000), done)
        _assert_free(source)

    def test_the_target_is_not_kept(self, adapter: L2Adapter) -> None:
        whole = material.content(1, 50_000)
        material.expect_stored(adapter, material.key(1), whole)
        target = bytearray(50_000)
        kept = _load_and_forget(adapter, target)
        assert target == whole, f"after its load, of the target {material.difference(bytes(target), whole)}"
        gc.collect()
        assert kept() is None, "a view of the target is still referred to after the load has returned"
        target[:] = bytes(50_000)
        material.expect_holds(adapter, material.key(1), whole, "loaded a second time")
        assert not any(target), "a target was written to after the load had returned"
        _assert_free(target)

    def test_only_the_target_is_written_to(self, adapter: L2Adapter) -> None:
        whole = material.content(1, 5000)
        material.expect_stored(adapter, material.key(1), whole)
        memory = bytearray([material.FILL]) * 9000
        target = memoryview(memory)[1000:8000]
        outcome = adapter.load([LoadItem(material.key(1), [target[:3], target[3:]])], material.soon())[0]
        material.expect_result(outcome, Result.DONE, "asked to load into a part of a larger buffer")
        found = bytes(memory[1000:6000])
        assert outcome.nbytes == 5000, f"a load of 5,000 bytes said {outcome.nbytes:,}"
        assert found == whole, f"loaded into a part of a larger buffer, {material.difference(found, whole)}"
        beside = set(memory[:1000]) | set(memory[8000:])
        assert beside == {material.FILL}, "bytes beside the target were changed by a load"

    # --- delete ---------------------------------------------------------------------------------------------
    def test_deletes_are_idempotent(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.delete:
            not_claimed("delete")
        material.expect_stored(adapter, material.key(1), b"object")
        for time in ("once", "twice", "three times"):
            done = f"asked to delete it {time}"
            material.expect_deleted(adapter, [material.key(1)], done)
            material.expect_exists(adapter, [material.key(1)], [False], done)
            material.expect_miss(adapter, material.key(1), done)
        material.expect_deleted(adapter, [material.key(2)], "a key that never was there")
        material.expect_stored(adapter, material.key(1), b"again")
        material.expect_holds(adapter, material.key(1), b"again", "deleted and stored again")

    def test_what_is_set_aside_is_not_there_any_more(self, adapter: L2Adapter) -> None:
        if not adapter.capabilities.delete:
            not_claimed("delete")
        one, other = material.key(1), material.key(2)
        for key in (one, other):
            material.expect_stored(adapter, key, b"object")
        for time in ("once", "twice"):
            done = f"asked to set one of two aside, {time}"
            outcome = adapter.set_aside([one], material.soon())[0]
            material.expect_result(outcome, Result.DONE, done)
            material.expect_miss(adapter, one, done)
            material.expect_exists(adapter, [one, other], [False, True], done)
            material.expect_holds(adapter, other, b"object", done)
            if adapter.capabilities.scan:
                listed = [entry.key for entry in material.scan(adapter)]
                assert listed == [other], f"{done}: a scan gave {len(listed)} entries, and only the other one is there"
        material.expect_stored(adapter, material.key(1), b"again")
        material.expect_holds(adapter, material.key(1), b"again", "set aside and stored again")


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
        buffer.append(0)  # raises while anyone exports the buffer
    except BufferError as error:
        raise AssertionError("a buffer of the caller is still exported after the call has returned") from error
