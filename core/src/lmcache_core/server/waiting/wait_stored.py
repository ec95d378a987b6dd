"""Callers that wait until tiers have what was committed: the answer is delayed while any of it is on its way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lmcache_core.errors import CacheError, LimitError
from lmcache_core.limits import HOUSEKEEPING_S, STORED_WAIT_S_MAX, STORED_WAITS_PER_SESSION_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import error_reply, split_keys
from lmcache_core.server.peers.session import Session
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.waiting.explains import Explains
from lmcache_core.tiers.flow.whereabouts import StoredWatch


@dataclass(eq=False)
class _StoredWait:
    session: Session
    rid: int
    namespace: int
    keys: list[bytes]
    watch: StoredWatch
    reply_at_s: float


class StoredWaits:
    """Lives on the loop's thread. A wait holds only its answer, and a place in the limit on waits."""

    def __init__(self, l1: L1, explains: Explains, share: Share) -> None:
        self._l1 = l1
        self._explains = explains
        self._share = share
        self._waits: dict[_StoredWait, None] = {}
        self._by_session: Counter[int] = Counter()
        self._moves = 0  # the tiering's counter at the last check …
        self._look_at_s = 0.0  # … and when to check even if it has not changed, for example because a scan has ended

    def __len__(self) -> int:
        """The number of waiting calls."""
        return len(self._waits)

    def wait(self, session: Session, request: m.WaitStored) -> m.Message | None:
        """The answer, or None: it follows when none of these keys is on its way to a tier, or at the timeout."""
        keys, now, tiering = split_keys(request.keys), self._l1.clock.now, self._l1.tiering
        explanation = self._explains.look(session, request.namespace, keys)
        if tiering is None:
            return self._explains.reply(request.rid, explanation, [])
        watch = tiering.stored(request.namespace, keys)
        if not request.wait_s > 0 or watch.settled():
            return self._explains.reply(request.rid, explanation, watch.answers())
        if self._by_session[session.id] >= STORED_WAITS_PER_SESSION_MAX or self._share.full_for(session.origin):
            raise LimitError(
                f"{self._by_session[session.id]} calls of this session wait for stores, "
                f"{self._share.of(session.origin)} of {session.origin} and {self._share.taken} of all: wait for one of "
                "them"
            )
        reply_at_s = now + min(request.wait_s, STORED_WAIT_S_MAX)
        self._take_place(_StoredWait(session, request.rid, request.namespace, keys, watch, reply_at_s))
        return None

    def _take_place(self, wait: _StoredWait) -> None:
        self._waits[wait] = None
        self._by_session[wait.session.id] += 1
        self._share.take(wait.session.origin)
        self._l1.kernel.undo.add((self._leave, (wait,)))

    def cancel(self, session: Session, rid: int) -> int:
        """The session no longer wants the answer to this request id: answer at once. Returns how many waits there
        were."""
        mine = [wait for wait in self._waits if wait.session is session and wait.rid == rid]
        for wait in mine:
            self._answer(wait)
        return len(mine)

    def session_ended(self, session: Session) -> None:
        """Drop the waits of this session."""
        for wait in [wait for wait in self._waits if wait.session is session]:
            self._leave(wait)

    def step(self) -> None:
        """Answer the waits that are over. Checking one that is not takes a microsecond."""
        tiering, now = self._l1.tiering, self._l1.clock.now
        if tiering is None or not self._waits:
            return
        moved = tiering.moves != self._moves or now >= self._look_at_s
        self._moves, self._look_at_s = tiering.moves, now + HOUSEKEEPING_S if moved else self._look_at_s
        for wait in list(self._waits):
            if wait.reply_at_s <= now or (moved and wait.watch.settled()):
                self._answer(wait)

    @property
    def next_at_s(self) -> float | None:
        """When `step` has work even if nothing else happens."""
        if not self._waits:
            return None
        return min(self._look_at_s, min(wait.reply_at_s for wait in self._waits))

    def _leave(self, wait: _StoredWait) -> None:
        del self._waits[wait]
        self._by_session -= Counter([wait.session.id])
        self._share.free(wait.session.origin)

    def _answer(self, wait: _StoredWait) -> None:
        """Does nothing if the wait is gone: its session may have ended because it did not read an earlier answer."""
        if wait not in self._waits:
            return
        self._leave(wait)
        if wait.session.peer is None:
            return
        try:
            explanation = self._explains.look(wait.session, wait.namespace, wait.keys)
            wait.session.send(self._explains.reply(wait.rid, explanation, wait.watch.answers()))
        except CacheError as error:  # it has named so many namespaces since that this one was forgotten
            wait.session.send(error_reply(wait.rid, error))
