"""Adapters on a medium that others use, too, with one realistic fault each, and the test that has to notice it.

Each of these passed the kit once, or is a neighbour of one that did.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_mock.memory import MemoryAdapter
from lmcache_testing import Backdoor, L2AdapterContract

DONE = Outcome(Result.DONE)
MISS = Outcome(Result.MISS)
HANG_S = 1000.0


class Shelf(MemoryAdapter):
    """Correct: a dictionary that all adapters of a test share. `state` is its trouble: hangs, locked, busy, gone."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True)
    shared_objects: ClassVar[MutableMapping[bytes, object]]
    state: ClassVar[dict[str, bool]]

    def __init__(self, settings: object = None, context: AdapterContext | None = None, **more: Any) -> None:
        super().__init__(settings, context, **more)
        if not more:
            self.objects = self.shared_objects

    def medium(self) -> str | None:
        return "the shelf" if self._medium_bytes is None else "a small shelf"

    # --- the medium's own trouble, which a correct adapter passes on
    def _ask(self, deadline: float) -> None:
        if self.state.get("gone"):
            raise TierError("the shelf is gone")
        if self.state.get("busy"):
            raise TierError("the shelf is asked too much")
        if self.state.get("hangs"):
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise TierError("the shelf does not answer")

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        self._ask(deadline)
        if self.state.get("locked"):
            return [Outcome(Result.FAILED, error="the shelf is locked", retryable=True)] * len(items)
        return super().store(items, deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self._ask(deadline)
        return super().exists(keys, deadline)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        self._ask(deadline)
        return super().load(items, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        self._ask(deadline)
        return super().delete(keys, deadline)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        self.check_open()
        self._ask(deadline)
        return super().scan(cursor, deadline)

    def usage(self) -> Usage:
        self.check_open()
        self._ask(time.monotonic())
        return super().usage()


class Door(Backdoor):
    def __init__(self, objects: dict[bytes, object]) -> None:
        self._objects = objects

    def read(self, key: bytes) -> bytes | None:
        return bytes(self._objects[key][0]) if key in self._objects else None

    def write(self, key: bytes, content: bytes) -> None:
        self._objects[key] = (content, 0.0)

    def remove(self, key: bytes) -> None:
        del self._objects[key]


@contextlib.contextmanager
def trouble(state: dict[str, bool], name: str) -> Iterator[None]:
    state[name] = True
    try:
        yield
    finally:
        state[name] = False


class Wrong(L2AdapterContract):
    """With every fixture that the kit knows."""

    caught_by: ClassVar[str]
    faulty: ClassVar[type[Shelf]] = Shelf
    hang_deadline_s = 0.2
    hang_slack_s = 0.4
    settle_s = 0.3

    @pytest.fixture
    def made(self, adapter_context: AdapterContext) -> Callable[[], Shelf]:
        state: dict[str, bool] = {}
        cls = type("Made", (self.faulty,), {"shared_objects": {}, "state": state})
        cls.__module__ = self.faulty.__module__
        return lambda: cls(None, adapter_context)

    @pytest.fixture
    def adapter(self, made: Callable[[], Shelf]) -> Iterator[Shelf]:
        with made() as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, made: Callable[[], Shelf]) -> Callable[[], Shelf]:
        return made

    @pytest.fixture
    def backdoor(self, adapter: Shelf) -> Backdoor:
        return Door(adapter.shared_objects)

    @pytest.fixture
    def unreachable(self, made: Callable[[], Shelf]) -> Iterator[Shelf]:
        with made() as adapter, trouble(adapter.state, "gone"):
            yield adapter

    @pytest.fixture
    def outage(self, adapter: Shelf) -> AbstractContextManager[None]:
        return trouble(adapter.state, "gone")

    @pytest.fixture
    def hang(self, adapter: Shelf) -> AbstractContextManager[None]:
        return trouble(adapter.state, "hangs")

    @pytest.fixture
    def stall(self, adapter: Shelf) -> AbstractContextManager[None]:
        return trouble(adapter.state, "stalls")

    @pytest.fixture
    def lock(self, adapter: Shelf) -> AbstractContextManager[None]:
        return trouble(adapter.state, "locked")

    @pytest.fixture
    def busy(self, adapter: Shelf) -> AbstractContextManager[None]:
        return trouble(adapter.state, "busy")

    @pytest.fixture
    def small_adapter(self, adapter: Shelf) -> Shelf:
        return type(adapter)(medium_bytes=2 << 20)


# --- leaks ----------------------------------------------------------------------------------------------------------
class TestLeavesAThreadBehind(Wrong):
    caught_by = "test_opening_and_closing_leaves_nothing_behind"

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            threading.Thread(target=time.sleep, args=(HANG_S,), name="heartbeat", daemon=True).start()


class TestStartsAThreadForEachCall(Wrong):
    caught_by = "test_use_takes_no_more_and_more"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            threading.Thread(target=time.sleep, args=(HANG_S,), name="reader", daemon=True).start()
            return super().load(items, deadline)


class TestLeavesItsConnectionOpen(Wrong):
    caught_by = "test_opening_and_closing_leaves_nothing_behind"
    kept: ClassVar[list[object]] = []

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            TestLeavesItsConnectionOpen.kept.append(socket.socketpair())  # close() forgets them


class TestKeepsItsDatabasesFileOpen(Wrong):
    caught_by = "test_opening_and_closing_leaves_nothing_behind"

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.file = os.open(os.devnull, os.O_RDONLY)


class TestLosesADescriptorForEachFailedOpen(Wrong):
    caught_by = "test_failures_leave_nothing_behind"

    class faulty(Shelf):
        def _ask(self, deadline: float) -> None:
            if self.state.get("gone"):
                os.open(os.devnull, os.O_RDONLY)
            super()._ask(deadline)


class TestLosesADescriptorForEachMiss(Wrong):
    caught_by = "test_use_takes_no_more_and_more"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            handle = os.open(os.devnull, os.O_RDONLY)
            outcome = super().load_one(item, deadline)
            if outcome.result is Result.DONE:  # the early return leaves it open
                os.close(handle)
            return outcome


class TestKeepsAConnectionOfEachThread(Wrong):
    caught_by = "test_opening_and_closing_leaves_nothing_behind"
    connections: ClassVar[dict[bytes, object]] = {}

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            mine = (id(self), threading.get_ident())
            TestKeepsAConnectionOfEachThread.connections.setdefault(mine, (self, socket.socketpair()))
            return super().exists(keys, deadline)


# --- other servers --------------------------------------------------------------------------------------------------
class TestSaysDoneWhileTheMediumIsLocked(Wrong):
    caught_by = "test_a_store_that_the_medium_refuses_is_not_done"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().store(items, deadline)
            return [DONE if "locked" in outcome.error else outcome for outcome in outcomes]  # "it will be flushed"


class TestWaitsForTheLockItself(Wrong):
    caught_by = "test_a_store_that_the_medium_refuses_is_not_done"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            for _ in range(50):  # the library's busy time-out: 5 s
                if self.state.get("locked"):
                    time.sleep(0.1)
            return super().store(items, deadline)


class TestRemembersANo(Wrong):
    caught_by = "test_no_answer_about_what_is_there_is_kept"

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.absent: set[bytes] = set()

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            self.absent -= {item.key for item in items}
            return super().store(items, deadline)

        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            found = super().exists([key for key in keys if key not in self.absent], deadline)
            answers = iter(found)
            told = [key not in self.absent and next(answers) for key in keys]
            self.absent |= {key for key, there in zip(keys, told, strict=True) if not there}
            return told


class TestRemembersAYes(Wrong):
    caught_by = "test_two_handles_agree_while_both_are_open"

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.present: set[bytes] = set()

        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            told = [
                key in self.present or super(type(self).__mro__[1], self).exists([key], deadline)[0] for key in keys
            ]
            self.present |= {key for key, there in zip(keys, told, strict=True) if there}
            return told

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            self.present |= {item.key for item in items}
            return super().store(items, deadline)

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            self.present -= set(keys)
            return super().delete(keys, deadline)


class TestKeepsWhatItLoaded(Wrong):
    caught_by = "test_no_answer_about_what_is_there_is_kept"

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.cached: dict[bytes, object] = {}

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.cached.pop(item.key, None)
            return super().store_one(item, deadline)

        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            mine = self.cached.setdefault(item.key, self.objects.get(item.key))
            theirs = self.objects.get(item.key)
            if mine is not None and theirs is not None:
                self.objects[item.key] = mine
            outcome = super().load_one(item, deadline)
            if theirs is not None:
                self.objects[item.key] = theirs
            return outcome


class TestHasNoNameForItsMedium(Wrong):
    caught_by = "test_the_medium_has_one_name_for_every_adapter_on_it"

    class faulty(Shelf):
        def medium(self) -> str | None:
            return None


class TestNamesItsMediumByItself(Wrong):
    caught_by = "test_the_medium_has_one_name_for_every_adapter_on_it"

    class faulty(Shelf):
        def medium(self) -> str | None:
            return f"shelf {id(self)}"


class TestNobodyLeadsOnceTheFirstIsGone(Wrong):
    caught_by = "test_someone_leads_and_another_once_that_one_is_gone"

    class faulty(Shelf):
        def try_to_lead(self) -> bool:
            return bool(self.shared_objects.setdefault("leader", self) is self)


class TestServesADamagedObjectFromMemory(Wrong):
    caught_by = "test_a_damaged_object_is_a_miss"

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.recent: dict[bytes, object] = {}

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            outcome = super().store_one(item, deadline)
            self.recent[item.key] = self.objects[item.key]
            return outcome

        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            if item.key in self.recent and item.key in self.objects:
                self.objects[item.key] = self.recent[item.key]
            return super().load_one(item, deadline)


# --- deadlines ------------------------------------------------------------------------------------------------------
class TestHasATimeoutOfItsOwnInExists(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return super().exists(keys, time.monotonic() + 5.0)


class TestHasATimeoutOfItsOwnInScan(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            return super().scan(cursor, time.monotonic() + 5.0)


class TestHasATimeoutOfItsOwnInLoad(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            return super().load(items, time.monotonic() + 5.0)


class TestHasATimeoutOfItsOwnInDelete(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            return super().delete(keys, time.monotonic() + 5.0)


class TestHangsForGood(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def _ask(self, deadline: float) -> None:
            if self.state.get("hangs"):
                time.sleep(HANG_S)
            super()._ask(deadline)


class TestHangsInAnyCall(Wrong):
    caught_by = "test_a_miss_is_a_value"
    limit_s = 0.5

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            if item.key not in self.objects:
                time.sleep(HANG_S)
            return super().load_one(item, deadline)


class TestHangsInClose(Wrong):
    caught_by = "test_close_is_idempotent"
    limit_s = 0.5

    class faulty(Shelf):
        def close(self) -> None:
            if not self._closed and self.objects:
                self._closed = True
                time.sleep(HANG_S)


class TestDeletesThePiecesOfAStoreThatIsUnderWay(Wrong):
    caught_by = "test_a_store_whose_key_is_deleted_meanwhile_is_whole_or_gone"

    class faulty(Shelf):
        pieces: ClassVar[dict[bytes, bytes]] = {}

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            return [self._store_pieces(item, deadline) for item in items]

        def _store_pieces(self, item: StoreItem, deadline: float) -> Outcome:
            content = b"".join(item.buffers)
            self.pieces[item.key] = content[:100]
            rest = content[100:]
            whole = self.pieces.get(item.key, b"") + rest
            return super().store([StoreItem(item.key, [memoryview(whole)])], deadline)[0]

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            for key in keys:
                self.pieces.pop(key, None)
            return super().delete(keys, deadline)


class TestTakesThreeSecondsForALoad(Wrong):
    caught_by = "test_no_call_takes_long_beyond_its_deadline"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            time.sleep(3.0)
            return super().load(items, deadline)


class TestTakesThreeSecondsForALookup(Wrong):
    caught_by = "test_no_call_takes_long_beyond_its_deadline"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            time.sleep(3.0)
            return super().exists(keys, deadline)


class TestTakesThreeSecondsForAScan(Wrong):
    caught_by = "test_no_call_takes_long_beyond_its_deadline"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            time.sleep(3.0)
            return super().scan(cursor, deadline)


class TestGivesUpForGoodWhenALookupIsLate(Wrong):
    caught_by = "test_what_is_past_its_deadline_is_answered_and_may_be_tried_again"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            if time.monotonic() >= deadline:
                raise TierError("too late", retryable=False)
            return super().exists(keys, deadline)


class TestGivesUpForGoodWhenAScanIsLate(Wrong):
    caught_by = "test_what_is_past_its_deadline_is_answered_and_may_be_tried_again"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            if time.monotonic() >= deadline:
                raise TierError("too late", retryable=False)
            return super().scan(cursor, deadline)


class TestRaisesItsLibrarysTimeout(Wrong):
    caught_by = "test_what_is_past_its_deadline_is_answered_and_may_be_tried_again"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            if time.monotonic() >= deadline:
                raise TimeoutError("timed out")
            return super().load(items, deadline)


class TestBoundsEachReceiveAndNotTheCall(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_an_answer_stalls"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            while self.state.get("stalls"):
                time.sleep(0.05)  # another byte has come: the library waits anew
            return super().load(items, deadline)


# --- a medium that is not there -------------------------------------------------------------------------------------
class TestScansNothingWhereNothingAnswers(Wrong):
    caught_by = "test_a_medium_that_is_not_there_is_said_in_words"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            try:
                return super().scan(cursor, deadline)
            except TierError:
                self.check_open()
                return ScanPage([], None)


class TestUsesNothingWhereNothingAnswers(Wrong):
    caught_by = "test_a_medium_that_is_not_there_is_said_in_words"

    class faulty(Shelf):
        def usage(self) -> Usage:
            try:
                return super().usage()
            except TierError:
                self.check_open()
                return Usage(0, 0, 0)


class TestMissesWhereNothingAnswers(Wrong):
    caught_by = "test_a_medium_that_is_not_there_is_said_in_words"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            try:
                return super().load(items, deadline)
            except TierError:
                self.check_open()
                return [MISS] * len(items)


class TestKnowsNothingIsThereWhereNothingAnswers(Wrong):
    caught_by = "test_a_medium_that_goes_away_is_said_in_words_and_used_again"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            try:
                return super().exists(keys, deadline)
            except TierError:
                self.check_open()
                return [False] * len(keys)


class TestDeletesWhereNothingAnswers(Wrong):
    caught_by = "test_a_medium_that_is_not_there_is_said_in_words"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            try:
                return super().delete(keys, deadline)
            except TierError:
                self.check_open()
                return [DONE] * len(keys)


class TestFailsWithoutAWord(Wrong):
    caught_by = "test_a_medium_that_is_not_there_is_said_in_words"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            try:
                return super().store(items, deadline)
            except TierError:
                self.check_open()
                return [Outcome(Result.FAILED, retryable=True)] * len(items)


class TestNeverComesBackAfterAnOutage(Wrong):
    caught_by = "test_a_medium_that_goes_away_is_said_in_words_and_used_again"

    class faulty(Shelf):
        lost = False

        def _ask(self, deadline: float) -> None:
            self.lost = self.lost or bool(self.state.get("gone"))
            if self.lost:
                raise TierError("the connection is closed")
            super()._ask(deadline)


# --- keys -----------------------------------------------------------------------------------------------------------
class TestCutsKeysAt63Bytes(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            return super().store_one(StoreItem(item.key[:63], item.buffers), deadline)

        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            return super().load_one(LoadItem(item.key[:63], item.buffers), deadline)

        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return super().exists([key[:63] for key in keys], deadline)

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            return super().delete([key[:63] for key in keys], deadline)


class Stripped(Shelf):
    def store_one(self, item: StoreItem, deadline: float) -> Outcome:
        return super().store_one(StoreItem(item.key.rstrip(b"\0"), item.buffers), deadline)

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        return super().load_one(LoadItem(item.key.rstrip(b"\0"), item.buffers), deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return super().exists([key.rstrip(b"\0") for key in keys], deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return super().delete([key.rstrip(b"\0") for key in keys], deadline)


class TestStripsNuls(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"
    faulty = Stripped


class TestStripsNulsOnTheMedium(Wrong):
    caught_by = "test_every_key_has_a_place_of_its_own_on_the_medium"
    faulty = Stripped


class TestStoresUnderAnotherNameThanItSays(Wrong):
    """Its back door finds nothing, and the kit says so."""

    caught_by = "test_a_torn_object_is_never_called_whole"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            return super().store_one(StoreItem(b"v2" + item.key, item.buffers), deadline)

        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            return super().load_one(LoadItem(b"v2" + item.key, item.buffers), deadline)


class TestScansKeysAsItSpellsThem(Wrong):
    caught_by = "test_a_scan_gives_keys_as_they_were_stored"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage([entry._replace(key=entry.key.strip()) for entry in page.entries], page.cursor)


# --- batches --------------------------------------------------------------------------------------------------------
class TestLooksUpFortyKeys(Wrong):
    caught_by = "test_a_batch_of_the_largest_size"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return [*super().exists(keys[:40], deadline), *[False] * len(keys[40:])]


class TestLoads48Objects(Wrong):
    caught_by = "test_a_batch_of_the_largest_size"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            return [*super().load(items[:48], deadline), *[MISS] * len(items[48:])]


class TestDeletesFiftyKeys(Wrong):
    caught_by = "test_a_batch_of_the_largest_size"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            return [*super().delete(keys[:50], deadline), *[DONE] * len(keys[50:])]


class TestAnswersEachKeyOnce(Wrong):
    caught_by = "test_a_key_that_is_named_twice_is_answered_twice"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return super().exists(list(dict.fromkeys(keys)), deadline)


class TestFillsTheLastOfTwoTargets(Wrong):
    caught_by = "test_a_key_that_is_named_twice_is_answered_twice"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            by_key = {item.key: item for item in items}
            done = dict(zip(by_key, super().load(list(by_key.values()), deadline), strict=True))
            return [done[item.key] for item in items]


class TestMixesTwoStoresOfOneKey(Wrong):
    caught_by = "test_a_key_that_is_named_twice_is_answered_twice"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            joined: dict[bytes, list[memoryview]] = {}
            for item in items:
                joined.setdefault(item.key, []).extend(item.buffers)
            super().store([StoreItem(key, buffers) for key, buffers in joined.items()], deadline)
            return [Outcome(Result.DONE, item.nbytes) for item in items]


class TestDeletesATwinOnce(Wrong):
    caught_by = "test_a_key_that_is_named_twice_is_answered_twice"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            super().delete(keys, deadline)
            first = {key: position for position, key in reversed(list(enumerate(keys)))}
            failed = Outcome(Result.FAILED, error="deleted by this batch")
            return [DONE if first[key] == position else failed for position, key in enumerate(keys)]


class TestChokesOnAnEmptyBatch(Wrong):
    caught_by = "test_an_empty_batch_is_an_empty_answer"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return super().exists([keys[0], *keys[1:]], deadline)


class TestBatchesAreAnotherWay(Wrong):
    caught_by = "test_a_batch_is_the_same_as_its_single_calls"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().load(items, deadline)
            if len(items) < 12:
                return outcomes
            return [DONE if outcome.result is Result.MISS else outcome for outcome in outcomes]


class TestReportsADeleteOnce(Wrong):
    caught_by = "test_a_delete_in_a_batch_is_reported_for_each_key"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            super().delete(keys, deadline)
            return [DONE]


class TestDeletesTwoKeysAtATime(Wrong):
    caught_by = "test_a_delete_in_a_batch_is_reported_for_each_key"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            return [*super().delete(keys[:2], deadline), *[DONE] * len(keys[2:])]


# --- objects --------------------------------------------------------------------------------------------------------
class TestStoresBeyondItsOwnLimit(Wrong):
    caught_by = "test_the_largest_object"

    class faulty(Shelf):
        capabilities = Capabilities(durable=True, shared=True, object_bytes_max=65536)

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            return self.each("store", self.store_one, items, deadline)


class TestAsksToTryATooLargeObjectAgain(Wrong):
    caught_by = "test_the_largest_object"

    class faulty(Shelf):
        capabilities = Capabilities(durable=True, shared=True, object_bytes_max=65536)

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            return [
                outcome._replace(retryable=True) if item.nbytes > 65536 else outcome
                for item, outcome in zip(items, super().store(items, deadline), strict=True)
            ]


class TestTakesLessThanItSays(Wrong):
    caught_by = "test_the_largest_object"

    class faulty(Shelf):
        capabilities = Capabilities(durable=True, shared=True, object_bytes_max=65536)

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            if item.nbytes > 65536 - 48:  # the medium's own header counts, too
                return Outcome(Result.FAILED, error="too large")
            return super().store_one(item, deadline)


class TestTakesNoKernelKeys(Wrong):
    caught_by = "test_it_is_an_adapter_that_says_what_it_can_do"

    class faulty(Shelf):
        capabilities = Capabilities(key_bytes_max=32)


class TestWantsWritableSources(Wrong):
    caught_by = "test_the_source_may_be_read_only"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            import ctypes

            for buffer in item.buffers:
                (ctypes.c_char * buffer.nbytes).from_buffer(buffer)
            return super().store_one(item, deadline)


class TestSaysTheRoomForTheLength(Wrong):
    caught_by = "test_an_object_smaller_than_the_buffers_says_its_length"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            outcome = super().load_one(item, deadline)
            return outcome._replace(nbytes=sum(buffer.nbytes for buffer in item.buffers)) if outcome.nbytes else outcome


class TestSetsNothingAside(Wrong):
    caught_by = "test_what_is_set_aside_is_not_there_any_more"

    class faulty(Shelf):
        def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            return [DONE] * len(keys)


class TestNeedsToBeUsedBeforeItCloses(Wrong):
    caught_by = "test_an_adapter_that_was_never_used_can_be_closed"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.connection = object()
            return super().store_one(item, deadline)

        def close(self) -> None:
            closed, self._closed = self._closed, True
            if not closed:
                del self.connection


# --- threads, line by line ------------------------------------------------------------------------------------------
class TestDeletesAndInserts(Wrong):
    caught_by = "test_an_overwrite_shows_the_old_object_or_the_new_one"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.objects.pop(item.key, None)
            return super().store_one(item, deadline)


class TestWritesInPlace(Wrong):
    caught_by = "test_an_overwrite_shows_the_old_object_or_the_new_one"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            whole = b"".join(item.buffers)
            former = bytes(self.objects.get(item.key, (b"", 0.0))[0])
            self.objects[item.key] = (whole[:4096] + former[4096 : len(whole)], time.time())
            self.objects[item.key] = (whole, time.time())
            return Outcome(Result.DONE, item.nbytes)


class TestWritesTheHeaderFirst(Wrong):
    caught_by = "test_a_first_store_and_a_delete_show_all_or_nothing"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            if item.key not in self.objects:
                self.objects[item.key] = (bytes(item.buffers[0]), time.time())
            return super().store_one(item, deadline)


class TestEmptiesBeforeItDeletes(Wrong):
    caught_by = "test_a_first_store_and_a_delete_show_all_or_nothing"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            for key in keys:
                if key in self.objects:
                    self.objects[key] = (b"", 0.0)
            return super().delete(keys, deadline)


class TestMarksTheSourceForAMoment(Wrong):
    caught_by = "test_an_overwrite_shows_the_old_object_or_the_new_one"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            buffer = item.buffers[0]
            if buffer.readonly or not buffer.nbytes:
                return super().store_one(item, deadline)
            byte = buffer[0]
            buffer[0] = byte ^ 1
            buffer[0] = byte  # nobody will have noticed
            return super().store_one(item, deadline)


class TestSharesAScratchForAMoment(Wrong):
    caught_by = "test_two_stores_do_not_meet"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.scratch = b"".join(item.buffers)
            whole = memoryview(self.scratch)
            return super().store_one(StoreItem(item.key, [whole]), deadline)


class TestSharesItsAnswersForAMoment(Wrong):
    caught_by = "test_two_loads_do_not_meet"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            self.key = item.key
            found = self.key
            return super().load_one(LoadItem(found, item.buffers), deadline)


class TestSharesItsListOfKeysForAMoment(Wrong):
    caught_by = "test_a_lookup_and_a_store_do_not_meet"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            self.asked = list(keys)
            self._ask(deadline)
            return super().exists(self.asked, deadline)


# --- accounts -------------------------------------------------------------------------------------------------------
class Counted(Shelf):
    """Keeps its own figures, as media do whose own are too dear."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.number = len(self.objects)

    def usage(self) -> Usage:
        return super().usage()._replace(objects=self.number)


class TestCountsOverwritesTwice(Wrong):
    caught_by = "test_usage_counts_an_object_once"

    class faulty(Counted):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.number += 1
            return super().store_one(item, deadline)

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            self.number -= len(self.objects.keys() & set(keys))
            return super().delete(keys, deadline)


class TestSubtractsWhatNeverWasThere(Wrong):
    caught_by = "test_usage_counts_an_object_once"

    class faulty(Counted):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.number += item.key not in self.objects
            return super().store_one(item, deadline)

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            self.number = max(0, self.number - len(keys))
            return super().delete(keys, deadline)


class TestBeginsToCountAtZero(Wrong):
    caught_by = "test_a_fresh_handle_knows_how_much_is_there"

    class faulty(Shelf):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.mine: set[bytes] = set()

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.mine.add(item.key)
            return super().store_one(item, deadline)

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            self.mine -= set(keys)
            return super().delete(keys, deadline)

        def usage(self) -> Usage:
            return super().usage()._replace(objects=len(self.mine), bytes_used=None)


class TestIsNeverFuller(Wrong):
    caught_by = "test_what_is_free_grows_less"

    class faulty(Shelf):
        def usage(self) -> Usage:
            return super().usage()._replace(bytes_free=1 << 40)


class TestIsNeverFullerOnALargeMedium(Wrong):
    caught_by = "test_what_is_free_grows_less"

    class faulty(Shelf):
        def usage(self) -> Usage:
            return super().usage()._replace(bytes_free=1 << 40)

    @pytest.fixture
    def small_adapter(self) -> None:
        return None


class TestUsesLessThanNothing(Wrong):
    caught_by = "test_usage_follows_what_is_stored"

    class faulty(Shelf):
        def usage(self) -> Usage:
            used = super().usage()
            return used._replace(bytes_used=(used.bytes_used or 0) - 4096)


# --- scans ----------------------------------------------------------------------------------------------------------
class Paged(Shelf):
    """Pages of 500, by key."""

    page_entries = 500

    def listed(self) -> list[ScanEntry]:
        return [ScanEntry(key, len(self.objects[key][0]), self.objects[key][1]) for key in sorted(self.objects)]


class TestLosesOneAtThePagesEdge(Wrong):
    caught_by = "test_a_scan_of_many_pages_loses_none_and_doubles_none"

    class faulty(Paged):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            super().scan(None, deadline)
            at, entries = int(cursor or 0), self.listed()
            following = at + self.page_entries
            more = following < len(entries)
            return ScanPage(entries[at:following], str(following + 1) if more else None)


class TestDoublesOneAtThePagesEdge(Wrong):
    caught_by = "test_a_scan_of_many_pages_loses_none_and_doubles_none"

    class faulty(Paged):
        page_entries = 1000

        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            super().scan(None, deadline)
            after, entries = bytes.fromhex(cursor or ""), self.listed()
            left = [entry for entry in entries if entry.key >= after]
            page = left[: self.page_entries]
            return ScanPage(page, page[-1].key.hex() if len(left) > len(page) else None)


class TestStopsAtAFullPage(Wrong):
    caught_by = "test_a_scan_of_many_pages_loses_none_and_doubles_none"

    class faulty(Paged):
        page_entries = 1000

        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            super().scan(None, deadline)
            return ScanPage(self.listed()[: self.page_entries], None)  # the service's own limit


class TestCountsOnTheOrderOfASet(Wrong):
    caught_by = "test_a_scan_loses_none_while_others_are_deleted"

    class faulty(Paged):
        """OFFSET: a number of entries, some of which are gone by then."""

        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            super().scan(None, deadline)
            at, entries = int(cursor or 0), self.listed()
            page = entries[at : at + self.page_entries]
            return ScanPage(page, str(at + len(page)) if at + len(page) < len(entries) else None)


class TestKeepsItsCursorToItself(Wrong):
    caught_by = "test_two_scans_do_not_meet"

    class faulty(Paged):
        after = b""

        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            super().scan(None, deadline)
            self.after = b"" if cursor is None else self.after
            left = [entry for entry in self.listed() if entry.key > self.after]
            page = left[: self.page_entries]
            self.after = page[-1].key if page else b""
            return ScanPage(page, "more" if len(left) > len(page) else None)


class TestKeepsItsCursorsInATable(Wrong):
    caught_by = "test_two_scans_do_not_meet"

    class faulty(Paged):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.cursors: list[bytes] = []

        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            super().scan(None, deadline)
            after = b"" if cursor is None else self.cursors[int(cursor)]
            left = [entry for entry in self.listed() if entry.key > after]
            page = left[: self.page_entries]
            if len(left) <= len(page):
                return ScanPage(page, None)
            self.cursors.append(page[-1].key)
            return ScanPage(page, str(len(self.cursors) - 1))


class TestGoesByTheMonotonicClock(Wrong):
    caught_by = "test_the_last_use_is_told_in_seconds_since_the_epoch"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage([entry._replace(used_at_s=time.monotonic()) for entry in page.entries], page.cursor)


class TestTellsMilliseconds(Wrong):
    caught_by = "test_the_last_use_is_told_in_seconds_since_the_epoch"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage([entry._replace(used_at_s=entry.used_at_s * 1e3) for entry in page.entries], page.cursor)


class TestTellsTheTimeInTokyo(Wrong):
    caught_by = "test_the_last_use_is_told_in_seconds_since_the_epoch"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage([entry._replace(used_at_s=entry.used_at_s + 9 * 3600) for entry in page.entries], None)


class TestListsEmptyObjectsWithAByte(Wrong):
    caught_by = "test_a_scan_sees_exactly_what_is_there"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage([entry._replace(nbytes=max(1, entry.nbytes)) for entry in page.entries], page.cursor)


class TestServesWhatExpired(Wrong):
    caught_by = "test_what_expired_is_a_miss"

    class faulty(Shelf):
        capabilities = Capabilities(durable=True, shared=True, ttl=True)

    @pytest.fixture
    def expire(self) -> Callable[[], None]:
        return lambda: None  # the entry's time is noted, and nobody looks at it


class TestDropsTheNewest(Wrong):
    caught_by = "test_a_full_medium_is_an_ordinary_answer"

    class faulty(Shelf):
        capabilities = Capabilities(durable=True, shared=True, evicts=True)

        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            super().store_one(item, deadline)
            return Outcome(Result.DONE, item.nbytes)


class TestSaysFullAndKeepsIt(Wrong):
    caught_by = "test_a_full_medium_is_an_ordinary_answer"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            outcome = super().store_one(item, deadline)
            if outcome.result is Result.FULL:
                self.objects[item.key] = (b"".join(item.buffers), time.time())
            return outcome


# --- what changes between two lines of a call ---------------------------------------------------------------------
class TestReadsAnObjectInTwoParts(Wrong):
    caught_by = "test_a_load_gives_one_object_while_it_is_overwritten"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            if item.key not in self.objects:
                return MISS
            at = 0
            for buffer in item.buffers:  # a request for each part: GETRANGE, or a range of bytes
                part = self.objects[item.key][0][at : at + buffer.nbytes]
                buffer[: len(part)] = part
                at += len(part)
            return Outcome(Result.DONE, at)


class TestExpectsWhatItHasSeen(Wrong):
    caught_by = "test_a_load_gives_all_or_nothing_while_it_is_deleted"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            if item.key not in self.objects:
                return MISS
            content = self.objects[item.key][0]  # as stat, and then open
            return super().load_one(item, deadline) if content else MISS


class TestExpectsWhatItHasListed(Wrong):
    caught_by = "test_a_scan_outlives_what_comes_and_goes_meanwhile"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            entries = []
            for key in sorted(self.objects):
                content, used_at_s = self.objects[key]
                entries.append(ScanEntry(key, len(content), used_at_s))
            return ScanPage(entries, None)


class TestNamesItsTemporaryFileByTheKey(Wrong):
    caught_by = "test_two_stores_of_one_key_do_not_mix"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            temporary = b"tmp of " + item.key
            self.state[temporary] = b""  # type: ignore[index, assignment]  # the medium's other folder
            for buffer in item.buffers:
                self.state[temporary] += bytes(buffer)  # type: ignore[index, operator]
            self.objects[item.key] = (self.state[temporary], 0.0)  # type: ignore[index, assignment]
            return DONE


class TestTidiesUpUnderAStore(Wrong):
    caught_by = "test_a_store_does_not_meet_the_delete_of_another_key"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.state["folder"] = True
            name = bytes(item.key)
            if not self.state["folder"]:
                return Outcome(Result.FAILED, error=f"no folder for {name.hex()}")
            return super().store_one(item, deadline)

        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            done = super().delete(keys, deadline)
            self.state["folder"] = False  # it was the last one there, as far as this adapter knows
            return done


# --- what is said while the medium is in trouble -------------------------------------------------------------------
class TestMissesWhatItHadNoTimeFor(Wrong):
    caught_by = "test_what_is_past_its_deadline_is_answered_and_may_be_tried_again"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            late = time.monotonic() >= deadline
            return [MISS] * len(items) if late else super().load(items, deadline)


class TestStoresNothingWhenLateAndSaysDone(Wrong):
    caught_by = "test_what_is_past_its_deadline_is_answered_and_may_be_tried_again"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            late = time.monotonic() >= deadline
            return [DONE] * len(items) if late else super().store(items, deadline)


class TestMissesWhileTheMediumHangs(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            return [MISS] * len(items) if self.state.get("hangs") else super().load(items, deadline)


class TestSeesNothingWhileTheMediumHangs(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            return [False] * len(keys) if self.state.get("hangs") else super().exists(keys, deadline)


class TestListsNothingWhileTheMediumHangs(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            return ScanPage([], None) if self.state.get("hangs") else super().scan(cursor, deadline)


class TestStoresNothingWhileTheMediumHangsAndSaysDone(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            return [DONE] * len(items) if self.state.get("hangs") else super().store(items, deadline)


class TestDeletesNothingWhileTheMediumHangsAndSaysDone(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            return [DONE] * len(keys) if self.state.get("hangs") else super().delete(keys, deadline)


class TestGivesEachItemTheWholeTime(Wrong):
    caught_by = "test_the_deadline_is_honoured_while_the_medium_hangs"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            if self.state.get("hangs"):
                left_s = deadline - time.monotonic()
                for _ in items:
                    time.sleep(left_s)  # one request each, with a time-out that was reckoned once
            return super().load(items, deadline)


# --- what is set aside ------------------------------------------------------------------------------------------------
class TestSetsAllAside(Wrong):
    caught_by = "test_what_is_set_aside_is_not_there_any_more"

    class faulty(Shelf):
        def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            return super().delete(list(self.objects), deadline)[:1] * len(keys) or [DONE] * len(keys)


class TestSetsAsideForLoadsAlone(Wrong):
    caught_by = "test_what_is_set_aside_is_not_there_any_more"

    class faulty(Shelf):
        def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            for key in keys:
                self.state[key.hex()] = True
            return [DONE] * len(keys)

        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            return MISS if self.state.get(item.key.hex()) else super().load_one(item, deadline)


class TestListsWhatItHasSetAside(Wrong):
    caught_by = "test_what_is_set_aside_is_not_there_any_more"

    class faulty(Shelf):
        def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            for key in keys:
                if key in self.objects:
                    self.objects[b"damaged " + key[:32]] = self.objects.pop(key)
            return [DONE] * len(keys)


# --- deletes without proof --------------------------------------------------------------------------------------------
class TestDeletesWhatItCouldNotRead(Wrong):
    caught_by = "test_a_load_that_finds_damage_leaves_the_object_where_it_is"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            outcome = super().load_one(item, deadline)
            if outcome.result is Result.DAMAGED:
                self.objects.pop(item.key, None)
            return outcome


class TestGivesTheEndForTheHeader(Wrong):
    caught_by = "test_the_header_alone_is_what_a_load_gives"

    class faulty(Shelf):
        def load_headers(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            return self.load([item._replace(buffers=item.buffers[::-1]) for item in items], deadline)


class TestFindsAHeaderWhereNothingIs(Wrong):
    caught_by = "test_the_header_alone_is_what_a_load_gives"

    class faulty(Shelf):
        def load_headers(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            outcomes = self.load(items, deadline)
            return [Outcome(Result.DONE) if each.result is Result.MISS else each for each in outcomes]


class Versioned(Shelf):
    """Correct: its loads give a version."""

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        outcome = super().load_one(item, deadline)
        return outcome._replace(version=self._version(item.key)) if outcome.result is Result.DONE else outcome

    def _version(self, key: bytes) -> str:
        return str(zlib.crc32(self.objects[key][0]))

    def set_aside(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> Sequence[Outcome]:
        pairs = zip(keys, versions or [""] * len(keys), strict=True)
        going = [key for key, version in pairs if key in self.objects and version in ("", self._version(key))]
        super().delete(going, deadline)
        return [DONE] * len(keys)


class TestSetsAsideWhateverTheVersion(Wrong):
    caught_by = "test_what_was_replaced_is_not_set_aside"

    class faulty(Versioned):
        def set_aside(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> Sequence[Outcome]:
            return self.delete(keys, deadline)


class TestHasOneVersionForAll(Wrong):
    caught_by = "test_what_was_replaced_is_not_set_aside"

    class faulty(Versioned):
        def _version(self, key: bytes) -> str:
            return key.hex()


class TestSkipsWhatIsThereWhateverItIsTold(Wrong):
    caught_by = "test_what_replaces_a_suspect_is_stored_in_any_case"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            def same(item: StoreItem) -> bool:
                there = self.objects.get(item.key, (b"", 0.0))[0]
                return there[:80] == bytes(item.buffers[0])[:80] and len(there) == item.nbytes > 4096

            done = Outcome(Result.DONE)
            return [done if same(item) else super(Shelf, self).store([item], deadline)[0] for item in items]


class TestClosesThePoolOfAll(Wrong):
    caught_by = "test_one_that_closes_leaves_the_others_open"

    class faulty(Shelf):
        def close(self) -> None:
            super().close()
            self.state["closed"] = True  # the class's pool of connections

        def _ask(self, deadline: float) -> None:
            if self.state.get("closed"):
                raise TierError("the pool of connections is closed", retryable=False)
            super()._ask(deadline)


# --- what is on the medium beside objects ---------------------------------------------------------------------------
class Folder(MutableMapping[bytes, Any]):
    """Correct: a shelf's objects as files, written beside their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made = False

    def _file(self, key: bytes) -> Path:
        return self.path / key.hex()

    def _write(self, key: bytes, content: bytes) -> None:
        self.path.mkdir(exist_ok=True)
        beside = self.path / f"{os.getpid()}-{threading.get_ident()}.tmp"
        beside.write_bytes(content)
        beside.rename(self._file(key))

    def __setitem__(self, key: bytes, entry: tuple[Any, float]) -> None:
        if key not in self or self[key][0] != entry[0]:  # a use changes nothing
            self._write(key, entry[0])

    def __getitem__(self, key: bytes) -> tuple[bytes, float]:
        try:
            return self._file(key).read_bytes(), self._file(key).stat().st_mtime
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise KeyError(key) from None

    def __delitem__(self, key: bytes) -> None:
        self._file(key).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return [each.name for each in self.path.glob("*") if each.is_file()]

    def __iter__(self) -> Iterator[bytes]:
        return iter([bytes.fromhex(name) for name in self._names() if set(name) <= set("0123456789abcdef")])

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._file(key).is_file()

    def __len__(self) -> int:
        return len(list(iter(self)))


class Files(Shelf):
    """Correct: what a folder refuses is a failure, and what went while it was read is a miss."""

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        try:
            return super().store(items, deadline)
        except OSError as error:
            return [Outcome(Result.FAILED, error=str(error))] * len(items)
        except KeyError:  # the former object was deleted while it was looked at
            return self.store(items, deadline)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for item in items:
            try:
                outcomes += super().load([item], deadline)
            except KeyError:
                outcomes.append(Outcome(Result.MISS))
        return outcomes


class WrongFolder(Wrong):
    """Over files, with what others do to them."""

    faulty = Files
    folder: ClassVar[type[Folder]] = Folder

    @pytest.fixture
    def files(self, tmp_path: Path) -> Folder:
        return self.folder(tmp_path / "shelf")

    @pytest.fixture
    def made(self, files: Folder, adapter_context: AdapterContext) -> Callable[[], Shelf]:
        cls = type("Made", (self.faulty,), {"shared_objects": files, "state": {}})
        cls.__module__ = self.faulty.__module__
        return lambda: cls(None, adapter_context)

    @pytest.fixture
    def litter(self, files: Folder) -> Callable[[bytes], None]:
        def litter(key: bytes) -> None:
            (files.path / key.hex()).mkdir()
            (files.path / "notes").write_text("somebody's")
            (files.path / "CAFE").write_text("hexadecimal, and not as we spell it")

        return litter

    @pytest.fixture
    def wipe(self, files: Folder) -> Callable[[], None]:
        return lambda: shutil.rmtree(files.path)

    @pytest.fixture
    def leftovers(self, files: Folder) -> Callable[[], list[Path]]:
        def leftovers() -> list[Path]:
            for each in files.path.glob("*.tmp"):  # the next adapter's own sweep; here nothing else lives
                if not Path(f"/proc/{each.name.partition('-')[0]}").exists():
                    each.unlink()
            return [each for each in files.path.iterdir() if set(each.name) - set("0123456789abcdef")]

        return leftovers


class TestListsWhatItCanRead(WrongFolder):
    caught_by = "test_what_is_no_object_is_none_of_ours"

    class folder(Folder):
        def __iter__(self) -> Iterator[bytes]:
            for name in self._names():
                with contextlib.suppress(ValueError):
                    yield bytes.fromhex(name)  # takes capitals, too

        def __getitem__(self, key: bytes) -> tuple[bytes, float]:
            capitals = self.path / key.hex().upper()
            if capitals.is_file():
                return capitals.read_bytes(), capitals.stat().st_mtime
            return super().__getitem__(key)


class TestStumblesOverWhatIsNoFile(WrongFolder):
    caught_by = "test_what_is_no_object_is_none_of_ours"

    class folder(Folder):
        def __getitem__(self, key: bytes) -> tuple[bytes, float]:
            if not self._file(key).exists():
                raise KeyError(key)
            return self._file(key).read_bytes(), self._file(key).stat().st_mtime


class TestMakesItsFolderOnce(WrongFolder):
    caught_by = "test_a_medium_that_somebody_empties_is_used_on"

    class folder(Folder):
        def _write(self, key: bytes, content: bytes) -> None:
            if not self.made:
                self.path.mkdir(exist_ok=True)
                self.made = True
            self._file(key).write_bytes(content)


class TestSaysNothingOfAMediumThatWasEmptied(WrongFolder):
    caught_by = "test_a_medium_that_somebody_empties_is_used_on"
    notices_wipe = True


class TestLeavesItsTemporaryFiles(WrongFolder):
    caught_by = "test_a_closed_adapter_leaves_objects_and_nothing_else"

    class folder(Folder):
        def _write(self, key: bytes, content: bytes) -> None:
            super()._write(key, content)
            (self.path / f"{os.getpid()}.log").write_bytes(content)


class TestWritesItsFileInPlace(WrongFolder):
    caught_by = "test_a_store_that_is_killed_at_any_line_leaves_the_old_object_or_the_new_one"

    class folder(Folder):
        def _write(self, key: bytes, content: bytes) -> None:
            self.path.mkdir(exist_ok=True)
            with self._file(key).open("wb", buffering=0) as file:
                file.write(content[:4096])
                file.write(content[4096:])


class TestDeletesBeforeItStores(WrongFolder):
    caught_by = "test_a_store_that_is_killed_at_any_line_leaves_the_old_object_or_the_new_one"

    class folder(Folder):
        def _write(self, key: bytes, content: bytes) -> None:
            del self[key]
            super()._write(key, content)


class TestLeavesItsLockBehindWhenItDies(WrongFolder):
    caught_by = "test_a_store_that_is_killed_at_any_line_leaves_the_old_object_or_the_new_one"

    class faulty(Files):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            lock = self.shared_objects.path.with_name("lock")  # type: ignore[attr-defined]
            try:
                lock.touch(exist_ok=False)
            except FileExistsError:
                return [Outcome(Result.FAILED, error="somebody else stores", retryable=True)] * len(items)
            try:
                return super().store(items, deadline)
            finally:
                lock.unlink()


class TestLeadsOnceItIsClosed(Wrong):
    caught_by = "test_a_closed_adapter_does_not_lead"

    class faulty(Shelf):
        def try_to_lead(self) -> bool:
            return bool(self.state.setdefault("leader", id(self)) == id(self))  # type: ignore[arg-type]


class TestLooksBeforeItListsAnObject(Wrong):
    caught_by = "test_a_scan_outlives_what_comes_and_goes_meanwhile"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            entries = []
            for key in sorted(self.objects):
                if key in self.objects:  # it may be gone since it was listed
                    content, used_at_s = self.objects[key]
                    entries.append(ScanEntry(key, len(content), used_at_s))
            return ScanPage(entries, None)


class TestListsWhatIsLeftOfItsMedium(Wrong):
    caught_by = "test_a_scan_whose_medium_goes_away_is_not_called_whole"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            self._ask(deadline)
            entries = []
            for key in sorted(self.objects):
                content, used_at_s = (b"", 0.0) if self.state.get("gone") else self.objects.get(key, (b"", 0.0))
                if used_at_s:  # else it is gone since it was listed
                    entries.append(ScanEntry(key, len(content), used_at_s))
            return ScanPage(entries, None)


class TestForgetsThatALoadIsAUse(Wrong):
    caught_by = "test_a_load_is_a_use_that_a_scan_tells"
    tells_last_use = True
    scan_wait_s = 0.05

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            before = self.objects.get(item.key)
            outcome = super().load_one(item, deadline)
            if before is not None:
                self.objects[item.key] = before
            return outcome


class TestSaysThatNothingIsFreeWhereItCannotTell(Wrong):
    caught_by = "test_what_is_stored_was_free_before"

    class faulty(Shelf):
        def usage(self) -> Usage:
            return super().usage()._replace(bytes_free=0)


class TestKeepsTheFirstPartOfWhatDidNotFit(Wrong):
    caught_by = "test_what_did_not_fit_takes_no_room"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            outcome = super().store_one(item, deadline)
            if outcome.result is Result.FULL:  # the file that was begun
                self._medium_bytes = sum(len(content) for content, _ in self.objects.values())
            return outcome


class TestCallsAllItsMediaAlike(Wrong):
    caught_by = "test_two_media_have_two_names"

    class faulty(Shelf):
        def medium(self) -> str | None:
            return "a shelf"


class TestTakesARefusalForAMiss(Wrong):
    caught_by = "test_a_medium_that_refuses_for_a_while_is_no_miss"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            try:
                return super().load(items, deadline)
            except TierError:
                if not self.state.get("busy"):
                    raise
                return [MISS] * len(items)  # whatever is no 200 is a 404


class TestSparesAStoreWhereSomethingOfThatLengthIs(Wrong):
    caught_by = "test_an_object_of_the_kernels_takes_the_place_of_any_other"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            there = self.objects.get(item.key)
            if len(item.buffers) > 1 and there is not None and len(there[0]) == item.nbytes:
                return Outcome(Result.DONE, item.nbytes)  # header and payload: the kernel's
            return super().store_one(item, deadline)
