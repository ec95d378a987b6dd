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
WINDOW_S = 10.0
_TROUBLE = (LeaseTimedOut, ServerFault, SlotsQuarantined)


class LogSettings(Section):
    """Which events are logged, and at which level."""

    level: Literal["debug", "info", "warning"] = Field(
        default="info", description="level of events that report no problem"
    )
    objects: bool = Field(default=False, description="also log events of objects and lookups: many lines")
    lines_max: int = Field(
        default=100, ge=1, description="lines for one kind of event within 10 s; further ones are counted"
    )


class _Window:
    """Events of one kind since a certain time."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.events = 0

    def over(self, at_s: float) -> bool:
        return not 0 <= at_s - self.at_s < WINDOW_S  # the clock may have been set back


class LogEvents(EventSubscriber):
    """One line for each event, with its stable name first; keys are counted. Problems are warnings. At most `lines_max`
    events of one kind are logged within 10 s, then one line says how many were not."""

    def __init__(self, settings: LogSettings, context: SubscriberContext) -> None:
        del context  # the log already names the server
        self._level = logging.getLevelNamesMapping()[settings.level.upper()]
        self._objects = settings.objects
        self._lines_max = settings.lines_max
        self._windows: dict[str, _Window] = {}

    def hear(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            if self._objects or not isinstance(event, ObjectsEvent | LookupAnswered):
                self._tell(event)
        if events:
            for name, window in list(self._windows.items()):
                if window.over(events[-1].at_s):
                    self._end(name)

    def close(self) -> None:
        for name in list(self._windows):
            self._end(name)

    def _tell(self, event: CacheEvent) -> None:
        window = self._windows.get(event.name)
        if window is None or window.over(event.at_s):
            self._end(event.name)
            window = self._windows[event.name] = _Window(event.at_s)
        window.events += 1
        if window.events > self._lines_max:
            return
        trouble = isinstance(event, _TROUBLE) or (isinstance(event, TierStateChanged) and event.state == "open")
        fields = _fields(event)
        level = max(logging.WARNING, self._level) if trouble else self._level
        log.log(level, "%s", _line(fields), extra={"event": fields})

    def _end(self, name: str) -> None:
        """The window of these has ended: log how many had no line."""
        window = self._windows.pop(name, None)
        if window is not None and window.events > self._lines_max:
            fields = {"event": "left_out", "of": name, "events": window.events - self._lines_max}
            log.warning("%s", _line(fields), extra={"event": fields})


def _fields(event: CacheEvent) -> dict[str, Any]:
    """The fields as in an event file, with keys counted."""
    fields: dict[str, Any] = plain(event)
    if isinstance(fields.get("keys"), list):
        fields["keys"] = len(fields["keys"])
    return fields


def _line(fields: dict[str, Any]) -> str:
    shown = (f"{field}={value}" for field, value in fields.items() if field not in ("event", "at_s"))
    return " ".join([fields["event"], *shown])
