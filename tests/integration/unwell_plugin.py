"""A package whose components do what they must not, for servers that have to live with it.

The fixture `unwell` installs it as pip would, so that it runs in the process of a server that a test starts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmcache_core import ComponentSpec, Kind, hookimpl
from lmcache_core.kernel.contracts import Entry
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.observe.events import CacheEvent
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.policies.lru import LruEviction
from lmcache_core.server.companion import Companion, CompanionContext
from lmcache_core.settings.model import Section

STUCK = 60  # subscribers: each is disabled after five seconds, and a bus is full for as long as one is left


class StuckSettings(Section):
    """Of a subscriber that hangs."""

    path: Path  # it does not come back while there is such a file


class BrittleSettings(Section):
    """Of a companion."""

    says: str = "it broke"


class Stuck(EventSubscriber):
    """Does not come back while there is a file, and leaves another beside it that says so."""

    wants_blocks = True

    def __init__(self, settings: StuckSettings, context: SubscriberContext) -> None:
        del context
        self._path = settings.path

    def hear(self, events: Sequence[CacheEvent]) -> None:
        while self._path.exists():
            self._path.with_suffix(".hangs").touch()
            time.sleep(0.002)


class BrittleEviction(LruEviction):
    """Raises for everything that is new to it."""

    def insert(self, entries: Sequence[Entry]) -> None:
        raise RuntimeError("the policy's own fault")


class Brittle(Companion):
    """Raises when it is asked for something."""

    def __init__(self, settings: BrittleSettings, context: CompanionContext) -> None:
        del context
        self._says = settings.says

    def offers(self) -> dict[str, object]:
        return {}

    def committed(self, objects: Sequence[Incarnation]) -> None:
        pass

    def left(self, objects: Sequence[Incarnation]) -> None:
        pass

    def operate(self, operation: str, arguments: Mapping[str, object]) -> dict[str, object]:
        raise RuntimeError(self._says)

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


@hookimpl
def lmcache_components() -> list[ComponentSpec]:
    here = __name__
    return [
        ComponentSpec(Kind.EVICTION_POLICY, "brittle", f"{here}:BrittleEviction"),
        ComponentSpec(Kind.COMPANION, "brittle", f"{here}:Brittle", f"{here}:BrittleSettings"),
        *(
            ComponentSpec(Kind.EVENT_SUBSCRIBER, f"stuck{number}", f"{here}:Stuck", f"{here}:StuckSettings")
            for number in range(STUCK)
        ),
    ]
