"""The contract of event subscribers, which learn what happens in a server, off its loop.

A plugin offers a subscriber (`Kind.EVENT_SUBSCRIBER`), and a table with its name in the settings, `[subscribers.NAME]`,
enables it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.observe.events import CacheEvent

__all__ = [
    "EventSubscriber",
    "SubscriberContext",
]


@dataclass(frozen=True)
class SubscriberContext:
    """What a subscriber knows about its server.

    Attributes:
        server: Its name.
        state_dir: The directory for files that outlive the server. It exists or can be made.
        ask_tiers: Emit an `ObjectsOnTiers` for these keys of a namespace; from any thread, and it does not wait.
            Where the bus is full there is an `EventsMissed` instead.
    """

    server: str
    state_dir: Path
    ask_tiers: Callable[[int, Sequence[bytes]], None] = lambda namespace, keys: None


class EventSubscriber(ABC):
    """Built before the server answers requests, as `factory(settings, context)`; raise errors there.

    The server guarantees that `hear` and `close` are called by one thread at a time, never the loop's, with events in
    the order in which they happened, each at most once. Some may be missing: a full bus drops events and counts them.

    The implementation comes back from `hear` within seconds, or it is disabled, as is one that raises: it gets
    no more events, and `status` says why, and how many it missed. It keeps no event's lists that it has changed:
    others hear the same events.

    Attributes:
        may_recover: True: after it has raised (a full disk, say) it is not closed, and gets events again after a pause
            of 1 s, and of twice as much each time that it raises again, up to 60 s. The first of them is then an
            `EventsMissed`, which counts those that it did not get.
        wants_blocks: True: engines are asked to report their blocks.
        wants_tokens: True: engines are also asked to report the tokens in them, which are content.
    """

    may_recover: bool = False
    wants_blocks: bool = False
    wants_tokens: bool = False

    @abstractmethod
    def hear(self, events: Sequence[CacheEvent]) -> None:
        """Handle a batch of events, at most some thousand."""

    def close(self) -> None:  # noqa: B027  # may be left out
        """The server shuts down, or this subscriber has raised and may not recover: no more events follow."""
