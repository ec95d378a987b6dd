"""Event subscribers with one realistic fault each, and the contract test that has to notice it (`caught_by`)."""

from __future__ import annotations

import io
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from lmcache_core.observe.events import EVENTS, CacheEvent
from lmcache_core.observe.subscriber import EventSubscriber
from lmcache_testing import EventSubscriberContract


class Counter(EventSubscriber):
    """Correct: counts events by their kinds."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def hear(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            self.note(event)

    def note(self, event: CacheEvent) -> None:
        kind = type(event).__name__
        self.counts[kind] = self.counts.get(kind, 0) + 1


class Wrong(EventSubscriberContract):
    caught_by: ClassVar[str]
    faulty: ClassVar[Any] = Counter

    @pytest.fixture
    def subscriber(self) -> object:
        return self.faulty()

    @pytest.fixture
    def make_subscriber(self) -> Callable[[], Any]:
        return lambda: self.faulty()


class TestChangesWhatOthersHear(Wrong):
    caught_by = "test_it_leaves_events_as_they_are"

    class faulty(Counter):
        def note(self, event: CacheEvent) -> None:
            for value in (getattr(event, name) for name in event.__struct_fields__):
                if isinstance(value, list):
                    value.sort(reverse=True)
            super().note(event)


class TestTakesKeysOutOfEvents(Wrong):
    caught_by = "test_it_leaves_events_as_they_are"

    class faulty(Counter):
        def note(self, event: CacheEvent) -> None:
            keys = getattr(event, "keys", None)
            while keys:
                keys.pop()
            super().note(event)


class TestKnowsTheEventsOfToday(Wrong):
    caught_by = "test_it_takes_events_that_it_does_not_know"

    class faulty(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.counts = {kind.__name__: 0 for kind in EVENTS}

        def note(self, event: CacheEvent) -> None:
            self.counts[type(event).__name__] += 1


class TestNeedsKeysInEachEvent(Wrong):
    caught_by = "test_it_takes_every_event_that_there_is"

    class faulty(Counter):
        def note(self, event: CacheEvent) -> None:
            self.counts["keys"] = self.counts.get("keys", 0) + len(event.keys)  # type: ignore[attr-defined]


class TestHearsPairs(Wrong):
    caught_by = "test_it_takes_every_event_that_there_is"

    class faulty(Counter):
        def hear(self, events: Sequence[CacheEvent]) -> None:
            super().hear(events)
            self.gap_s = events[-1].at_s - events[-2].at_s


class TestHangsAtOneKind(Wrong):
    caught_by = "test_it_takes_every_event_that_there_is"
    limit_s = 0.5

    class faulty(Counter):
        def note(self, event: CacheEvent) -> None:
            if type(event) is EVENTS[-1]:
                time.sleep(1000.0)


class TestCannotBeClosedTwice(Wrong):
    caught_by = "test_it_may_be_closed_twice"

    class faulty(Counter):
        def close(self) -> None:
            del self.counts


class TestRaisesWhenItCloses(Wrong):
    caught_by = "test_it_may_be_closed_twice"

    class faulty(Counter):
        def close(self) -> None:
            raise RuntimeError("the collector was not reached")


class TestIsAFunction(Wrong):
    caught_by = "test_it_is_an_event_subscriber"
    faulty = staticmethod(lambda: print)


# --- what it holds, and who calls it --------------------------------------------------------------------------------
class TestKeepsEveryEvent(Wrong):
    caught_by = "test_events_are_not_kept"

    class faulty(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[CacheEvent] = []

        def hear(self, events: Sequence[CacheEvent]) -> None:
            self.history += events
            super().hear(events)


class TestBelongsToTheThreadThatMadeIt(Wrong):
    caught_by = "test_it_is_told_and_closed_by_other_threads_than_made_it"

    class faulty(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.database = sqlite3.connect(":memory:")

        def hear(self, events: Sequence[CacheEvent]) -> None:
            self.database.execute("select 1")
            super().hear(events)

        def close(self) -> None:
            self.database.close()


class TestWaitsForTheDiskAtEachEvent(Wrong):
    caught_by = "test_a_thousand_events_take_no_seconds"

    class faulty(Counter):
        def note(self, event: CacheEvent) -> None:
            time.sleep(0.02)  # a write that waits for the disk
            super().note(event)


class TestClosesWhatItNeverOpened(Wrong):
    caught_by = "test_one_that_heard_nothing_can_be_closed"

    class faulty(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.file: Any = None

        def hear(self, events: Sequence[CacheEvent]) -> None:
            self.file = self.file or io.BytesIO()
            super().hear(events)

        def close(self) -> None:
            self.file.close()


class TestLeavesItsThreadBehind(Wrong):
    caught_by = "test_closing_leaves_nothing_behind"
    settle_s = 0.3

    class faulty(Counter):
        def __init__(self) -> None:
            super().__init__()
            threading.Thread(target=time.sleep, args=(1000.0,), name="flusher", daemon=True).start()


class TestLeavesItsFileOpen(Wrong):
    caught_by = "test_closing_leaves_nothing_behind"
    settle_s = 0.3

    class faulty(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.file = os.open(os.devnull, os.O_WRONLY)
