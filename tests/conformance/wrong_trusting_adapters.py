"""Adapters that trust their callers, their keys or their luck too far: one realistic fault each.

Each of these passed the kit once. `wrong_shared_adapters.py` has earlier ones.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import unicodedata
import urllib.parse
import zlib
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar

from wrong_shared_adapters import DONE, HANG_S, Shelf, Wrong

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
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

LATE = Outcome(Result.FAILED, error="not done by its deadline", retryable=True)
NEVER_S = float("inf")


# --- buffers of calls that gave up ----------------------------------------------------------------------------------
class TestLoadsIntoTheBuffersLater(Wrong):
    caught_by = "test_the_buffers_of_a_late_call_are_the_callers_again"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            if not self.state.get("hangs"):
                return super().load(items, deadline)

            def go_on() -> None:  # the library's thread, which nobody told
                while self.state.get("hangs"):
                    time.sleep(0.005)
                with contextlib.suppress(TierError):
                    MemoryAdapter.load(self, items, NEVER_S)

            threading.Thread(target=go_on, daemon=True).start()
            time.sleep(max(0.0, deadline - time.monotonic()))
            return [LATE] * len(items)


class TestStoresFromTheBuffersLater(Wrong):
    caught_by = "test_the_buffers_of_a_late_call_are_the_callers_again"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            if not self.state.get("hangs"):
                return super().store(items, deadline)

            def go_on() -> None:
                while self.state.get("hangs"):
                    time.sleep(0.005)
                with contextlib.suppress(TierError):
                    MemoryAdapter.store(self, items, NEVER_S)

            threading.Thread(target=go_on, daemon=True).start()
            time.sleep(max(0.0, deadline - time.monotonic()))
            return [LATE] * len(items)


class TestQueuesWhatWasTooLate(Wrong):
    caught_by = "test_the_buffers_of_a_late_call_are_the_callers_again"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            if time.monotonic() < deadline:
                return super().store(items, deadline)
            self.queue = list(items)  # "for the next call"
            return [LATE] * len(items)


class TestReceivesIntoTheBuffersOnAThreadOfItsOwn(Wrong):
    caught_by = "test_the_buffers_of_a_late_call_are_the_callers_again"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            done: list[Sequence[Outcome]] = []

            def receive() -> None:
                while self.state.get("stalls"):
                    time.sleep(0.005)
                with contextlib.suppress(TierError):  # it may be closed by then
                    done.append(MemoryAdapter.load(self, items, NEVER_S))

            thread = threading.Thread(target=receive, daemon=True)
            thread.start()
            thread.join(max(0.0, deadline - time.monotonic()))
            return done[0] if done else [LATE] * len(items)


# --- no deadline ----------------------------------------------------------------------------------------------------
class TestWaitsForItsFigures(Wrong):
    caught_by = "test_what_has_no_deadline_comes_back_while_the_medium_hangs"

    class faulty(Shelf):
        def usage(self) -> Usage:
            if self.state.get("hangs"):
                time.sleep(HANG_S)
            return super().usage()


class TestSaysGoodbyeAndWaits(Wrong):
    caught_by = "test_what_has_no_deadline_comes_back_while_the_medium_hangs"

    class faulty(Shelf):
        def close(self) -> None:
            while self.state.get("hangs"):  # until QUIT is answered
                time.sleep(0.01)
            super().close()


class TestAsksForTheNameOfItsMedium(Wrong):
    caught_by = "test_what_has_no_deadline_comes_back_while_the_medium_hangs"

    class faulty(Shelf):
        def medium(self) -> str | None:
            self._ask(time.monotonic() + 30.0)  # CLUSTER MYID
            return super().medium()


class TestIsCalledOtherwiseWhenItCannotAsk(Wrong):
    caught_by = "test_it_is_made_named_and_closed_while_its_medium_is_away"

    class faulty(Shelf):
        def medium(self) -> str | None:
            try:
                self._ask(time.monotonic())
            except TierError:
                return "unknown"
            return super().medium()


class TestConnectsWhenItIsMade(Wrong):
    caught_by = "test_it_is_made_named_and_closed_while_its_medium_is_away"

    class faulty(Shelf):
        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)
            self._ask(time.monotonic() + 5.0)


class TestFlushesWhenItCloses(Wrong):
    caught_by = "test_it_is_made_named_and_closed_while_its_medium_is_away"

    class faulty(Shelf):
        def close(self) -> None:
            if not self._closed:
                self._ask(time.monotonic() + 5.0)
            super().close()


class TestWaitsToLead(Wrong):
    caught_by = "test_what_has_no_deadline_comes_back_while_the_medium_hangs"

    class faulty(Shelf):
        def try_to_lead(self) -> bool:
            while self.state.get("hangs"):  # a lock that blocks
                time.sleep(0.01)
            return True


class TestLeadsByARow(Wrong):
    caught_by = "test_who_leads_is_told_or_not_known"

    class faulty(Shelf):
        def try_to_lead(self) -> object:
            return self.state.setdefault("leader", id(self))  # type: ignore[arg-type]


class TestRaisesItsLibrarysErrorForWhoLeads(Wrong):
    caught_by = "test_who_leads_is_told_or_not_known"

    class faulty(Shelf):
        def try_to_lead(self) -> bool:
            if self.state.get("gone"):
                raise ConnectionRefusedError("111")
            return True


# --- deadlines that are far away ------------------------------------------------------------------------------------
class TestGivesItsSocketAllTheTimeThereIs(Wrong):
    caught_by = "test_a_deadline_may_be_far_away"

    class faulty(Shelf):
        def _ask(self, deadline: float) -> None:
            with socket.socket() as sock:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
            super()._ask(deadline)


class TestCountsMilliseconds(Wrong):
    caught_by = "test_a_deadline_may_be_far_away"

    class faulty(Shelf):
        def _ask(self, deadline: float) -> None:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            super()._ask(time.monotonic() + int(left_ms) / 1000)  # of infinity there are none


# --- how much at once -----------------------------------------------------------------------------------------------
class TestSendsEightMebibytesOfABatch(Wrong):
    caught_by = "test_a_batch_of_many_bytes"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            sent, fitting = 0, []
            for item in items:
                sent += item.nbytes
                if not fitting or sent <= 8 << 20:
                    fitting.append(item)
            return [*super().store(fitting, deadline), *[DONE] * (len(items) - len(fitting))]


class TestSendsAThousandBuffers(Wrong):
    caught_by = "test_an_object_may_come_in_many_buffers"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            return super().store_one(StoreItem(item.key, item.buffers[:1024]), deadline)  # one call of writev


class TestReceivesAThousandBuffers(Wrong):
    caught_by = "test_an_object_may_come_in_many_buffers"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            outcome = super().load_one(LoadItem(item.key, item.buffers[:1024]), deadline)
            return DONE if outcome.result is Result.DAMAGED else outcome


class Bounded(Shelf):
    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True, object_bytes_max=1 << 20)


class TestRefusesTheWholeBatch(Wrong):
    caught_by = "test_an_object_that_is_too_large_fails_alone"

    class faulty(Bounded):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            if any(item.nbytes > 1 << 20 for item in items):
                return [Outcome(Result.FAILED, error="the batch is too large")] * len(items)
            return super().store(items, deadline)


class TestTellsFailuresLast(Wrong):
    caught_by = "test_an_object_that_is_too_large_fails_alone"

    class faulty(Bounded):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            return sorted(super().store(items, deadline), key=lambda outcome: outcome.result is not Result.DONE)


class TestGivesUpABatchAtItsFirstFailure(Wrong):
    caught_by = "test_an_object_that_is_too_large_fails_alone"

    class faulty(Bounded):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            outcomes: list[Outcome] = []
            for item in items:
                failed = outcomes and outcomes[-1].result is not Result.DONE
                outcomes.append(outcomes[-1] if failed else super().store([item], deadline)[0])
            return outcomes


class TestGivesUpABatchWhenItIsFull(Wrong):
    caught_by = "test_a_batch_that_does_not_fit_is_answered_one_by_one"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().store(items, deadline)
            return next(([one] * len(items) for one in outcomes if one.result is Result.FULL), outcomes)


class TestMakesRoomBeforeItLooks(Wrong):
    caught_by = "test_what_does_not_fit_leaves_the_former_object_as_it_was"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            outcome = super().store_one(item, deadline)
            if outcome.result is Result.FULL:
                self.objects.pop(item.key, None)  # it was deleted to make room for the new one
            return outcome


# --- answers --------------------------------------------------------------------------------------------------------
class TestGivesItsCursorAsBytes(Wrong):
    caught_by = "test_a_scan_of_many_pages_loses_none_and_doubles_none"

    class faulty(Shelf):
        def scan(self, cursor: Any, deadline: float) -> ScanPage:
            page = super().scan(None if cursor is None else cursor.decode(), deadline)
            return ScanPage(page.entries, None if page.cursor is None else page.cursor.encode())  # type: ignore[arg-type]


class TestScansViewsOfItsPage(Wrong):
    caught_by = "test_answers_have_the_types_that_the_contract_names"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            entries = [entry._replace(key=memoryview(entry.key)) for entry in page.entries]  # type: ignore[arg-type]
            return ScanPage(entries, page.cursor)


class TestScansSizesInFractions(Wrong):
    caught_by = "test_a_scan_sees_exactly_what_is_there"

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage([entry._replace(nbytes=float(entry.nbytes)) for entry in page.entries], page.cursor)  # type: ignore[arg-type]


class TestGivesExceptionsForWords(Wrong):
    caught_by = "test_a_medium_that_is_not_there_is_said_in_words"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            try:
                return super().load(items, deadline)
            except TierError as error:
                self.check_open()
                return [Outcome(Result.FAILED, error=error, retryable=True)] * len(items)  # type: ignore[arg-type]


class TestAnswersWithTheWordAlone(Wrong):
    caught_by = "test_what_was_stored_is_read_back"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> object:
            return super().store_one(item, deadline)._replace(result="done")  # type: ignore[arg-type]


class TestAnswersExistsByNumbers(Wrong):
    caught_by = "test_answers_have_the_types_that_the_contract_names"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> list[int]:
            return [int(found) for found in super().exists(keys, deadline)]


class TestUsesFractionsOfBytes(Wrong):
    caught_by = "test_usage_is_told_in_whole_numbers"

    class faulty(Shelf):
        def usage(self) -> Usage:
            used = super().usage()
            return used._replace(bytes_used=(used.bytes_used or 0) * 1.0)  # type: ignore[arg-type]


class TestScansNow(Wrong):
    caught_by = "test_a_scan_tells_the_last_use_and_not_the_scan"
    scan_wait_s = 0.05

    class faulty(Shelf):
        def scan(self, cursor: str | None, deadline: float) -> ScanPage:
            page = super().scan(cursor, deadline)
            return ScanPage([ScanEntry(entry.key, entry.nbytes, time.time()) for entry in page.entries], page.cursor)


# --- keys -----------------------------------------------------------------------------------------------------------
class Spelt(Shelf):
    """Its medium knows objects by names of its own."""

    spelling: ClassVar[Callable[[bytes], bytes]]

    def _name(self, key: bytes) -> bytes:
        return type(self).spelling(key)

    def store_one(self, item: StoreItem, deadline: float) -> Outcome:
        return super().store_one(StoreItem(self._name(item.key), item.buffers), deadline)

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        return super().load_one(LoadItem(self._name(item.key), item.buffers), deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return super().exists([self._name(key) for key in keys], deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return super().delete([self._name(key) for key in keys], deadline)


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class TestLeavesOutTheMiddleOfLongKeys(Wrong):
    caught_by = "test_keys_that_differ_in_one_byte_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: key if len(key) <= 40 else key[:16] + key[-16:])


class TestTakesSevenBitsOfEachByte(Wrong):
    caught_by = "test_keys_that_differ_in_one_byte_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: bytes(byte & 0x7F for byte in key))


class TestAddsItsBytesUp(Wrong):
    caught_by = "test_keys_that_a_short_hash_takes_for_one_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: zlib.adler32(key).to_bytes(4, "big"))


class TestNamesObjectsByTheirCrc(Wrong):
    caught_by = "test_keys_that_a_short_hash_takes_for_one_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: zlib.crc32(key).to_bytes(4, "big"))


class TestNamesObjectsByFourBytesOfADigest(Wrong):
    caught_by = "test_keys_that_a_short_hash_takes_for_one_do_not_meet"

    class faulty(Spelt):
        @staticmethod
        def spelling(key: bytes) -> bytes:
            import hashlib

            return hashlib.sha256(key).digest()[:4]


class TestFoldsTheCaseOfBase64(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Spelt):
        @staticmethod
        def spelling(key: bytes) -> bytes:
            import base64

            return base64.b64encode(key).lower()  # on a file system that does so


class TestNormalisesText(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: _bytes(unicodedata.normalize("NFKC", _text(key))))


class TestFoldsText(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: _bytes(_text(key).casefold()) if len(key) < 40 else key)


class TestTidiesPaths(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: _bytes(str(PurePosixPath(_text(key)))))


class TestDropsTrailingDots(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: key.rstrip(b"."))


class TestUnquotesUrls(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: urllib.parse.unquote_to_bytes(key))


class TestReplacesWhatIsNoText(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Spelt):
        spelling = staticmethod(lambda key: key.decode(errors="replace").encode() if len(key) < 40 else key)


class TestFindsByPrefix(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Shelf):
        def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
            super().exists(keys, deadline)
            return [any(there.startswith(key) for there in self.objects) for key in keys]  # LIKE 'key%'


class TestDeletesByPrefix(Wrong):
    caught_by = "test_keys_that_resemble_each_other_do_not_meet"

    class faulty(Shelf):
        def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
            begun = [there for there in list(self.objects) if any(there.startswith(key) for key in keys)]
            super().delete(begun, deadline)
            return super().delete(keys, deadline)


# --- what stays behind ----------------------------------------------------------------------------------------------
class TestKeepsAllThatItLoaded(Wrong):
    caught_by = "test_use_keeps_no_objects_in_memory"

    class faulty(Shelf):
        def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().load(items, deadline)
            self.__dict__.setdefault("loaded", []).extend(b"".join(item.buffers) for item in items)
            return outcomes


class TestKeepsAllThatItStored(Wrong):
    caught_by = "test_use_keeps_no_objects_in_memory"

    class faulty(Shelf):
        def store_one(self, item: StoreItem, deadline: float) -> Outcome:
            self.__dict__.setdefault("log", []).append(b"".join(item.buffers))  # to be written again after a failure
            return super().store_one(item, deadline)


class TestReleasesViewsThatItWasLent(Wrong):
    caught_by = "test_the_callers_views_stay_open"

    class faulty(Shelf):
        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            outcomes = super().store(items, deadline)
            for item in items:
                for buffer in item.buffers:
                    buffer.release()
            return outcomes


class TestConnectsTwiceAtOnce(Wrong):
    caught_by = "test_two_first_calls_do_not_meet"

    class faulty(Shelf):
        connection: Any = None
        opening = False

        def _ask(self, deadline: float) -> None:
            super()._ask(deadline)
            if self.connection is None and not self.opening:
                self.opening = True
                self.connection = object()
            if self.connection is None:
                raise TierError("not connected", retryable=False)


class TestTakesThreeSecondsForWhatIsDamaged(Wrong):
    caught_by = "test_no_call_takes_long_beyond_its_deadline"

    class faulty(Shelf):
        def load_one(self, item: LoadItem, deadline: float) -> Outcome:
            outcome = super().load_one(item, deadline)
            if outcome.result is Result.DAMAGED:
                time.sleep(3.0)
            return outcome
