"""Things on the medium that are not objects: what others put there or remove, and what a killed process leaves."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

from lmcache_core.tiers.contract import AdapterContext, L2Adapter, Result
from lmcache_testing import material
from lmcache_testing.contract import Contract, not_judged
from lmcache_testing.speeds import Allowance, Kit, spread
from lmcache_testing.stepping import STOPS_MAX, Stepped, own_modules

QUICK_KILLS, QUICK_KILLS_S = 24, 3.0
CHILD_S = 30.0  # a safety net
BYTES = 9000
LINES_MAX = 2000


class RemainsTests(Contract):
    """Needs `litter`, `wipe` or `leftovers`; kills need `reopen`."""

    notices_wipe: ClassVar[bool] = False  # True: it asks for a recount when it finds that the medium was emptied

    def test_what_is_no_object_is_none_of_ours(self, adapter: L2Adapter, litter: Any) -> None:
        """Others use the medium too: what they put there is not listed, not served, and blocks nothing."""
        if litter is None:
            not_judged("a fixture 'litter' unlocks it: a callable that puts things on the medium that are no objects")
        stored = {material.key(number): material.content(number, 500 + number) for number in range(3)}
        for key, content in stored.items():
            material.expect_stored(adapter, key, content)
        in_the_way = material.key(7)
        litter(in_the_way)
        done = "things that are no objects were put on the medium"
        if adapter.capabilities.scan:
            listed = {entry.key: entry.nbytes for entry in material.scan(adapter)}
            more = len(set(listed) - set(stored))
            assert not more, f"{done}: a scan gave {more} entries for what is no object"
            assert listed == {key: len(content) for key, content in stored.items()}, f"{done}: a scan lost some objects"
        # For a foreign thing in an object's place `exists` may say either: checking can cost as much as a load, which
        # tells.
        found = [bool(one) for one in adapter.exists([*stored, in_the_way], material.soon())]
        assert found[:3] == [True] * 3, f"{done}: exists said {found[:3]} for three objects that are there"
        for key, content in stored.items():
            material.expect_holds(adapter, key, content, done)
        outcome, _ = material.load(adapter, in_the_way, 4096)
        legal = outcome.result in (Result.MISS, Result.DAMAGED, Result.FAILED)
        assert legal, f"{done}, one in the place of an object: a load answered {material.seen(outcome)}"
        if material.store(adapter, in_the_way, b"object").result is Result.DONE:
            material.expect_holds(adapter, in_the_way, b"object", f"{done}, and one was stored over")

    def test_a_medium_that_somebody_empties_is_used_on(
        self, adapter: L2Adapter, wipe: Any, adapter_context: AdapterContext
    ) -> None:
        """A directory is deleted, a database flushed: what was there is a miss, and stores still work."""
        if wipe is None:
            not_judged("a fixture 'wipe' unlocks it: a callable that empties the medium, past the adapter")
        keys = [material.key(number) for number in range(3)]
        for turn in ("first", "second"):
            done = f"the medium was emptied for the {turn} time"
            for key in keys:
                material.expect_stored(adapter, key, b"before")
            adapter_context.recount.take()
            wipe()
            material.expect_stored(adapter, keys[0], b"afterwards")
            material.expect_holds(adapter, keys[0], b"afterwards", done)
            recounts = adapter_context.recount.take()
            assert recounts or not self.notices_wipe, f"{done}, and the store after it asked for no recount"
            wipe()
            material.expect_exists(adapter, keys, [False] * 3, done)
            material.expect_miss(adapter, keys[1], done)
            if adapter.capabilities.scan:
                left = len(material.scan(adapter))
                assert not left, f"{done}: a scan gave {left} entries"
            if adapter.capabilities.delete:
                material.expect_deleted(adapter, keys, done)

    def test_a_closed_adapter_leaves_objects_and_nothing_else(
        self, adapter: L2Adapter, leftovers: Any, reopen: Any
    ) -> None:
        """Temporary files, locks, unfinished uploads: they would take room that no accounting knows of."""
        _needs_leftovers(leftovers)
        for number in range(3):
            material.expect_stored(adapter, material.key(number), material.content(number, 5000))
        material.expect_stored(adapter, material.key(1), b"overwritten")
        material.expect_miss(adapter, material.key(9), "never stored")
        if reopen is not None:
            with reopen() as other:
                material.expect_stored(other, material.key(2), b"by another")
        adapter.close()
        _expect_none(leftovers, "objects were stored, and the adapter was closed")

    # --- kills ----------------------------------------------------------------------------------------------
    def test_a_store_that_is_killed_at_any_line_leaves_the_old_object_or_the_new_one(
        self, adapter: L2Adapter, reopen: Any, leftovers: Any, kit: Kit
    ) -> None:
        """A process dies between two lines of a store: a load gives a whole object, and the next store is not blocked.
        What it left beside the objects is removed once another adapter is opened and closed."""
        if reopen is None or not adapter.capabilities.durable:
            not_judged("needs a fixture 'reopen', and an adapter that claims durable")
        versions = {"the old": material.content(1, BYTES), "the new": material.content(2, BYTES - 1000)}
        alone = not adapter.capabilities.shared  # then the medium is the other process's, or ours
        if alone:
            adapter.close()
        lines = _lines_of_a_store(reopen, versions["the new"], alone)
        if not lines:
            not_judged("no line of the adapter ran in a store: what happens within C, or a library, cannot be stopped")
        at_most = QUICK_KILLS if kit.quick else STOPS_MAX
        at, allowance = sorted({number * lines // at_most for number in range(at_most)}), Allowance(kit, QUICK_KILLS_S)
        for line in (at[number] for number in spread(len(at))):
            if not allowance.left():
                break
            with reopen() if alone else nullcontext(adapter) as before:
                material.expect_stored(before, material.key(1), versions["the old"])
            _store_in_child(reopen, versions["the new"], line, alone)
            done = f"a process was killed at line {line + 1} of the {lines} that its store ran"
            with reopen() if alone else nullcontext(adapter) as after:
                outcome, found = material.load(after, material.key(1), BYTES)
            material.expect_result(outcome, Result.DONE, f"{done}: asked to load the object")
            whole = found[: outcome.nbytes] in versions.values()
            assert whole, f"{done}: a load said DONE with {outcome.nbytes:,} bytes: not {' or '.join(versions)}"
        adapter.close()
        with reopen() as fresh:
            material.expect_stored(fresh, material.key(1), versions["the old"])
        if leftovers is not None:
            _expect_none(
                leftovers, "processes were killed while they stored, and another adapter was opened and closed"
            )


def _needs_leftovers(leftovers: Any) -> None:
    if leftovers is None:
        not_judged("a fixture 'leftovers' unlocks it: a callable that lists what lies on the medium beside objects")


def _expect_none(leftovers: Callable[[], Any], done: str) -> None:
    left = list(leftovers())
    assert not left, (
        f"{done}: {len(left)} things that are no objects are left on the medium, {left[0]!r:.120} among them"
    )


def _lines_of_a_store(reopen: Callable[[], L2Adapter], content: bytes, read_before: bool) -> int:
    """How many lines of the adapter a store runs, including its first use of the medium. `read_before`: without it, for
    one that reads all its records then."""
    with reopen() as fresh:
        if read_before:
            fresh.exists([material.key(1)], material.soon())
        store = lambda: material.store(fresh, material.key(1), content)  # noqa: E731
        stepped = Stepped(store, own_modules(fresh), lambda: None, LINES_MAX)
        material.expect_result(stepped.run(CHILD_S), Result.DONE, "asked to store an object")
    return stepped.stops


def _store_in_child(reopen: Callable[[], L2Adapter], content: bytes, line: int, read_before: bool) -> None:
    """A separate process opens an adapter, stores, and is killed at that line, counted from 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the kit: the child uses none of them
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(int(CHILD_S))
            fresh = reopen()
            if read_before:
                fresh.exists([material.key(1)], material.soon())
            kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            store = lambda: material.store(fresh, material.key(1), content)  # noqa: E731
            Stepped(store, own_modules(fresh), kill, LINES_MAX, only=line).run(CHILD_S)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    ended = os.waitstatus_to_exitcode(status)
    # A run may take a few lines less than another: then its store has ended, which is fine.
    assert ended in (-signal.SIGKILL, 0), f"a process that was to be killed in a store ended with {ended}"
