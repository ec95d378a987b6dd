"""Threads: many at once, and two under a scheduler that stops one of them at each line of the adapter."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest

from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.contract import Contract, not_claimed, not_judged, raised
from lmcache_testing.speeds import Allowance, Kit, spread
from lmcache_testing.stepping import STOPS_MAX, Stepped, own_modules

T = TypeVar("T")
THREADS = 8
LIMIT_S = 60.0  # a safety net
BYTES = 9000
FIRST_LINES = 40  # of a first call: that is where things are opened


class RaceTests(Contract):
    """What other threads and servers see of an object while it changes."""

    race_rounds: ClassVar[int] = 12

    def test_eight_threads_on_shared_keys(self, adapter: L2Adapter, kit: Kit) -> None:
        """Every object that a load calls DONE is one that was stored under its key, whole."""
        if not adapter.capabilities.thread_safe:
            not_claimed("thread_safe")
        keys = [material.key(number) for number in range(3)]
        legal = {
            key: {material.content(100 * number + version, 30_000) for version in range(THREADS)}
            for number, key in enumerate(keys)
        }
        faults: list[str] = []
        start = threading.Barrier(THREADS)

        def work(me: int) -> None:
            try:
                start.wait(material.DEADLINE_S)
                for turn in range(self.race_rounds if kit.quick else 4 * self.race_rounds):
                    number = (me + turn) % len(keys)
                    mine = material.content(100 * number + me, 30_000)
                    outcome = material.store(adapter, keys[number], mine[:4096], mine[4096:])
                    if outcome.result is not Result.DONE:
                        faults.append(f"a store was answered {material.seen(outcome)}")
                    for key in keys:
                        outcome, found = material.load(adapter, key, 4096, 30_000 - 4096)
                        if outcome.result is Result.DONE and found not in legal[key]:
                            faults.append("a load called bytes whole that nobody stored under that key")
                        if outcome.result not in (Result.DONE, Result.MISS):
                            faults.append(f"a load was answered {material.seen(outcome)}")
                    if adapter.capabilities.delete and turn % 4 == me % 4:
                        (outcome,) = adapter.delete([keys[number]], material.soon())
                        if outcome.result is not Result.DONE:
                            faults.append(f"a delete was answered {material.seen(outcome)}")
                    if len(adapter.exists(keys, material.soon())) != len(keys):
                        faults.append("exists gave another number of answers")
            except Exception as error:  # noqa: BLE001 - of a thread: raised by the test
                faults.append(f"a call raised {raised(error)}")

        threads = [threading.Thread(target=work, args=(me,), name="kit-race", daemon=True) for me in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * material.DEADLINE_S)
        late = sum(thread.is_alive() for thread in threads)
        assert not late, f"{late} of {THREADS} threads did not come back"
        assert not faults, f"{len(faults)} times in {THREADS} threads, at first: {faults[0]}"

    # --- under a scheduler ----------------------------------------------------------------------------------
    @contextmanager
    def _reader(self, adapter: L2Adapter, reopen: Any) -> Iterator[L2Adapter]:
        """The observer while the adapter is stopped: another adapter on the medium, or else the adapter itself."""
        if reopen is not None:
            with reopen() as other:
                if _shares(adapter, other):
                    yield other
                    return
        if not adapter.capabilities.thread_safe:
            not_judged("thread_safe is not claimed: a fixture 'reopen' on the same medium unlocks it")
        yield adapter

    @pytest.mark.parametrize(("before", "after"), [(BYTES, 4000), (4000, BYTES), (BYTES, BYTES)])
    def test_an_overwrite_shows_the_old_object_or_the_new_one(
        self, adapter: L2Adapter, reopen: Any, before: int, after: int
    ) -> None:
        """Never a MISS, and never bytes of both, wherever the writer is stopped."""
        versions = {"the old": material.content(1, before), "the new": material.content(2, after)}
        with self._reader(adapter, reopen) as reader:
            material.expect_stored(adapter, material.key(1), versions["the old"])
            material.expect_holds(reader, material.key(1), versions["the old"], "before its overwrite")
            source = bytearray(versions["the new"])

            def look() -> None:
                _expect_one_of(reader, versions, False, "an overwrite was under way")
                message = material.difference(bytes(source), versions["the new"])
                assert source == versions["the new"], f"during a store, of its source {message}"

            stepped = _stepped(adapter, lambda: adapter.store([_item(source)], material.soon()), look)
            material.expect_result(stepped[0], Result.DONE, "asked to overwrite an object")
            material.expect_holds(reader, material.key(1), versions["the new"], "after its overwrite")

    def test_a_first_store_and_a_delete_show_all_or_nothing(self, adapter: L2Adapter, reopen: Any) -> None:
        whole = {"the object": material.content(1, BYTES)}
        with self._reader(adapter, reopen) as reader:
            material.expect_miss(reader, material.key(1), "before its first store")
            source = bytearray(whole["the object"])
            stored = _stepped(
                adapter,
                lambda: adapter.store([_item(source)], material.soon()),
                lambda: _expect_one_of(reader, whole, True, "a first store was under way"),
            )
            material.expect_result(stored[0], Result.DONE, "asked to store an object")
            material.expect_holds(reader, material.key(1), whole["the object"], "after its first store")
            if adapter.capabilities.delete:
                deleted = _stepped(
                    adapter,
                    lambda: adapter.delete([material.key(1)], material.soon()),
                    lambda: _expect_one_of(reader, whole, True, "a delete was under way"),
                )
                material.expect_result(deleted[0], Result.DONE, "asked to delete an object")
                material.expect_miss(reader, material.key(1), "after its delete")

    def test_two_stores_do_not_meet(self, adapter: L2Adapter) -> None:
        """One call stops at each of its lines while another runs from end to end: shared state shows."""
        _needs_threads(adapter)
        one, other = material.content(1, BYTES), material.content(2, BYTES - 1000)
        outcomes = _stepped(
            adapter,
            lambda: adapter.store([_item(one)], material.soon()),
            lambda: material.expect_stored(adapter, material.key(2), other),
        )
        material.expect_result(outcomes[0], Result.DONE, "two stores at once")
        material.expect_holds(adapter, material.key(1), one, "stored while another store ran at each of its lines")
        material.expect_holds(adapter, material.key(2), other, "stored while another store stood still")

    def test_two_loads_do_not_meet(self, adapter: L2Adapter) -> None:
        _needs_threads(adapter)
        one, other = material.content(1, BYTES), material.content(2, BYTES - 1000)
        material.expect_stored(adapter, material.key(1), one)
        material.expect_stored(adapter, material.key(2), other)
        target = bytearray(BYTES)
        outcomes = _stepped(
            adapter,
            lambda: adapter.load([LoadItem(material.key(1), [memoryview(target)])], material.soon()),
            lambda: material.expect_holds(adapter, material.key(2), other, "loaded while another load stood still"),
        )
        material.expect_result(outcomes[0], Result.DONE, "two loads at once")
        wrong = material.difference(bytes(target), one)
        assert target == one, f"a load, while another ran at each of its lines, said DONE, and {wrong}"

    @pytest.mark.parametrize("other_bytes", [4000, BYTES])
    def test_a_load_gives_one_object_while_it_is_overwritten(
        self, adapter: L2Adapter, reopen: Any, other_bytes: int, kit: Kit
    ) -> None:
        """The reader is stopped at one of its lines while its object is replaced."""
        versions = [material.content(1, BYTES), material.content(2, other_bytes)]
        with self._reader(adapter, reopen) as writer:
            old, new = (partial(material.expect_stored, writer, material.key(1), version) for version in versions)
            for (outcome, found), at in _line_by_line(adapter, kit, old, lambda: _load_one(adapter), new):
                _expect_whole(outcome, found, versions, f"a load whose object was replaced at {at}", False)

    def test_a_load_gives_all_or_nothing_while_it_is_deleted(self, adapter: L2Adapter, reopen: Any, kit: Kit) -> None:
        """If the object is deleted between two lines of a load, the answer is MISS: no error, and never half of it."""
        if not adapter.capabilities.delete:
            not_claimed("delete")
        whole = material.content(1, BYTES)
        with self._reader(adapter, reopen) as other:
            store = partial(material.expect_stored, other, material.key(1), whole)
            delete = partial(material.expect_deleted, other, [material.key(1)], "a load was under way")
            for (outcome, found), at in _line_by_line(adapter, kit, store, lambda: _load_one(adapter), delete):
                _expect_whole(outcome, found, [whole], f"a load whose object was deleted at {at}", True)

    def test_a_scan_outlives_what_comes_and_goes_meanwhile(self, adapter: L2Adapter, reopen: Any, kit: Kit) -> None:
        """At each line of the scan one of three objects is deleted, and the one before it is stored again; three
        rounds, so that each of them was missing at each line."""
        if not (adapter.capabilities.scan and adapter.capabilities.delete):
            not_claimed("scan and delete")
        keys = [material.key(number) for number in range(1, 7)]
        allowance = Allowance(kit)
        with self._reader(adapter, reopen) as other:
            for first in range(3):
                if first and not allowance.left():
                    return
                for key in keys:
                    material.expect_stored(adapter, key, b"there")
                turns = itertools.count(first)

                def change(turns: Iterator[int] = turns) -> None:
                    turn = next(turns)
                    material.expect_stored(other, keys[(turn - 1) % 3], b"there")
                    material.expect_deleted(other, [keys[turn % 3]], "a scan was under way")

                found = [entry.key for entry in _stepped(adapter, lambda: material.scan(adapter), change)]
                lost = len(set(keys[3:]) - set(found))
                assert not lost, (
                    f"three of six objects came and went at the lines of a scan: {lost} of the other three are lost"
                )

    def test_two_stores_of_one_key_do_not_mix(self, adapter: L2Adapter, reopen: Any, kit: Kit) -> None:
        """An unpublished object needs a unique name: two servers often store the same object at once."""
        versions = [material.content(1, BYTES), material.content(2, BYTES - 1000)]
        with self._reader(adapter, reopen) as other:
            store_other = partial(material.expect_stored, other, material.key(1), versions[1])
            store = partial(material.store, adapter, material.key(1), versions[0][:4096], versions[0][4096:])
            for outcome, at in _line_by_line(adapter, kit, lambda: None, store, store_other):
                material.expect_result(outcome, Result.DONE, f"a store of a key that another stored at {at}")
                outcome, found = _load_one(adapter)
                _expect_whole(outcome, found, versions, f"a load after two stores of one key, one at {at}", False)

    def test_a_store_whose_key_is_deleted_meanwhile_is_whole_or_gone(
        self, adapter: L2Adapter, reopen: Any, kit: Kit
    ) -> None:
        """The delete comes before the store or after it, and never in between: pieces that a store has written so far
        are not the delete's. The next store of the key is not in its way either."""
        if not adapter.capabilities.delete:
            not_claimed("delete")
        versions = [material.content(1, BYTES), material.content(2, BYTES - 1000)]
        with self._reader(adapter, reopen) as other:
            before = partial(material.expect_stored, other, material.key(1), versions[0])
            store = partial(material.store, adapter, material.key(1), versions[1])
            delete = partial(material.expect_deleted, other, [material.key(1)], "a store of the key was under way")
            for outcome, at in _line_by_line(adapter, kit, before, store, delete):
                done = f"a store whose key was deleted at {at}"
                material.expect_result(outcome, Result.DONE, done)
                outcome, found = _load_one(adapter)
                _expect_whole(outcome, found, versions[1:], f"a load after {done}", True)
                (there,) = adapter.exists([material.key(1)], material.soon())
                assert there is (outcome.result is Result.DONE), f"after {done} exists says {there}, and load does not"

    def test_a_store_does_not_meet_the_delete_of_another_key(self, adapter: L2Adapter, reopen: Any) -> None:
        """A delete that tidies up (an empty folder, a table of names) must not break a concurrent store."""
        if not adapter.capabilities.delete:
            not_claimed("delete")
        one = material.content(1, BYTES)
        with self._reader(adapter, reopen) as other:

            def come_and_go() -> None:
                material.expect_stored(other, material.key(2), b"short-lived")
                material.expect_deleted(other, [material.key(2)], "a store of another key was under way")

            outcomes = _stepped(adapter, lambda: adapter.store([_item(one)], material.soon()), come_and_go)
            material.expect_result(outcomes[0], Result.DONE, "another key came and went at each line of a store")
            material.expect_holds(adapter, material.key(1), one, "stored while another key came and went")

    def test_two_first_calls_do_not_meet(self, adapter: L2Adapter, reopen: Any, kit: Kit) -> None:
        """What is opened at first use is opened once, and concurrent callers wait for it."""
        _needs_threads(adapter)
        if reopen is None:
            not_judged("a fixture 'reopen' unlocks it: an adapter that was never used")
        with ExitStack() as opened:
            unused: list[L2Adapter] = []

            def open_another() -> None:
                opened.close()
                unused[:] = [opened.enter_context(reopen())]

            keys = [material.key(1)]
            first = partial(_look_up, unused, keys)
            second = partial(_expect_looked_up, unused, keys, "the first lookup of all was under way")
            for found, at in _line_by_line(adapter, kit, open_another, first, second, FIRST_LINES):
                assert found == [False], f"the first lookup of all, with another one at {at}, said {found}"

    def test_a_lookup_and_a_store_do_not_meet(self, adapter: L2Adapter) -> None:
        _needs_threads(adapter)
        keys = [material.key(number) for number in range(1, 5)]
        for key in keys[::2]:
            material.expect_stored(adapter, key, b"there")

        def look() -> None:
            material.expect_exists(adapter, keys[::-1], [False, True, False, True], "another lookup stood still")
            material.expect_stored(adapter, material.key(9), b"another")

        found = _stepped(adapter, lambda: adapter.exists(keys, material.soon()), look)
        answered = [bool(one) for one in found]
        expected = [True, False, True, False]
        assert answered == expected, f"a lookup, while others ran at each of its lines, said {answered}"


def _item(content: bytes | bytearray) -> StoreItem:
    return StoreItem(material.key(1), [memoryview(content)[:4096], memoryview(content)[4096:]])


def _look_up(opened: list[L2Adapter], keys: list[bytes]) -> list[bool]:
    return [bool(found) for found in opened[0].exists(keys, material.soon())]


def _expect_looked_up(opened: list[L2Adapter], keys: list[bytes], done: str) -> None:
    material.expect_exists(opened[0], keys, [False] * len(keys), done)


def _needs_threads(adapter: L2Adapter) -> None:
    if not adapter.capabilities.thread_safe:
        not_claimed("thread_safe")


def _shares(adapter: L2Adapter, other: L2Adapter) -> bool:
    """Whether both are on one medium."""
    probe = material.key(77)
    material.expect_stored(adapter, probe, b"probe")
    found = bool(other.exists([probe], material.soon())[0])
    if adapter.capabilities.delete:
        adapter.delete([probe], material.soon())
    return found


def _stepped(adapter: L2Adapter, call: Callable[[], Any], look: Callable[[], Any]) -> Any:
    scheduler = Stepped(call, own_modules(adapter), look)
    answer = scheduler.run(LIMIT_S)
    _expect_stops(adapter, scheduler)
    return answer


def _expect_stops(adapter: L2Adapter, scheduler: Stepped[Any]) -> None:
    if scheduler.stops == 0:
        modules = ", ".join(sorted(own_modules(adapter)))
        not_judged(f"no line of {modules} ran in the call: what happens within C, or a library, cannot be stopped")


def _line_by_line(
    adapter: L2Adapter,
    kit: Kit,
    begin: Callable[[], Any],
    call: Callable[[], T],
    change: Callable[[], Any],
    most: int = STOPS_MAX,
) -> Iterator[tuple[T, str]]:
    """Repeat `call`, each time with a change at another one of its lines. Yields the call's answer, and where the
    change was. Covers all lines; at the quick speed, on a slow medium, a sample."""

    def changed_at(line: int) -> tuple[T, int]:
        begin()
        scheduler = Stepped(call, own_modules(adapter), change, only=line)
        answer = scheduler.run(LIMIT_S)
        _expect_stops(adapter, scheduler)
        return answer, scheduler.stops

    allowance, lines = Allowance(kit), most
    for line in spread(most):
        if line >= lines or not allowance.left():
            continue
        answer, stops = changed_at(line)
        lines = min(most, stops) if line == 0 else lines
        if stops > line:  # a run may take a few lines less than another
            yield answer, f"line {line + 1} of those that it ran"


def _load_one(adapter: L2Adapter) -> tuple[Outcome, bytes]:
    return material.load(adapter, material.key(1), 4096, BYTES - 4096)


def _expect_whole(outcome: Outcome, found: bytes, versions: Sequence[bytes], done: str, may_miss: bool) -> None:
    if outcome.result is Result.DONE:
        whole = found[: outcome.nbytes] in versions
        assert whole, f"{done} said DONE with {outcome.nbytes:,} bytes that are no object that was stored"
    else:
        busy = outcome.result is Result.THROTTLED or (outcome.result is Result.FAILED and outcome.retryable)
        legal = busy or (may_miss and outcome.result is Result.MISS)
        assert legal, f"{done} was answered {material.seen(outcome)}"


def _expect_one_of(reader: L2Adapter, versions: dict[str, bytes], may_miss: bool, while_: str) -> None:
    outcome, found = material.load(reader, material.key(1), BYTES)
    if outcome.result is Result.DONE:
        whole = found[: outcome.nbytes] in versions.values()
        assert whole, f"while {while_}, a load said DONE with {outcome.nbytes:,} bytes: not {' or '.join(versions)}"
    else:
        legal = {Result.FAILED, Result.THROTTLED} | ({Result.MISS} if may_miss else set())
        message = f"while {while_}, a load was answered {material.seen(outcome)}"
        assert outcome.result in legal, f"{message}: {' or '.join(versions)} is there all the time"
