"""How long sessions of a class stay away, learned from those that came back."""

from __future__ import annotations

from collections import OrderedDict, deque

from lmcache_hints.limits import CLASSES_KEPT, DELAYS_KEPT, DELAYS_NEEDED, MOST, SESSIONS_REMEMBERED


class Delays:
    """Times are seconds of one clock. Bounded: the classes and sessions seen least recently are forgotten."""

    def __init__(self) -> None:
        self._by_class: OrderedDict[str, deque[float]] = OrderedDict()
        self._waiting: OrderedDict[str, tuple[str, float]] = OrderedDict()  # session → its class, since when

    def left(self, session: str, session_class: str, now: float) -> None:
        """The session waits for a tool from now on."""
        self._waiting[session] = session_class, now
        self._waiting.move_to_end(session)
        if len(self._waiting) > SESSIONS_REMEMBERED:
            self._waiting.popitem(last=False)

    def returned(self, session: str, now: float) -> None:
        """Something of the session has come; not necessarily after a wait."""
        waited = self._waiting.pop(session, None)
        if waited is None:
            return
        session_class, since = waited
        self._by_class.setdefault(session_class, deque(maxlen=DELAYS_KEPT)).append(now - since)
        self._by_class.move_to_end(session_class)
        if len(self._by_class) > CLASSES_KEPT:
            self._by_class.popitem(last=False)

    def shortest(self, session_class: str) -> float:
        """The shortest of the last delays of this class; 0 if there were too few of them to know."""
        seen = self._by_class.get(session_class, ())
        return min(seen) if len(seen) >= DELAYS_NEEDED else 0.0

    def most(self, session_class: str) -> float | None:
        """Within which `MOST` of the last sessions came back; None if there were too few of them to know."""
        seen = sorted(self._by_class.get(session_class, ()))
        return seen[int(MOST * (len(seen) - 1))] if len(seen) >= DELAYS_NEEDED else None

    def status(self) -> dict[str, int]:
        """For `status`."""
        return {"sessions_waiting": len(self._waiting), "classes": len(self._by_class)}
