"""What is there, and how much: scans, usage, and a full medium."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from lmcache_core.tiers.contract import L2Adapter, Result, StoreItem, Usage
from lmcache_testing import material
from lmcache_testing.adapter_batches import expect_all_stored, items_of
from lmcache_testing.contract import Contract, missing, not_claimed, not_judged
from lmcache_testing.speeds import Kit

QUICK_WAIT_S = 0.5
CLOCK_SLACK_S = 3600.0  # another machine's clock may be this far off; a different kind of clock is further off


class AccountTests(Contract):
    """What the kernel reads at start, and relies on from then on."""

    scan_objects: ClassVar[int]
    scan_pages_objects: ClassVar[int]
    quick_scan_pages_objects: ClassVar[int | None]
    scan_wait_s: ClassVar[float]
    tells_last_use: ClassVar[bool]

    def _pages_objects(self, kit: Kit) -> int:
        few = self.quick_scan_pages_objects
        return few if kit.quick and few is not None else self.scan_pages_objects

    # --- scan -----------------------------------------------------------------------------------------------
    def test_a_scan_sees_exactly_what_is_there(self, adapter: L2Adapter) -> None:
        _needs_scan(adapter)
        found = material.scan(adapter)
        assert not found, f"a scan of an empty medium gave {len(found)} entries: each test needs a medium of its own"
        expected: dict[bytes, int] = {}
        for number in range(self.scan_objects):
            size = 100 + number
            material.expect_stored(adapter, material.key(number), material.content(number, 40), bytes(size - 40))
            expected[material.key(number)] = size
        for number in range(0, self.scan_objects, 5):
            material.expect_stored(adapter, material.key(number), bytes(7))
            expected[material.key(number)] = 7
        material.expect_stored(adapter, material.key(1), b"")
        expected[material.key(1)] = 0
        if adapter.capabilities.delete:
            for number in range(0, self.scan_objects, 3):
                material.expect_deleted(adapter, [material.key(number)], f"{self.scan_objects} objects stored")
                del expected[material.key(number)]
        material.load(adapter, next(iter(expected)), 200)  # a use must not change what is listed
        entries = material.scan(adapter)
        _expect_entries([entry.key for entry in entries], expected, "some were stored twice, some deleted")
        for entry in entries:
            message = f"a scan says {entry.nbytes:,} bytes for an object of {expected[entry.key]:,}"
            assert entry.nbytes == expected[entry.key], message

    def test_a_scan_gives_keys_as_they_were_stored(self, adapter: L2Adapter) -> None:
        _needs_scan(adapter)
        longest = adapter.capabilities.key_bytes_max
        pairs = [key for pair in material.similar_keys(longest) for key in pair]
        keys = dict.fromkeys(key for key in (*material.DIFFICULT_KEYS, *pairs) if len(key) <= longest)
        for key in keys:
            material.expect_stored(adapter, key, b"x")
        _expect_entries([entry.key for entry in material.scan(adapter)], keys, "difficult keys were stored")

    def test_a_scan_of_many_pages_loses_none_and_doubles_none(self, adapter: L2Adapter, kit: Kit) -> None:
        """Checked at each count of objects at which a page may be exactly full."""
        _needs_scan(adapter)
        there, most = 0, self._pages_objects(kit)
        for count in sorted({*(n for n in (500, 512, 1000) if n < most), most}):
            _store_many(adapter, range(there, count))
            there = count
            keys = dict.fromkeys(material.key(number) for number in range(count))
            _expect_entries([entry.key for entry in material.scan(adapter)], keys, f"{count:,} objects stored")

    def test_a_scan_loses_none_while_others_are_deleted(self, adapter: L2Adapter, kit: Kit) -> None:
        """The kernel deletes while it scans: an object that stays is listed, whatever else is deleted meanwhile."""
        _needs_scan(adapter)
        if not adapter.capabilities.delete:
            not_claimed("delete")
        count = self._pages_objects(kit)
        _store_many(adapter, range(count))
        left = {material.key(number) for number in range(count)}
        seen: set[bytes] = set()
        gone: set[bytes] = set()
        cursor, pages = None, 0
        while pages == 0 or cursor is not None:
            page = material.page_of(adapter, cursor)
            cursor, pages = page.cursor, pages + 1
            assert pages <= 10_000, "the scan did not end within 10,000 pages while others were deleted"
            seen |= {entry.key for entry in page.entries}
            going = [entry.key for entry in page.entries][::2]
            for some in material.batches(adapter, len(going)):
                material.expect_deleted(adapter, going[some.start : some.stop], "during a scan")
            gone |= set(going)
        missing = left - gone - seen
        assert not missing, (
            f"half of each page was deleted once it was there: {len(missing)} of {len(left)} objects were in no page, "
            "and nobody deleted them. A cursor names a place among the keys, not a number of them"
        )
        if pages == 1:
            not_judged(f"{len(left):,} objects came in one page: set scan_pages_objects to more than a page holds")

    def test_two_scans_do_not_meet(self, adapter: L2Adapter, reopen: Any, kit: Kit) -> None:
        """A scan has no state but its cursor: two may run at once, and another adapter may continue one."""
        _needs_scan(adapter)
        count = self._pages_objects(kit)
        _store_many(adapter, range(count))
        keys = dict.fromkeys(material.key(number) for number in range(count))
        first, second = material.page_of(adapter, None), material.page_of(adapter, None)
        found = [[entry.key for entry in page.entries] for page in (first, second)]
        cursors = [first.cursor, second.cursor]
        turns = 0
        while any(cursor is not None for cursor in cursors):
            turns += 1
            assert turns <= 10_000, "two scans at once did not end within 10,000 pages"
            for number, cursor in enumerate(cursors):
                if cursor is not None:
                    page = material.page_of(adapter, cursor)
                    cursors[number] = page.cursor
                    found[number] += [entry.key for entry in page.entries]
        for each in found:
            _expect_entries(each, keys, "two scans, page by page in turn")
        if reopen is not None and first.cursor is not None:
            with reopen() as fresh:
                rest: list[bytes] = []
                place: str | None = first.cursor
                while place is not None:
                    page = material.page_of(fresh, place)
                    rest, place = rest + [entry.key for entry in page.entries], page.cursor
            begun = [entry.key for entry in first.entries]
            _expect_entries(begun + rest, keys, "a scan begun by one adapter and ended by another")

    def test_the_last_use_is_told_in_seconds_since_the_epoch(self, adapter: L2Adapter) -> None:
        _needs_scan(adapter)
        before = time.time()
        material.expect_stored(adapter, material.key(1), b"just now")
        for entry in material.scan(adapter):
            off_s = entry.used_at_s - before
            assert abs(off_s) < CLOCK_SLACK_S, (
                f"an object that was stored just now was last used at {entry.used_at_s:,.0f}, says a scan, and "
                f"time.time() is {before:,.0f}: is that another clock, or another unit?"
            )

    def test_a_scan_tells_the_last_use_and_not_the_scan(self, adapter: L2Adapter, kit: Kit) -> None:
        """It orders the first evictions after a start. Media that count whole seconds need a few seconds to show it."""
        _needs_scan(adapter)
        if kit.quick and self.scan_wait_s > QUICK_WAIT_S:
            not_judged(f"--kit=full unlocks it: it waits {self.scan_wait_s:g} s between two scans")
        material.expect_stored(adapter, material.key(1), b"object")
        (before,) = material.scan(adapter)
        waited_s = _wait(self.scan_wait_s)
        (after,) = material.scan(adapter)
        moved_s = after.used_at_s - before.used_at_s
        assert moved_s < waited_s / 2, (
            f"scanned twice, {waited_s:.2f} s apart: the last use of an object nobody used moved by {moved_s:.2f} s"
        )

    def test_a_load_is_a_use_that_a_scan_tells(self, adapter: L2Adapter, kit: Kit) -> None:
        """If `tells_last_use` is promised: otherwise the oldest store is evicted first after a start."""
        _needs_scan(adapter)
        if not self.tells_last_use:
            not_claimed("tells_last_use, a class attribute: that a scan knows of loads, and not of stores alone")
        if kit.quick and self.scan_wait_s > QUICK_WAIT_S:
            not_judged(f"--kit=full unlocks it: it waits {self.scan_wait_s:g} s between a store and a load")
        used, unused = material.key(1), material.key(2)
        for key in (used, unused):
            material.expect_stored(adapter, key, b"object")
            material.expect_holds(adapter, key, b"object", "stored")  # a file system records a first use by itself
        waited_s = _wait(self.scan_wait_s)
        material.expect_holds(adapter, used, b"object", "two objects stored, and loaded once")
        used_s = {entry.key: entry.used_at_s for entry in material.scan(adapter)}
        later_s = used_s[used] - used_s[unused]
        assert later_s > waited_s / 2, (
            f"two objects stored and loaded, and one of them loaded again {waited_s:.2f} s later: a scan says that it "
            f"was used {later_s:.2f} s later than the other one"
        )

    # --- usage ----------------------------------------------------------------------------------------------
    def test_usage_follows_what_is_stored(self, adapter: L2Adapter) -> None:
        nbytes = material.fitting(adapter, 100_000)  # media round up, and count things of their own: outweigh those
        before = _usage(adapter)
        expect_all_stored(adapter, items_of(range(10), nbytes))
        after = _usage(adapter)
        _expect_objects(after, before, 10, "ten objects stored")
        if before.bytes_used is not None and after.bytes_used is not None:
            more = after.bytes_used - before.bytes_used
            assert more >= 10 * nbytes, f"ten objects of {nbytes:,} bytes stored: usage says {more:,} bytes more"
        if adapter.capabilities.delete:
            material.expect_deleted(adapter, [material.key(number) for number in range(10)], "ten objects stored")
            last = _usage(adapter)
            _expect_objects(last, before, 0, "ten objects stored and deleted")
            if last.bytes_used is not None and after.bytes_used is not None:
                less = after.bytes_used - last.bytes_used
                assert less > 0, f"ten objects of {nbytes:,} bytes deleted: usage says {less:,} bytes less"

    def test_usage_counts_an_object_once(self, adapter: L2Adapter) -> None:
        """However often it is stored, and even if missing objects are deleted."""
        nbytes = material.fitting(adapter, 100_000)
        slack = 4 * nbytes  # a service may be freeing earlier objects; an error of twenty objects is a fault
        expect_all_stored(adapter, items_of(range(5), nbytes))
        once = _usage(adapter)
        if once.objects is None and once.bytes_used is None:
            not_claimed("usage tells neither objects nor bytes")
        for _ in range(4):
            expect_all_stored(adapter, items_of(range(5), nbytes))
        again = _usage(adapter)
        _expect_objects(again, once, 0, "the same five objects stored five times")
        _expect_bytes(again, once, slack, "the same five objects stored five times")
        if adapter.capabilities.delete:
            for number in range(20, 40):
                material.expect_deleted(adapter, [material.key(number)], "it never was there")
            last = _usage(adapter)
            _expect_objects(last, again, 0, "twenty keys deleted that never were there")
            _expect_bytes(last, again, slack, "twenty keys deleted that never were there")

    def test_a_fresh_handle_knows_how_much_is_there(self, adapter: L2Adapter, reopen: Any) -> None:
        if reopen is None:
            not_judged("a fixture 'reopen' unlocks it")
        nbytes = material.fitting(adapter, 100_000)
        expect_all_stored(adapter, items_of(range(5), nbytes))
        before = _usage(adapter)
        adapter.close()
        with reopen() as fresh:
            if not any(fresh.exists([material.key(0)], material.soon())):
                not_claimed("objects that outlive the adapter")
            after = _usage(fresh)
            for name, one, other in (
                ("objects", before.objects, after.objects),
                ("bytes_used", before.bytes_used, after.bytes_used),
            ):
                known = one is None or other is None or other > 0
                assert known, f"closed with {one:,} {name} and opened again: usage says {other}. None is: not known"
            _expect_objects(after, before, 0, "closed and opened again")

    def test_what_is_free_grows_less(self, adapter: L2Adapter, small_adapter: Any) -> None:
        """The kernel keeps headroom by `bytes_free`."""
        target = adapter if small_adapter is None else small_adapter
        material.expect_stored(target, material.key(99), b"what makes the medium, where that is done by a first store")
        before = _usage(target)
        if before.bytes_free is None:
            not_claimed("usage does not tell bytes_free")
        if small_adapter is None and before.bytes_used is None:
            not_judged("a fixture 'small_adapter' unlocks it: on a large medium others store and delete, too")
        nbytes = material.fitting(target, 100_000)
        for item in items_of(range(8), nbytes):
            material.expect_result(target.store([item], material.soon())[0], Result.DONE, "asked to store 8 objects")
        after = _usage(target)
        assert after.bytes_free is not None, "bytes_free was given before some stores, and is not after them"
        less = before.bytes_free - after.bytes_free
        assert less != 0, f"eight objects of {nbytes:,} bytes stored: bytes_free is {after.bytes_free:,} as before"
        if small_adapter is not None:
            assert less >= 4 * nbytes, f"eight objects of {nbytes:,} bytes stored: bytes_free is {less:,} less"

    def test_what_is_stored_was_free_before(self, adapter: L2Adapter) -> None:
        """If a medium says that 0 bytes are free, the kernel makes room until it is empty."""
        before = _usage(adapter)
        if before.bytes_free is None:
            not_claimed("usage does not tell bytes_free")
        nbytes = material.fitting(adapter, 100_000)
        keys = [material.key(number) for number in range(4)]
        expect_all_stored(adapter, items_of(range(4), nbytes))
        there = sum(map(bool, adapter.exists(keys, material.soon())))
        assert before.bytes_free >= (there - 2) * nbytes, (  # a medium may be smaller than it reports, or compress
            f"usage said that {before.bytes_free:,} bytes are free, and then {there} objects of {nbytes:,} bytes were "
            "stored, and are there: None is what it cannot tell"
        )

    def test_a_full_medium_is_an_ordinary_answer(self, adapter: L2Adapter, small_adapter: Any, compact: Any) -> None:
        able = adapter.capabilities
        if small_adapter is None:
            if able.evicts:
                missing(type(self), "small_adapter", "the adapter claims evicts")
            not_judged("a fixture 'small_adapter' unlocks it: an adapter on a medium of 1 to 4 MiB")
        nbytes = material.fitting(adapter, 200_000)
        numbers = range(1 + (8 << 20) // nbytes)  # 8 MiB for a medium of 4 MiB at most
        outcomes = [small_adapter.store(items_of([number], nbytes), material.soon())[0] for number in numbers]
        there = [bool(small_adapter.exists([material.key(n)], material.soon())[0]) for n in numbers]
        legal = {Result.DONE} if able.evicts else {Result.DONE, Result.FULL}
        for number, outcome in enumerate(outcomes):
            message = f"store {number} of 8 MiB on a smaller medium was answered {material.seen(outcome)}"
            assert outcome.result in legal, f"{message}, and a full medium is {' or '.join(sorted(legal)).upper()}"
        done = [outcome.result is Result.DONE for outcome in outcomes]
        if able.evicts:
            assert there[-1], "the newest object was dropped to make room for it"
        else:
            assert not all(done), "8 MiB were stored on a medium that holds 4 MiB at most, and every store was DONE"
            lost = sum(one and not other for one, other in zip(done, there, strict=True))
            ghosts = sum(other and not one for one, other in zip(done, there, strict=True))
            assert not lost, f"{lost} stores were DONE on a medium that fills up, and their objects are not there"
            assert not ghosts, f"{ghosts} stores were refused on a full medium, and their objects are there"
        for number, is_there in enumerate(there):
            if is_there:
                content = material.content(number, nbytes)
                material.expect_holds(small_adapter, material.key(number), content, "on a medium that was filled")
        if able.delete and not able.evicts:
            keys = [material.key(number) for number in numbers]
            for some in material.batches(small_adapter, len(keys)):
                material.expect_deleted(small_adapter, keys[some.start : some.stop], "on a full medium")
            if compact is not None:
                compact()
            material.expect_stored(small_adapter, material.key(99), material.content(99, nbytes))

    def test_a_batch_that_does_not_fit_is_answered_one_by_one(self, adapter: L2Adapter, small_adapter: Any) -> None:
        if small_adapter is None:
            not_judged("a fixture 'small_adapter' unlocks it: an adapter on a medium of 1 to 4 MiB")
        if adapter.capabilities.evicts:
            not_claimed("a medium that is full: it evicts")
        nbytes = material.fitting(adapter, 200_000)
        count = 1 + (8 << 20) // nbytes
        for some in material.batches(small_adapter, count):
            outcomes = small_adapter.store(items_of(some, nbytes), material.soon())
            there = small_adapter.exists([material.key(number) for number in some], material.soon())
            assert len(outcomes) == len(some), f"a store of {len(some)} objects gave {len(outcomes)} answers"
            for number, outcome, found in zip(some, outcomes, there, strict=True):
                done = outcome.result is Result.DONE
                message = f"of a batch that does not fit, object {number} was answered {material.seen(outcome)}"
                assert done or outcome.result is Result.FULL, f"{message}: DONE or FULL"
                assert done == bool(found), f"{message}, and exists says {bool(found)} for it"

    def test_what_did_not_fit_takes_no_room(self, adapter: L2Adapter, small_adapter: Any, compact: Any) -> None:
        """A remaining part of it would take the room of objects that fit, until somebody finds it."""
        if small_adapter is None:
            not_judged("a fixture 'small_adapter' unlocks it: an adapter on a medium of 1 to 4 MiB")
        if adapter.capabilities.evicts or not adapter.capabilities.delete:
            not_claimed("a medium that is full and can be emptied: it evicts, or does not delete")
        nbytes, large = material.fitting(adapter, 200_000), material.content(600, material.fitting(adapter, 8 << 20))
        stored: list[int] = []
        for item in items_of(range(1 + (8 << 20) // nbytes), nbytes):
            if small_adapter.store([item], material.soon())[0].result is not Result.DONE:
                break
            stored.append(len(stored))
        going = [material.key(number) for number in stored[-4:]]
        for key in going:
            material.expect_deleted(small_adapter, [key], "on a full medium")
        if compact is not None:
            compact()
        refused = material.store(small_adapter, material.key(600), large)
        if compact is not None:
            compact()
        if refused.result is Result.DONE:
            not_judged(f"what is free once four objects of {nbytes:,} bytes are deleted holds its largest object, too")
        again = small_adapter.store(items_of(stored[-4:][:1], nbytes), material.soon())[0]
        material.expect_result(
            again,
            Result.DONE,
            f"a medium was filled with {len(stored)} objects of {nbytes:,} bytes, {len(going)} of them were deleted, "
            f"a store of {len(large):,} bytes was answered {refused.result.upper()}, and then one of those that were "
            "deleted was stored again",
        )

    def test_what_does_not_fit_leaves_the_former_object_as_it_was(self, adapter: L2Adapter, small_adapter: Any) -> None:
        if small_adapter is None:
            not_judged("a fixture 'small_adapter' unlocks it: an adapter on a medium of 1 to 4 MiB")
        if adapter.capabilities.evicts:
            not_claimed("a medium that is full: it evicts")
        former, nbytes = material.content(500, 1000), material.fitting(adapter, 200_000)
        material.expect_stored(small_adapter, material.key(500), former)
        for item in items_of(range(1 + (8 << 20) // nbytes), nbytes):
            if small_adapter.store([item], material.soon())[0].result is not Result.DONE:
                break
        larger = material.content(501, nbytes)
        outcome = material.store(small_adapter, material.key(500), larger)
        done = f"a larger object stored in the place of another on a full medium, and answered {material.seen(outcome)}"
        expected = larger if outcome.result is Result.DONE else former
        material.expect_holds(small_adapter, material.key(500), expected, done)


def _wait(seconds: float) -> float:
    """Sleeps by the wall clock, which media use; returns the time it took."""
    began_s = time.time()
    while (waited_s := time.time() - began_s) < seconds:
        time.sleep(seconds - waited_s)
    return waited_s


def _needs_scan(adapter: L2Adapter) -> None:
    if not adapter.capabilities.scan:
        not_claimed("scan")


def _store_many(adapter: L2Adapter, numbers: range) -> None:
    for some in material.batches(adapter, len(numbers)):
        chosen = numbers[some.start : some.stop]
        expect_all_stored(adapter, [StoreItem(material.key(number), [memoryview(b"small")]) for number in chosen])


def _expect_entries(found: Sequence[bytes], expected: Any, done: str) -> None:
    """`found`: keys of a scan. Each expected key once, and no other."""
    missing, more = set(expected) - set(found), set(found) - set(expected)
    message = f"{done}: a scan gave {len(found):,} entries and {len(expected):,} are there"
    first = material.shown(next(iter(missing or more or {b""})))
    assert not missing, f"{message}: {len(missing):,} are missing, {first} among them"
    assert not more, f"{message}: {len(more):,} were never stored, or are gone, {first} among them"
    assert len(found) == len(set(found)), f"{message}: {len(found) - len(set(found)):,} came twice"


def _usage(adapter: L2Adapter) -> Usage:
    usage = adapter.usage()
    for name, figure in usage._asdict().items():
        assert figure is None or figure >= 0, f"usage says {name} = {figure}: None is what it cannot tell"
    return usage


def _expect_objects(after: Usage, before: Usage, more: int, done: str) -> None:
    if before.objects is not None and after.objects is not None:
        found = after.objects - before.objects
        assert found == more, f"{done}: usage says {found} objects more than before, and {more} is true"


def _expect_bytes(after: Usage, before: Usage, slack: int, done: str) -> None:
    if before.bytes_used is not None and after.bytes_used is not None:
        off = after.bytes_used - before.bytes_used
        assert abs(off) < slack, f"{done}: usage says {off:,} bytes more than before; less than {slack:,} would pass"
