"""Stores: most are answered at once; one for which whole slabs have to be emptied is answered when they are."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from lmcache_core.kernel.answers import Grants
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.rooms import Preparation
from lmcache_core.limits import STORE_ROOM_WAIT_S, STORES_PER_SESSION_MAX, STORES_WAITING_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import error_reply, split_keys
from lmcache_core.server.l1 import L1
from lmcache_core.server.session import Session
from lmcache_core.server.store_waits import StoreWaits, granted


@dataclass(slots=True)
class _Waiting:
    preparation: Preparation
    session: Session
    rid: int
    layout_id: int


class Stores:
    """Who waits for room. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, l1: L1, store_waits: StoreWaits) -> None:
        self._kernel = kernel
        self._l1 = l1
        self._store_waits = store_waits  # for tiers, with what was granted: a page waits for slabs first
        self._waiting: deque[_Waiting] = deque()  # in the order in which they will be answered
        self._by_session: Counter[int] = Counter()
        self.waited = 0  # stores that could not be answered at once

    def prepare(self, session: Session, request: m.PrepareStore, layout_id: int) -> m.Message | None:
        """The answer, or None: it follows once there is room, or after `STORE_ROOM_WAIT_S` without all of it."""
        now, keys = self._l1.clock.now, split_keys(request.keys)
        self._l1.before_store(layout_id, len(keys))
        many = len(self._waiting) >= STORES_WAITING_MAX or self._by_session[session.id] >= STORES_PER_SESSION_MAX
        answer = self._kernel.begin_store(
            session.id,
            request.namespace,
            layout_id,
            keys,
            now,
            lease_id=request.lease,
            wait_s=0.0 if many else STORE_ROOM_WAIT_S,
        )
        if isinstance(answer, Grants):
            if self._store_waits.holds(session, request.rid, request.namespace, layout_id, keys, answer):
                return None
            return granted(request.rid, answer, now)
        self._waiting.append(_Waiting(answer, session, request.rid, layout_id))
        self._by_session[session.id] += 1
        self.waited += 1
        return None

    def answer(self) -> None:
        """Answer those that are done. Called after each step of the kernel."""
        while self._waiting and self._waiting[0].preparation.done:
            waiting = self._waiting.popleft()
            session, preparation = waiting.session, waiting.preparation
            self._by_session[session.id] -= 1
            if not self._by_session[session.id]:  # sessions come and go
                del self._by_session[session.id]
            grants = preparation.grants
            if grants is not None:
                if not self._store_waits.holds(
                    session, waiting.rid, preparation.namespace, waiting.layout_id, list(preparation.keys), grants
                ):
                    session.send(granted(waiting.rid, grants, self._l1.clock.now))
            elif preparation.error is not None:
                session.send(error_reply(waiting.rid, preparation.error))

    @property
    def under_way(self) -> int:
        """Stores that wait for room."""
        return len(self._waiting)
