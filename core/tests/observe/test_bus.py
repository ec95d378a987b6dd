"""The bus: bounded, in order, and nobody waits for anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from lmcache_core.clock import Clock
from lmcache_core.limits import EVENT_BATCH_OBJECTS, EVENT_BUS_OBJECTS_MAX
from lmcache_core.observe import bus as bus_module
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import (
    CacheEvent,
    DrainBegun,
    EventsMissed,
    ObjectsEvicted,
    PoolAdopted,
    ServerFault,
    of_objects,
    one,
)
from lmcache_core.observe.subscriber import EventSubscriber
from lmcache_testing.waiting import WAIT_S, until


class Heard(EventSubscriber):
    """Keeps what it hears; stands still, or raises, when it is told to."""

    def __init__(self) -> None:
        self.events: list[CacheEvent] = []
        self.inside = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.closed = 0

    def hear(self, events: Sequence[CacheEvent]) -> None:
        self.inside.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.events += events

    def close(self) -> None:
        self.closed += 1

    @property
    def numbers(self) -> list[float]:
        return [event.drain_s for event in self.events if isinstance(event, DrainBegun)]


class Stuck(Heard):
    """Stands still while it is closed."""

    def hear(self, events: Sequence[CacheEvent]) -> None:
        self.events += events

    def close(self) -> None:
        self.gate.wait()
        super().close()


@pytest.fixture
def make() -> Iterator[Callable[..., EventBus]]:
    buses: list[EventBus] = []
    heard: list[EventSubscriber] = []

    def made(queue_size: int = 100, clock: Clock | None = None, **subscribers: EventSubscriber) -> EventBus:
        heard.extend(subscribers.values())
        buses.append(EventBus(subscribers, queue_size, clock or Clock()))
        return buses[-1]

    yield made
    for each in heard:
        if isinstance(each, Heard):
            each.gate.set()
    for bus in buses:
        bus.close()


def emit(bus: EventBus, *numbers: int) -> None:
    for number in numbers:
        bus.emit(one, DrainBegun, drain_s=float(number))


def test_everybody_hears_everything_in_its_order(make: Callable[..., EventBus]) -> None:
    first, second = Heard(), Heard()
    bus = make(queue_size=20_000, first=first, second=second)
    emit(bus, *range(10_000))
    bus.close()
    assert first.numbers == second.numbers == list(range(10_000))
    assert (first.closed, second.closed) == (1, 1)
    assert bus.status()["emitted"] == bus.status()["subscribers"]["first"]["events"] == 10_000


def put_aside_hung(bus: EventBus, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscriber stands still, and counts as hung at once; the others, which only work, never do."""
    with monkeypatch.context() as patched:
        patched.setattr(bus_module, "SUBSCRIBER_HANG_S", 0.0)
        until(lambda: bus.status()["subscribers"][name]["disabled"] or bus.check())


def nothing_of(at_s: float) -> Iterator[CacheEvent]:
    return iter(())


def test_things_of_which_there_is_nothing_to_tell_hold_up_nothing_behind_them(make: Callable[..., EventBus]) -> None:
    heard = Heard()
    bus = make(heard=heard)
    bus.emit(nothing_of, keeps=EVENT_BATCH_OBJECTS)
    emit(bus, 1)
    until(lambda: heard.numbers == [1.0])


def test_who_was_put_aside_hears_how_many_events_a_full_bus_had_dropped_meanwhile(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "SUBSCRIBER_RETRY_S", 0.0)
    other, heard = Heard(), Heard()
    heard.may_recover = True
    bus = make(queue_size=2, other=other, heard=heard)
    other.gate.clear()
    emit(bus, 0)
    assert other.inside.wait(WAIT_S)
    emit(bus, *range(1, 11))  # 1 and 2 are kept
    heard.error = OSError("full")
    other.gate.set()
    until(lambda: other.numbers == [0.0, 1.0, 2.0])
    bus.check()
    until(lambda: [each.events for each in other.events if isinstance(each, EventsMissed)] == [8])
    until(lambda: bus.status()["subscribers"]["heard"]["missed"] == 3)
    heard.error = None
    emit(bus, 11)
    until(lambda: heard.numbers == [11.0])
    assert [each.events for each in heard.events if isinstance(each, EventsMissed)] == [11]


def test_a_full_bus_keeps_the_oldest_and_counts_what_it_drops(make: Callable[..., EventBus]) -> None:
    heard = Heard()
    bus = make(queue_size=5, heard=heard)
    heard.gate.clear()
    emit(bus, 0)
    assert heard.inside.wait(WAIT_S)
    emit(bus, *range(1, 11))
    assert bus.dropped == 5
    heard.gate.set()
    bus.close()
    assert heard.numbers == [0, 1, 2, 3, 4, 5]


def test_a_subscriber_is_told_of_a_bounded_number_of_objects_at_once(make: Callable[..., EventBus]) -> None:
    batches: list[int] = []

    class Counting(Heard):
        def hear(self, events: Sequence[CacheEvent]) -> None:
            super().hear(events)
            batches.append(sum(len(event.keys) for event in events if isinstance(event, ObjectsEvicted)))

    heard = Counting()
    bus = make(heard=heard)
    heard.gate.clear()
    emit(bus, 0)
    assert heard.inside.wait(WAIT_S)
    for number in range(20):
        keys = [bytes([number, at]) * 16 for at in range(EVENT_BATCH_OBJECTS // 4)]
        bus.emit(one, ObjectsEvicted, keeps=len(keys), namespace=1, keys=keys, nbytes=1, policy="lru")
    heard.gate.set()
    bus.close()
    assert sum(batches) == 20 * (EVENT_BATCH_OBJECTS // 4)
    assert max(batches) <= EVENT_BATCH_OBJECTS


def test_objects_that_wait_are_bounded_too(make: Callable[..., EventBus]) -> None:
    heard = Heard()
    bus = make(heard=heard)
    heard.gate.clear()
    emit(bus, 0)
    assert heard.inside.wait(WAIT_S)
    for _ in range(3):
        bus.emit(one, DrainBegun, drain_s=1.0, keeps=EVENT_BUS_OBJECTS_MAX)
    assert bus.dropped == 2  # one alone is taken, however many it is about
    heard.gate.set()
    until(lambda: not bus.status()["queue"])
    bus.emit(one, DrainBegun, drain_s=2.0, keeps=EVENT_BUS_OBJECTS_MAX)
    bus.close()
    assert bus.dropped == 2
    assert heard.numbers == [0, 1, 2]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
def test_one_that_raises_is_put_aside_and_the_others_go_on(make: Callable[..., EventBus], error: BaseException) -> None:
    bad, good = Heard(), Heard()
    bad.error = error
    bus = make(bad=bad, good=good)
    emit(bus, 1)
    until(lambda: good.numbers == [1])
    emit(bus, 2)
    until(lambda: good.numbers == [1, 2])
    assert bus.status()["subscribers"]["bad"] == {
        "events": 0,
        "missed": 2,
        "disabled": f"{type(error).__name__}: {error}",
    }
    assert bad.closed == 1


class Recovers(Heard):
    may_recover = True

    @property
    def missed(self) -> list[int]:
        return [event.events for event in self.events if isinstance(event, EventsMissed)]


def test_one_that_may_recover_is_told_again_after_a_pause_and_how_much_it_missed(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "SUBSCRIBER_RETRY_S", 0.0)
    full, good = Recovers(), Heard()
    full.error = OSError(28, "No space left on device")
    bus = make(full=full, good=good)
    for number in (1, 2):  # tried again with the second one
        emit(bus, number)
        until(lambda number=number: good.numbers[-1:] == [number])
    until(lambda: bus.status()["subscribers"]["full"]["missed"] == 2)
    assert "No space left" in bus.status()["subscribers"]["full"]["disabled"]
    full.error = None
    emit(bus, 3)
    until(lambda: full.numbers == [3])
    emit(bus, 4)
    bus.close()
    assert bus.status()["subscribers"]["full"] == {"events": 2, "missed": 2, "disabled": ""}
    assert (full.numbers, full.missed, full.closed) == ([3, 4], [2], 1)
    assert good.numbers == [1, 2, 3, 4]


def test_one_that_may_recover_is_left_alone_in_its_pause_and_ended_with_the_others(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "SUBSCRIBER_RETRY_S", 1e9)
    full, good = Recovers(), Heard()
    full.error = OSError(28, "No space left on device")
    bus = make(full=full, good=good)
    emit(bus, 1)
    until(lambda: good.numbers == [1])
    full.error = None
    emit(bus, 2)
    until(lambda: good.numbers == [1, 2])
    assert not full.events
    emit(bus, 3)
    bus.close()
    assert full.missed[0] + len(full.numbers) == 3, "it is told before it is closed"
    assert full.closed == 1


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_without_words_ends_its_subscriber_alone(make: Callable[..., EventBus]) -> None:
    bad, good = Heard(), Heard()
    bad.error = Unspeakable()
    bus = make(bad=bad, good=good)
    emit(bus, 1)
    until(lambda: good.numbers == [1])
    emit(bus, 2)
    bus.close()
    assert good.numbers == [1, 2]
    assert "Unspeakable" in bus.status()["subscribers"]["bad"]["disabled"]


def test_one_that_hangs_is_put_aside_and_the_others_hear_the_same_batch(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, good = Heard(), Heard()
    bus = make(hangs=hangs, good=good)
    hangs.gate.clear()
    emit(bus, 1)
    assert hangs.inside.wait(WAIT_S)
    put_aside_hung(bus, "hangs", monkeypatch)
    until(lambda: good.numbers == [1])
    emit(bus, 2)
    until(lambda: good.numbers == [1, 2])
    assert "did not return" in bus.status()["subscribers"]["hangs"]["disabled"]
    hangs.gate.set()  # its thread comes back, ends what it was in, and touches nothing else any more
    until(lambda: hangs.events)
    emit(bus, 3)
    until(lambda: good.numbers == [1, 2, 3])
    assert len(hangs.events) == 1
    until(lambda: hangs.closed == 1)


def test_while_the_system_gives_no_thread_the_others_wait_and_then_hear_all(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    hangs, good = Heard(), Heard()
    bus = make(hangs=hangs, good=good)
    hangs.gate.clear()
    emit(bus, 1)
    assert hangs.inside.wait(WAIT_S)
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refused)
        put_aside_hung(bus, "hangs", monkeypatch)
        bus.check()
    emit(bus, 2)
    bus.check()
    until(lambda: good.numbers == [1, 2])


def test_closing_does_not_wait_for_one_that_hangs(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bus_module, "EVENTS_CLOSE_S", 0.01)
    hangs = Heard()
    bus = make(hangs=hangs)
    hangs.gate.clear()
    emit(bus, 1)
    assert hangs.inside.wait(WAIT_S)
    bus.close()  # comes back
    assert "hangs is disabled" in caplog.text


@pytest.mark.parametrize("in_close", [False, True], ids=["while it hears", "while it is closed"])
def test_one_that_hangs_at_the_end_keeps_the_others_neither_from_their_events_nor_from_their_end(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch, in_close: bool
) -> None:
    monkeypatch.setattr(bus_module, "EVENTS_CLOSE_S", 0.01)
    before, hangs, after = Heard(), Stuck() if in_close else Heard(), Heard()
    bus = make(before=before, hangs=hangs, after=after)
    hangs.gate.clear()
    emit(bus, 1, 2)
    assert in_close or hangs.inside.wait(WAIT_S)
    bus.close()
    until(lambda: before.closed and after.closed)
    assert (before.numbers, after.numbers) == ([1, 2], [1, 2])
    hangs.gate.set()
    until(lambda: hangs.closed)
    assert [each.closed for each in (before, hangs, after)] == [1, 1, 1]


def test_what_one_was_told_as_it_hung_is_counted_as_missed_and_no_marker_is(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, good = Heard(), Heard()
    bus = make(queue_size=3, hangs=hangs, good=good)
    hangs.gate.clear()
    emit(bus, 1)
    assert hangs.inside.wait(WAIT_S)
    emit(bus, 2, 3, 4, 5, 6)  # 5 and 6 are dropped
    put_aside_hung(bus, "hangs", monkeypatch)
    until(lambda: good.numbers == [1, 2, 3, 4])
    bus.check()  # it has room for the marker again
    until(lambda: any(isinstance(event, EventsMissed) for event in good.events))
    bus.close()
    status = bus.status()
    assert (status["subscribers"]["hangs"]["missed"], status["dropped"]) == (4, 2)


def test_an_event_is_told_with_its_fields_whatever_they_are_called(make: Callable[..., EventBus]) -> None:
    """Adopted pools were not told of: their event has a field that the bus took for its own."""
    kinds = sorted(CacheEvent.__subclasses__(), key=lambda kind: kind.__name__)
    assert PoolAdopted in kinds
    heard = Heard()
    bus = make(heard=heard)
    for kind in kinds:
        bus.emit(one, kind, **{name: None for name in kind.__struct_fields__ if name != "at_s"})
    bus.close()
    assert [type(event) for event in heard.events] == kinds


def test_an_event_that_cannot_be_made_costs_that_event_alone(make: Callable[..., EventBus]) -> None:
    heard = Heard()
    bus = make(heard=heard)
    bus.emit(one, DrainBegun, no_such_field=1)
    bus.emit(one, ServerFault, where="here")
    bus.close()
    assert [event.name for event in heard.events] == ["fault"]


class Item:
    """As the kernel's objects are."""

    def __init__(self, key: bytes, namespace: int) -> None:
        self.key, self.namespace, self.nbytes = key, namespace, 4096


def test_objects_of_several_namespaces_are_an_event_each() -> None:
    items = [Item(b"a", 1), Item(b"b", 1), Item(b"c", 2)]
    made = list(of_objects(5.0, ObjectsEvicted, items, policy="lru"))
    assert made == [
        ObjectsEvicted(at_s=5.0, namespace=1, keys=[b"a", b"b"], nbytes=8192, policy="lru"),
        ObjectsEvicted(at_s=5.0, namespace=2, keys=[b"c"], nbytes=4096, policy="lru"),
    ]


# --- beside a busy loop -----------------------------------------------------------------------------------------


class BusyLoop(Clock):
    """The clock of a loop that is in one long turn until `rest`."""

    def __init__(self) -> None:
        self.looks = 0
        super().__init__(self._look)
        self.turn()

    def rest(self) -> None:
        self.rests_since_s = 0.0

    def _look(self) -> float:
        self.looks += 1
        return 1e6


def test_subscribers_are_told_once_the_loop_has_nothing_to_do(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "EVENT_PATIENCE_S", 1e6)
    heard, loop = Heard(), BusyLoop()
    emit(make(clock=loop, one=heard), 1, 2)
    until(lambda: loop.looks > 3)
    assert not heard.inside.is_set()
    loop.rest()
    until(lambda: heard.numbers == [1, 2])


def test_no_event_waits_long_for_a_loop_that_never_rests(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "EVENT_PATIENCE_S", 0.1)
    heard, loop = Heard(), BusyLoop()
    emit(make(clock=loop, one=heard), 1)
    until(lambda: heard.numbers == [1])
    assert loop.looks > 1


@pytest.mark.parametrize("objects", [0, EVENT_BUS_OBJECTS_MAX // 2])
def test_a_queue_that_is_half_full_waits_for_no_loop(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch, objects: int
) -> None:
    monkeypatch.setattr(bus_module, "EVENT_PATIENCE_S", 1e6)
    heard = Heard()
    bus = make(4 if not objects else 100, BusyLoop(), one=heard)
    bus.emit(one, DrainBegun, keeps=objects, drain_s=1.0)
    bus.emit(one, DrainBegun, drain_s=2.0)
    until(lambda: 1 in heard.numbers)


def test_closing_delivers_queued_events_though_the_loop_is_busy(
    make: Callable[..., EventBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "EVENT_PATIENCE_S", 1e6)
    heard, loop = Heard(), BusyLoop()
    bus = make(clock=loop, one=heard)
    emit(bus, 1)
    until(lambda: loop.looks > 1)
    bus.close()
    assert heard.numbers == [1]
    assert heard.closed == 1
