"""The contract of event subscribers, as tests: alone with every kind of event, and in a real server."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from lmcache_core.limits import SUBSCRIBER_HANG_S
from lmcache_core.observe.events import EVENTS, CacheEvent
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.plugins.components import Kind
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.contract import Contract, raised
from lmcache_testing.embedded import NAMELESS, embedded_server
from lmcache_testing.held import expect_level
from lmcache_testing.purity import kept_bytes
from lmcache_testing.waiting import until
from lmcache_testing.watch import NotBackError, watched

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

_MANY = 1000
_WAIT_S = 60.0  # a safety net: normally within a second
_KEYS = [bytes([number]) * 32 for number in range(1, 9)]
_SAMPLES: dict[Any, Any] = {
    int: 7,
    float: 0.25,
    bool: True,
    str: "words",
    list[bytes]: _KEYS,
    bytes: bytes(len(_KEYS)),
    bytes | None: None,
    str | None: None,
    list[int]: [1, 2, 3],
    dict[str, int]: {"evicted": 3},
    int | None: None,
}


def samples(at_s: float = 1_700_000_000.0) -> list[CacheEvent]:
    """One event of every kind."""
    made: list[CacheEvent] = []
    for kind in EVENTS:
        fields = {each.name: _SAMPLES[each.type] for each in msgspec.structs.fields(kind) if each.name != "at_s"}
        made.append(kind(at_s=at_s, **fields))
    return made


def _hear(subscriber: EventSubscriber, events: list[CacheEvent], given: str) -> None:
    try:
        subscriber.hear(events)
    except Exception as error:
        raise AssertionError(f"given {given}, it raised {raised(error)}") from error


class EventSubscriberContract(Contract):
    """For an event subscriber whose package is installed. `component` is its name, and the fixture
    `subscriber_settings` gives the settings in its table (none by default)."""

    settle_s: ClassVar[float] = 5.0  # for a thread that must end

    @pytest.fixture
    def subscriber_settings(self, tmp_path: Path) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def make_subscriber(self, tmp_path: Path, subscriber_settings: dict[str, Any]) -> Callable[[], EventSubscriber]:
        """A callable that makes another one, which no server uses."""
        from lmcache_core.plugins.loader import load_plugins

        registry, context = load_plugins(), SubscriberContext("kit", tmp_path / "state")

        def make() -> EventSubscriber:
            made: EventSubscriber = registry.build(Kind.EVENT_SUBSCRIBER, self.component, subscriber_settings, context)
            return made

        return make

    @pytest.fixture
    def subscriber(self, make_subscriber: Callable[[], EventSubscriber]) -> Iterator[EventSubscriber]:
        """One that no server uses."""
        made = make_subscriber()
        yield made
        made.close()

    @pytest.fixture
    def subscriber_server(self, tmp_path: Path, subscriber_settings: dict[str, Any]) -> Iterator[Server]:
        """A server with only this subscriber."""

        with embedded_server(tmp_path, l1=NAMELESS, subscribers={self.component: subscriber_settings}) as server:
            yield server

    def test_it_is_an_event_subscriber(self, subscriber: EventSubscriber) -> None:
        assert isinstance(subscriber, EventSubscriber), f"a {type(subscriber).__name__} is no EventSubscriber"

    def test_it_takes_every_event_that_there_is(self, subscriber: EventSubscriber) -> None:
        for batch in ([each] for each in samples()):
            _hear(subscriber, batch, f"one event of the kind {type(batch[0]).__name__}")
        _hear(subscriber, samples(), "one event of every kind in one batch")

    def test_it_takes_events_that_it_does_not_know(self, subscriber: EventSubscriber) -> None:
        """A later version of the server may send more."""

        class Later(CacheEvent, tag="of_a_later_version", frozen=True):
            more: str

        _hear(subscriber, [Later(at_s=1.0, more="words"), *samples()], "an event of a later version among others")

    def test_it_leaves_events_as_they_are(self, subscriber: EventSubscriber) -> None:
        events = samples()
        before = [msgspec.msgpack.encode(event) for event in events]
        subscriber.hear(events)
        after = [msgspec.msgpack.encode(event) for event in events]
        changed = [type(event).__name__ for event, old, new in zip(events, before, after, strict=False) if old != new]
        assert after == before, (
            f"given events, it changed some that other subscribers get, too: {', '.join(changed) or 'their number'}"
        )

    def test_it_may_be_closed_twice(self, subscriber: EventSubscriber) -> None:
        subscriber.hear(samples())
        for time_ in ("once", "twice"):
            try:
                subscriber.close()
            except Exception as error:
                raise AssertionError(f"given events and closed {time_}, its close raised {raised(error)}") from error

    def test_one_that_heard_nothing_can_be_closed(self, make_subscriber: Callable[[], EventSubscriber]) -> None:
        """As in a server that ends at once, or was never used."""
        made = make_subscriber()
        try:
            made.close()
        except Exception as error:
            raise AssertionError(f"it got no event, and its close raised {raised(error)}") from error

    def test_it_is_told_and_closed_by_other_threads_than_made_it(
        self, make_subscriber: Callable[[], EventSubscriber]
    ) -> None:
        """One thread at a time, but not always the same one."""
        made = make_subscriber()
        for name, call in (("hear", lambda: made.hear(samples())), ("close", made.close)):
            try:
                watched(call, _WAIT_S)
            except Exception as error:
                raise AssertionError(f"{name} in another thread than made it raised {raised(error)}") from error

    def test_a_thousand_events_take_no_seconds(self, subscriber: EventSubscriber) -> None:
        """A subscriber that takes more than 5 s for a batch is removed, and gets no more events."""
        events = samples() * (_MANY // len(EVENTS) + 1)
        try:
            watched(lambda: subscriber.hear(events), SUBSCRIBER_HANG_S)
        except NotBackError as error:
            raise AssertionError(f"given {len(events):,} events in one batch: {error}") from None

    def test_events_are_not_kept(self, subscriber: EventSubscriber) -> None:
        """A subscriber drops the events that it has counted, written or sent: a server sends millions a day. It may
        keep the latest thousands."""

        made = samples()

        def hear(rounds: int) -> None:
            for _ in range(rounds):
                subscriber.hear([copy.copy(event) for event in made])

        rounds = 5 * _MANY // len(EVENTS)
        before = logging.root.manager.disable
        logging.disable()  # pytest keeps log records
        try:
            grown = kept_bytes(lambda: hear(rounds), lambda: hear(2 * rounds))
        finally:
            logging.disable(before)
        count = 2 * rounds * len(EVENTS)
        assert grown < 32 * count, (
            f"given {count:,} events, and as many half before: it keeps {grown:,} bytes more than then"
        )

    def test_closing_leaves_nothing_behind(self, make_subscriber: Callable[[], EventSubscriber]) -> None:
        def cycle() -> None:
            made = make_subscriber()
            made.hear(samples())
            made.close()

        expect_level(cycle, 0, "made, given events and closed", self.settle_s)

    def test_it_keeps_up_with_a_server(self, subscriber_server: Server) -> None:
        layout = Layout("uint8", (4096,))
        namespace = Namespace("kit", layout)
        with subscriber_server.connect() as client:
            for turn in range(20):
                sources = [bytes([turn]) * layout.nbytes for _ in _KEYS]
                stored = client.store(_KEYS, sources, namespace=namespace).stored
                assert stored == len(_KEYS), f"turn {turn}: {stored} of {len(_KEYS)} objects were stored"
                cleared = client.clear(namespace).objects
                assert cleared == len(_KEYS), f"turn {turn}: {cleared} of {len(_KEYS)} objects were cleared"
            status: dict[str, Any] = {}

            def all_have_come() -> bool:
                status.update(client.status()["events"])
                return not status["queue"] and bool(status["subscribers"][self.component]["events"])

            until(all_have_come, lambda: f"it to hear what became of 160 objects: {status}")
        assert status["dropped"] == 0, f"{status['dropped']} events were dropped while it heard those of a quiet server"
        disabled = status["subscribers"][self.component]["disabled"]
        assert disabled == "", f"the server disabled it: {disabled}"

    def test_it_ends_in_order(self, subscriber_server: Server, caplog: pytest.LogCaptureFixture) -> None:
        subscriber_server.stop()
        assert "failed while closing" not in caplog.text, "the server stopped, and the subscriber did not end in order"
        assert "did not return" not in caplog.text, "the server stopped, and a call of the subscriber did not come back"
