"""Stores that need whole slabs to be emptied: they are answered when these are. Most need none, and never come here."""

from __future__ import annotations

from collections import Counter

from lmcache_core.errors import LeaseExpiredError
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.rooms import Preparation
from lmcache_core.limits import ROOM_WAIT_S, STORES_PER_SESSION_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import error_reply
from lmcache_core.server.peers.session import Session
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.waiting.tier_waits import TierWaits, take_back


class Stores:
    """The stores that wait for room. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, l1: L1, tier_waits: TierWaits, share: Share) -> None:
        self._kernel = kernel
        self._l1 = l1
        self._tier_waits = tier_waits  # for tiers, with what was granted: a page waits for slabs first
        self._share = share
        self._waiting: dict[Session, dict[Preparation, m.PrepareStore]] = {}
        self.waited = 0  # stores that could not be answered at once

    def wait_s(self, session: Session) -> float:
        """How long the kernel may let another store of this session wait; 0: it is answered with what there is."""
        many = len(self._waiting.get(session, ())) >= STORES_PER_SESSION_MAX or self._share.full_for(session.origin)
        return 0.0 if many else ROOM_WAIT_S

    def wait(
        self, session: Session, request: m.PrepareStore, layout_id: int, keys: list[bytes], preparation: Preparation
    ) -> None:
        """The answer follows once there is room, or after `ROOM_WAIT_S` with a part of it."""
        self._waiting.setdefault(session, {})[preparation] = request
        session.storing[request.namespace] += 1
        self._share.take(session.origin)
        self._kernel.undo.add((self._remove, (session, preparation)))
        self._l1.answer_later(preparation, lambda: self._answer_late(session, layout_id, keys, preparation))
        self.waited += 1

    def cancel(self, session: Session, rid: int) -> int:
        """Its client does not wait for the answer to this store any more. Returns how many slots that frees."""
        return take_back(self._kernel, session, rid, self._l1.clock.now)

    @property
    def under_way(self) -> int:
        """Stores that wait for room."""
        return self._share.taken

    def session_ends(self, session: Session) -> None:
        """Its leases are about to be settled, and the kernel cancels what it waits for: answer it before."""
        ended = LeaseExpiredError("the session was ended while this store waited for room: store again")
        for request in self._remove_all(session):
            session.send(error_reply(request.rid, ended))
        self._tier_waits.session_ends(session)

    def session_gone(self, session: Session) -> None:
        """The kernel cancels those that wait for it; waits for tiers are withdrawn."""
        self._remove_all(session)
        self._tier_waits.session_gone(session)
        session.storing.clear()

    def _remove_all(self, session: Session) -> list[m.PrepareStore]:
        return [self._remove(session, each) for each in list(self._waiting.get(session, {}))]

    def _remove(self, session: Session, preparation: Preparation) -> m.PrepareStore:
        """It no longer waits."""
        mine = self._waiting[session]
        request = mine.pop(preparation)
        if not mine:  # sessions come and go
            del self._waiting[session]
        session.storing -= Counter([request.namespace])
        self._share.free(session.origin)
        return request

    def _answer_late(self, session: Session, layout_id: int, keys: list[bytes], done: Preparation) -> None:
        if done not in self._waiting.get(session, {}):  # its session has gone in the step that made room
            return
        request = self._remove(session, done)
        reply: m.Message | None = None
        if done.grants is not None:
            reply = self._tier_waits.answer(session, request, layout_id, keys, done.grants)
        elif done.error is not None:
            reply = error_reply(request.rid, done.error)
        if reply is not None:
            session.send(reply)
