"""The contract of event subscribers: who is told what happens in a server, beside the loop and never in its way.

A subscriber is offered by a plugin (`Kind.EVENT_SUBSCRIBER`), and a table of its name in the settings,
`[subscribers.NAME]`, brings it to life.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.observe.events import CacheEvent

__all__ = [
    "EventSubscriber",
    "SubscriberContext",
]


@dataclass(frozen=True)
class SubscriberContext:
    """What a subscriber may know of its server.

    Attributes:
        server: Its name.
        state_dir: The directory of what outlives it. It is there, or can be made.
    """

    server: str
    state_dir: Path


class EventSubscriber(ABC):
    """Built before the server answers anybody, as `factory(settings, context)`; what is wrong is raised then.

    The server guarantees that `hear` and `close` are called by one thread at a time, none of them the loop's, with
    events in the order in which they happened, each at most once. Some may be missing: a full bus drops, and counts.

    The implementation comes back from `hear` within seconds, or it is put aside, as is one that raises: it is told
    nothing more, and `status` says why, and how many events it missed. It keeps no event's lists that it has changed:
    others hear the same events.

    Attributes:
        may_recover: True: after it has raised (a full disk, say) it is not closed, and is told again what happens after
            a pause of 1 s, and of twice as much each time that it raises again, up to 60 s. The first event that it is
            told then is an `EventsMissed`, of what it was not told.
        wants_blocks: True: engines are asked to report their blocks.
        wants_tokens: True: and the tokens in them, which are content.
    """

    may_recover: bool = False
    wants_blocks: bool = False
    wants_tokens: bool = False

    @abstractmethod
    def hear(self, events: Sequence[CacheEvent]) -> None:
        """What has happened, a batch at a time, at most some thousand events."""

    def close(self) -> None:  # noqa: B027  # may be left out
        """The server ends, or this subscriber has raised and may not recover: nothing more will be told."""
