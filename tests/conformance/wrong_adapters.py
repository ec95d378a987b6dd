"""Adapters with one realistic fault each, and the contract test that has to notice it (`caught_by`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_mock.memory import MemoryAdapter
from lmcache_testing import Backdoor, L2AdapterContract

DONE = Outcome(Result.DONE)


class Wrong(L2AdapterContract):
    caught_by: ClassVar[str]
    faulty: ClassVar[type[MemoryAdapter]]

    hang_deadline_s = 0.2
    hang_slack_s = 0.4

    @pytest.fixture
    def adapter(self, adapter_context: AdapterContext) -> MemoryAdapter:
        return self.faulty(None, adapter_context)

    @pytest.fixture
    def backdoor(self, adapter: MemoryAdapter) -> Backdoor:
        return Door(adapter)


class Door(Backdoor):
    def __init__(self, adapter: MemoryAdapter) -> None:
        self._objects = adapter.objects

    def read(self, key: bytes) -> bytes | None:
        return bytes(self._objects[key][0]) if key in self._objects else None

    def write(self, key: bytes, content: bytes) -> None:
        self._objects[key] = (content, 0.0)

    def remove(self, key: bytes) -> None:
        del self._objects[key]


class TestReturnsTheNeighbour(Wrong):
    caught_by = "test_results_come_in_the_order_of_the_requests"

    class faulty(MemoryAdapter):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().load(items, deadline)
            found = [n for n, outcome in enumerate(outcomes) if outcome.result is Result.DONE]
            if len(found) > 1:  # a reply of the pipeline is taken for the one before it
                super().load([LoadItem(items[found[1]].key, items[found[0]].buffers)], deadline)
            return outcomes


class TestKeepsTheSource(Wrong):
    caught_by = "test_the_source_is_not_kept"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            whole: Any = item.buffers[0] if len(item.buffers) == 1 else b"".join(item.buffers)
            self.objects[item.key] = (whole, 0.0)
            return Outcome(Result.DONE, item.nbytes)


class TestKeepsTheTarget(Wrong):
    caught_by = "test_the_target_is_not_kept"

    class faulty(MemoryAdapter):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            self.last = list(items)  # "for the retry"
            return super().load(items, deadline)


class TestWritesToTheSource(Wrong):
    caught_by = "test_the_source_is_not_written_to"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            if not item.buffers[0].readonly and item.buffers[0].nbytes:
                item.buffers[0][0] = 1  # a mark of its own in the header
            return super().store_one(item, deadline)


class TestSaysDoneForAShortWrite(Wrong):
    caught_by = "test_what_was_stored_is_read_back"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.objects[item.key] = (b"".join(item.buffers)[:65536], 0.0)  # one call of send()
            return Outcome(Result.DONE, item.nbytes)


class TestForgetsAllBuffersButTwo(Wrong):
    caught_by = "test_an_object_does_not_remember_how_its_buffers_were_cut"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            return super().store_one(StoreItem(item.key, item.buffers[:2]), deadline)


class TestAnswersInTheOrderOfTheKeys(Wrong):
    caught_by = "test_results_come_in_the_order_of_the_requests"

    class faulty(MemoryAdapter):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return super().exists(sorted(keys), deadline)


class TestRaisesForAMiss(Wrong):
    caught_by = "test_a_miss_is_a_value"

    class faulty(MemoryAdapter):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            for item in items:
                self.objects[item.key]
            return super().load(items, deadline)


class TestOneMissFailsTheBatch(Wrong):
    caught_by = "test_a_batch_may_succeed_in_part"

    class faulty(MemoryAdapter):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().load(items, deadline)
            bad = next((outcome for outcome in outcomes if outcome.result is not Result.DONE), None)
            return outcomes if bad is None else [bad] * len(items)


class TestCutsWhatDoesNotFit(Wrong):
    caught_by = "test_an_object_larger_than_the_buffers_is_damaged"

    class faulty(MemoryAdapter):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            room = sum(buffer.nbytes for buffer in item.buffers)
            with self.lock:
                if item.key in self.objects:
                    content, used_at_s = self.objects[item.key]
                    self.objects[item.key] = (content[:room], used_at_s)
            return super().load_one(item, deadline)


class TestCallsTheWholeTargetLoaded(Wrong):
    caught_by = "test_a_torn_object_is_never_called_whole"

    class faulty(MemoryAdapter):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            outcome = super().load_one(item, deadline)
            return outcome._replace(nbytes=sum(buffer.nbytes for buffer in item.buffers))


class TestLeavesTheTailOfTheFormerObject(Wrong):
    caught_by = "test_a_second_store_replaces_the_first"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            content = b"".join(item.buffers)
            former = self.objects.get(item.key, (b"", 0.0))[0]  # opened without O_TRUNC
            self.objects[item.key] = (content + former[len(content) :], 0.0)
            return Outcome(Result.DONE, item.nbytes)


class TestKeepsTheFirstOfTwoStores(Wrong):
    caught_by = "test_a_second_store_replaces_the_first"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            return Outcome(Result.DONE, item.nbytes) if item.key in self.objects else super().store_one(item, deadline)


class TestLosesEmptyObjects(Wrong):
    caught_by = "test_an_empty_object_is_an_object"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            return super().store_one(item, deadline) if item.nbytes else DONE


class TestTakesKeysForText(Wrong):
    caught_by = "test_difficult_keys"

    class faulty(MemoryAdapter):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return super().exists([key.decode(errors="ignore").strip().encode() for key in keys], deadline)


class TestCutsKeys(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(MemoryAdapter):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return super().exists([key.split(b"\0")[0] for key in keys], deadline)


class TestRaisesForADeleteOfNothing(Wrong):
    caught_by = "test_deletes_are_idempotent"

    class faulty(MemoryAdapter):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            for key in keys:
                del self.objects[key]
            return [DONE] * len(keys)


class TestDeletesTheNameOnly(Wrong):
    caught_by = "test_the_medium_holds_what_was_stored_and_nothing_after_a_delete"

    class faulty(MemoryAdapter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.hidden: set[bytes] = set()

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            self.hidden |= set(keys)
            return [DONE] * len(keys)

        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return [key in self.objects and key not in self.hidden for key in keys]


class TestScanMissesOne(Wrong):
    caught_by = "test_a_scan_sees_exactly_what_is_there"

    class faulty(MemoryAdapter):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage(page.entries[:-1] if len(page.entries) > 10 else page.entries, page.cursor)


class TestScanGivesOneTwice(Wrong):
    caught_by = "test_a_scan_sees_exactly_what_is_there"

    class faulty(MemoryAdapter):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(None, deadline)
            middle = len(page.entries) // 2
            if cursor is None and middle:
                return ScanPage(page.entries[: middle + 1], "more")  # the page's last is the next one's first
            return ScanPage(page.entries[middle:], None)


class TestLosesCountOfItsBytes(Wrong):
    caught_by = "test_usage_follows_what_is_stored"

    class faulty(MemoryAdapter):
        stored_bytes = 0

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.stored_bytes += item.nbytes
            return super().store_one(item, deadline)

        def usage(self) -> Usage:
            return super().usage()._replace(bytes_used=self.stored_bytes)  # deletes are not counted


class TestWorksAfterClose(Wrong):
    caught_by = "test_use_after_close_raises_a_tier_error"

    class faulty(MemoryAdapter):
        def close(self) -> None:
            self.objects.clear()


class TestCannotBeClosedTwice(Wrong):
    caught_by = "test_close_is_idempotent"

    class faulty(MemoryAdapter):
        def close(self) -> None:
            self.check_open()
            super().close()


class TestSharesAScratchBuffer(Wrong):
    caught_by = "test_eight_threads_on_shared_keys"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.scratch = b"".join(item.buffers)
            time.sleep(0.0005)  # the call to the medium
            return super().store_one(StoreItem(item.key, [memoryview(self.scratch)]), deadline)


class TestTrustsItsOwnCache(Wrong):
    caught_by = "test_what_someone_else_removed_is_a_miss"

    class faulty(MemoryAdapter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.known: set[bytes] = set()

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.known.add(item.key)
            return super().store_one(item, deadline)

        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return [key in self.known for key in keys]


class TestIsNotDurable(Wrong):
    caught_by = "test_a_fresh_handle_sees_what_the_old_one_saw"

    class faulty(MemoryAdapter):
        capabilities: ClassVar[Capabilities] = Capabilities(durable=True)

    @pytest.fixture
    def reopen(self, adapter_context: AdapterContext) -> Callable[[], MemoryAdapter]:
        return lambda: self.faulty(None, adapter_context)


class TestClaimsWithoutAFixture(Wrong):
    caught_by = "test_a_fresh_handle_sees_what_the_old_one_saw"

    class faulty(MemoryAdapter):
        capabilities: ClassVar[Capabilities] = Capabilities(durable=True)


class TestWaitsForItsLibrary(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"
    hang_slack_s = 0.5

    class faulty(MemoryAdapter):
        hangs = False

        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            if self.hangs:
                time.sleep(1.5)  # the library's own time-out
                raise TierError("timed out")
            return super().exists(keys, deadline)

    @pytest.fixture
    def hang(self, adapter: L2Adapter) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def hanging() -> Iterator[None]:
            adapter.hangs = True
            yield
            adapter.hangs = False

        return hanging()


class TestGivesUpForGoodWhenLate(Wrong):
    caught_by = "test_what_is_past_its_deadline_is_answered_and_may_be_tried_again"

    class faulty(MemoryAdapter):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().store(items, deadline)
            return [outcome._replace(retryable=False) for outcome in outcomes]


class TestFillsTheMediumWithAnError(Wrong):
    caught_by = "test_a_full_medium_is_an_ordinary_answer"

    class faulty(MemoryAdapter):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            outcome = super().store_one(item, deadline)
            return outcome if outcome.result is Result.DONE else Outcome(Result.FAILED, error="no room", retryable=True)

    @pytest.fixture
    def small_adapter(self) -> MemoryAdapter:
        return self.faulty(medium_bytes=2 << 20)


class LoadsOnly(MemoryAdapter):
    """One that never stores, as it should be."""

    capabilities = Capabilities(stores=False, delete=False, scan=False)

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        return [Outcome(Result.FAILED, error="it stores nothing")] * len(items)


class WrongLoadsOnly(Wrong):
    """An adapter that never stores, with a fault."""

    @pytest.fixture
    def filled(self, adapter: MemoryAdapter) -> Callable[[int], dict[bytes, bytes]]:
        def put(count: int) -> dict[bytes, bytes]:
            objects = {bytes([number + 1]) * 44: bytes([number]) * 9000 for number in range(count)}
            adapter.objects.update({key: (content, 0.0) for key, content in objects.items()})
            return objects

        return put


class TestStoresAllTheSame(WrongLoadsOnly):
    caught_by = "test_a_store_is_refused_for_good_and_changes_nothing"

    class faulty(LoadsOnly):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            return MemoryAdapter.store(self, items, deadline)


class TestMayStoreLater(WrongLoadsOnly):
    caught_by = "test_a_store_is_refused_for_good_and_changes_nothing"

    class faulty(LoadsOnly):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            return [each._replace(retryable=True) for each in super().store(items, deadline)]


class TestFindsWhatNobodyPutThere(WrongLoadsOnly):
    caught_by = "test_what_others_put_there_is_found_and_loaded_whole"

    class faulty(LoadsOnly):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            self.check_open()
            return [True] * len(keys)


class TestLoadsTheHeaderAlone(WrongLoadsOnly):
    caught_by = "test_what_others_put_there_is_found_and_loaded_whole"

    class faulty(LoadsOnly):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            for item in items:
                item.buffers[-1][:] = bytes(item.buffers[-1].nbytes)
            rooms = [LoadItem(item.key, [*item.buffers[:-1], memoryview(bytearray(1 << 20))]) for item in items]
            return super().load(rooms, deadline)


class TestWaitsWithoutTime(WrongLoadsOnly):
    caught_by = "test_a_call_without_time_comes_back_at_once"

    class faulty(LoadsOnly):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            time.sleep(2.5)
            return super().load(items, deadline)
