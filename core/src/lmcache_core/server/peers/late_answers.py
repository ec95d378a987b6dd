"""Requests that are answered later, and what somebody who watches them keeps until then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from lmcache_core.limits import LATE_ANSWERS_MAX
from lmcache_core.protocol.messages import Message
from lmcache_core.server.peers.session import Session, SessionListener

_T = TypeVar("_T")


class LateAnswers(SessionListener, Generic[_T]):
    """What is kept for each of these requests is given back exactly once: with the answer, or with None where nothing
    is known of one: the session has ended, nobody watches any more, or too many are kept. Lives on the loop's thread.
    """

    def __init__(self, done: Callable[[_T, Message | None], None]) -> None:
        """`done`: gets what was kept, and the answer."""
        self._done = done
        self._kept: OrderedDict[tuple[Session, int], _T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: Session, rid: int, kept: _T) -> None:
        """Keep this until the request is answered. Beyond `LATE_ANSWERS_MAX` the oldest is given back."""
        self._give_back((session, rid), None)  # a client that has two requests of one number
        if session.ended_by:
            self._done(kept, None)
            return
        if len(self._kept) >= LATE_ANSWERS_MAX:
            self._give_back(next(iter(self._kept)), None)
        self._kept[session, rid] = kept
        session.listen(self)

    def end(self) -> None:
        """Give everything back, and listen to nobody."""
        while self._kept:
            session, rid = next(iter(self._kept))
            session.unlisten(self)
            self._give_back((session, rid), None)

    def answered(self, session: Session, message: Message) -> None:
        self._give_back((session, getattr(message, "rid", 0)), message)

    def session_ended(self, session: Session) -> None:
        for key in [key for key in self._kept if key[0] is session]:
            self._give_back(key, None)

    def _give_back(self, key: tuple[Session, int], answer: Message | None) -> None:
        if key in self._kept:
            self._done(self._kept.pop(key), answer)
