"""Events as lines of the server's log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from lmcache_core.observe.events import (
    CacheEvent,
    LeaseTimedOut,
    LookupAnswered,
    ObjectsEvent,
    ServerFault,
    SlotsQuarantined,
    TierStateChanged,
)
from lmcache_core.observe.files import plain
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.settings.model import Section

log = logging.getLogger("lmcache_core.events")
_TROUBLE = (LeaseTimedOut, ServerFault, SlotsQuarantined)


class LogSettings(Section):
    """Which events, and how loud."""

    level: Literal["debug", "info", "warning"] = Field(default="info", description="of events that mean no trouble")
    objects: bool = Field(default=False, description="also what becomes of objects, and lookups: many lines")


class LogEvents(EventSubscriber):
    """One line an event, with its stable name first; keys are counted. What means trouble is a warning."""

    def __init__(self, settings: LogSettings, context: SubscriberContext) -> None:
        del context  # the log knows whose it is
        self._level = logging.getLevelNamesMapping()[settings.level.upper()]
        self._objects = settings.objects

    def hear(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            if self._objects or not isinstance(event, ObjectsEvent | LookupAnswered):
                trouble = isinstance(event, _TROUBLE) or (isinstance(event, TierStateChanged) and event.state == "open")
                fields = _fields(event)
                level = max(logging.WARNING, self._level) if trouble else self._level
                log.log(level, "%s", _line(fields), extra={"event": fields})


def _fields(event: CacheEvent) -> dict[str, Any]:
    """As in a file of events, with keys counted."""
    fields: dict[str, Any] = plain(event)
    if isinstance(fields.get("keys"), list):
        fields["keys"] = len(fields["keys"])
    return fields


def _line(fields: dict[str, Any]) -> str:
    shown = (f"{field}={value}" for field, value in fields.items() if field not in ("event", "at_s"))
    return " ".join([fields["event"], *shown])
