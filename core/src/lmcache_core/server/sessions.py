"""Which sessions are connected, lost, or dead.

End of file is not death, and death is not end of file. A session whose connection ended is *lost*: its leases continue.
It is *dead* when its pidfd fires or its life lock is found free; only then is its memory reclaimed at once. A lost
client that returns under the same client id declares what it still holds.

The states of a session are in `session_states`; this module does the work of each step. Nobody can exhaust what all
share: a client that connects and says nothing is dropped after a while, and if there is no room for another session,
the session that has been silent the longest while holding nothing is ended.
"""

from __future__ import annotations

import heapq
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice

from lmcache_core.errors import LimitError, NotAttachedError, ProtocolError
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import (
    HELLO_S,
    LIFE_CHECK_S_MAX,
    LIFE_CHECK_S_MIN,
    LIFE_CHECKS_PER_TURN_MAX,
    LIMIT_WARNING_PAUSE_S,
    ROWS_RETURNING_MAX,
    SESSIONS_MAX,
    SESSIONS_PER_ORIGIN_MAX,
    SILENT_SESSION_S,
    UNANSWERED_PER_UID_MAX,
)
from lmcache_core.observe.lines import named
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.pool.lifelock import life_lock_free
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.server.lifeline import LifelinePeer
from lmcache_core.server.loop import Loop
from lmcache_core.server.session import Peer, Session
from lmcache_core.server.session_states import SessionEvent, SessionState
from lmcache_core.server.shares import Share
from lmcache_core.server.tallies import WorkerTallies

log = logging.getLogger(__name__)


class Sessions:
    """All sessions, by id. Lives on the loop's thread."""

    def __init__(
        self,
        kernel: Kernel,
        segment: Segment,
        loop: Loop,
        rows: Share,
        tallies: WorkerTallies,
        on_gone: Callable[[Session], None],
        on_end: Callable[[Session], None],
        by_id: dict[int, Session],
    ) -> None:
        """`by_id`: is filled with the sessions, each from its hello on. `on_gone`: the session will not get further
        answers; called before anything happens to its leases. `on_end`: it has ended."""
        self._kernel = kernel
        self._segment = segment
        self._loop = loop
        self._rows = rows
        self._tallies = tallies
        self._on_gone = on_gone
        self._on_end = on_end
        self._ids = count(1)
        self._by_id = by_id
        self._waiting: dict[Peer, Session] = {}  # until their hello, in the order of their deadlines
        self._suspects: dict[int, Session] = {}  # those whose life lock is checked by the clock
        # A heap of (when, which of these): an entry for each, and stale ones of those that have ended.
        self._looks: list[tuple[float, int]] = []
        # The order of ending at a limit, by the last sign of life: for each origin, and under "" for all.
        self._idle: dict[str, deque[tuple[float, Session]]] = {}
        self._warned_at_s = float("-inf")
        self.deaths = 0
        self.dropped = 0  # for lack of a hello in time, or to make room
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """The child of an embedded server watches no session."""
        for session in self:
            if session.pidfd >= 0:
                os.close(session.pidfd)
                session.pidfd = -1

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: int) -> Session | None:
        return self._by_id.get(session_id)

    def name_of(self, session_id: int) -> str | None:
        """The name that a connected session gave itself."""
        session = self._by_id.get(session_id)
        return None if session is None else session.name

    # --- the steps ----------------------------------------------------------------------------------------

    def connected(self, peer: Peer, now: float) -> None:
        """A peer has connected and must say hello within `HELLO_S`. If one uid has too many such peers, the first is
        dropped: honest clients say hello at once."""
        of_uid = [each for each in self._waiting.values() if each.uid == peer.uid]
        if len(of_uid) >= UNANSWERED_PER_UID_MAX:
            self._drop(of_uid[0])
        self._waiting[peer] = self._new(peer, now)

    def open(self, peer: Peer, client_id: bytes, name: str, pid: int, now: float, *, wants_pool: bool) -> Session:
        """The peer has said hello. If it wants the pool and gets the pool's descriptor now, it gets a row of the worker
        table at once; otherwise it may be on another machine, and gets a row once it has proved that it maps the
        pool."""
        self._make_room(peer.origin, now)
        gives_row = wants_pool and peer.can_pass_fd
        former = self._of_client(client_id, peer.uid)
        returns = any(old.row != NO_ROW for old in former)
        row, nonce = self._free_row(peer.origin, peer.pid or pid, returns=returns) if gives_row else (NO_ROW, 0)
        session = self._waiting.pop(peer, None) or self._new(peer, now)  # on some carriers the peers send first
        session.client_id, session.name, session.pid, session.heard_at_s = client_id, name, peer.pid or pid, now
        session.move(SessionEvent.HELLO)
        self._kernel.open_session(session.id, session.uid, holder=session.origin)
        self._by_id[session.id] = session
        peer.session = session
        for old in former:  # those that were ended to make room for this one hold nothing
            self._kernel.keep_promises(old.id, session.id, now)
        session.wants_pool = wants_pool
        if gives_row:
            self._seat(session, row, nonce)
        if isinstance(peer, LifelinePeer):
            session.pidfd = peer.pidfd()
            if session.pidfd >= 0:
                self._loop.add(session.pidfd, select.EPOLLIN, lambda mask: self._died(session, self._loop.clock.now))
        return session

    def attach(self, session: Session, row: int, nonce: int, held: list[int], now: float) -> list[int]:
        """The session has proved that it maps the pool. Returns the leases that it still holds."""
        if not session.wants_pool:
            raise ProtocolError("this session did not ask for the pool in its hello")
        former = [old for old in self._of_client(session.client_id, session.uid) if old is not session]
        if session.row == NO_ROW:
            self._make_row(session.origin, returns=any(old.row != NO_ROW for old in former))
            self._seat(session, row, self._segment.take_row(row, nonce, session.pid), chosen=True)
        elif (row, nonce) != (session.row, session.nonce) or life_lock_free(self._segment, session.row):
            raise NotAttachedError(
                f"the client has not proved that it maps row {row} of the pool: attach to this server's "
                f"pool and lock the row"
            )
        session.move(SessionEvent.ATTACH)
        session.maps_pool = True
        self._kernel.attach_session(session.id, row)
        kept: list[int] = []
        for old in former:
            if old.state is SessionState.ENDED:
                continue  # to make room for this one's row
            self._on_gone(old)  # its connection may not have been seen to end
            kept += self._kernel.reclaim(old.id, session.id, held, now)
            self._end(old, SessionEvent.RETURN, now)
        if session.carrier != "lifeline":
            self._suspect(session, now)  # no end of file will ever come
        return kept

    def goodbye(self, session: Session, now: float) -> None:
        """Everything that it held is settled, even if the reply has just shown that nobody reads it."""
        if session.state is not SessionState.ENDED:
            self._end(session, SessionEvent.GOODBYE, now)

    def lost(self, peer: Peer, now: float) -> None:
        """The connection ended. Check whether its client is dead; without proof, check again later."""
        waiting = self._waiting.pop(peer, None)
        if waiting is not None:
            waiting.move(SessionEvent.HANG_UP)
            return
        session, peer.session = peer.session, None
        if session is None or session.id not in self._by_id:
            return
        session.peer = None
        session.move(SessionEvent.HANG_UP)
        self._on_gone(session)
        if self._proven_dead(session):
            self._died(session, now)
        elif not self._may_hold(session):
            self._end(session, SessionEvent.DROP, now)
        else:
            self._kernel.session_lost(session.id, now)
            self._suspect(session, now)

    def check(self, now: float) -> None:
        """Drop peers that have not said hello in time, and check the life locks that are due."""
        while self._waiting:
            session = next(iter(self._waiting.values()))
            if now < session.heard_at_s + HELLO_S:
                break
            self._drop(session)
        looks = self._looks
        for _ in range(LIFE_CHECKS_PER_TURN_MAX):
            if not looks or looks[0][0] > now:
                break
            check_at_s, session_id = heapq.heappop(looks)
            suspect = self._suspects.get(session_id)
            if suspect is None or suspect.check_at_s != check_at_s:
                continue  # it has ended, or is checked at another time
            if self._proven_dead(suspect):
                self._died(suspect, now)
            elif suspect.state is SessionState.LOST and not self._may_hold(suspect):
                self._end(suspect, SessionEvent.DROP, now)
            else:
                pause = 2 * suspect.check_pause_s if suspect.peer is None else LIFE_CHECK_S_MAX
                self._look_after(suspect, min(pause, LIFE_CHECK_S_MAX), now)

    def next_check(self) -> float | None:
        """When `check` is due; perhaps too early. The cost does not depend on how many are watched."""
        due = None
        if self._looks:
            due = self._looks[0][0]
        if self._waiting:
            deadline = next(iter(self._waiting.values())).heard_at_s + HELLO_S
            due = deadline if due is None else min(due, deadline)
        return due

    def drop_silent(self, now: float) -> None:
        """End sessions without a lifeline or a life lock that have been silent for long: nothing else would end
        them."""
        for session in self:
            unwatched = session.carrier != "lifeline" and not session.maps_pool
            if unwatched and now - session.heard_at_s > SILENT_SESSION_S:
                self._end(session, SessionEvent.DROP, now)

    def close(self) -> None:
        """Drop every connection."""
        for session in [*self._waiting.values(), *self]:
            self._end(session, SessionEvent.SHUT, self._loop.clock.now)

    def _new(self, peer: Peer, now: float) -> Session:
        return Session(next(self._ids), peer, peer.uid, peer.pid, peer.carrier, peer.origin, heard_at_s=now)

    def _of_client(self, client_id: bytes, uid: int) -> list[Session]:
        """The sessions of one client instance: more than one while it reconnects."""
        return [each for each in self._by_id.values() if each.client_id == client_id and each.uid == uid]

    # --- room ---------------------------------------------------------------------------------------------

    def _make_room(self, origin: str, now: float) -> None:
        """Make room for another session, also of this origin. Raises `LimitError` if every session holds something."""
        if len(self._by_id) < min(SESSIONS_PER_ORIGIN_MAX, SESSIONS_MAX):
            return
        of_origin = sum(session.origin == origin and not session.maps_pool for session in self._by_id.values())
        if of_origin >= SESSIONS_PER_ORIGIN_MAX and not self._end_idle(now, origin):
            raise LimitError(
                f"{of_origin} sessions of {origin} that map no pool are connected, the limit, and each holds "
                "something: close some"
            )
        if len(self._by_id) >= SESSIONS_MAX and not self._end_idle(now):
            raise LimitError(
                f"{SESSIONS_MAX} sessions are connected, and each holds something: close some, or run another server"
            )

    def _end_idle(self, now: float, origin: str = "") -> bool:
        """End the session that has been silent the longest while holding nothing, first those that do not map the pool;
        for one origin only those, because only they are counted together."""
        idle = self._idle.setdefault(origin, deque())
        for again in (False, True):
            while idle:
                heard_at_s, session = idle.popleft()
                current = session.id in self._by_id and session.heard_at_s == heard_at_s
                if current and not self._kernel.holds(session.id):
                    self._end_to_make_room(session, now)
                    return True
            if not again:  # sorted once for many calls: under a flood of hellos each of them comes here
                order = sorted(self._by_id.values(), key=lambda each: (each.maps_pool, each.heard_at_s))
                idle.extend(
                    (each.heard_at_s, each)
                    for each in order
                    if not origin or (each.origin == origin and not each.maps_pool)
                )
        del self._idle[origin]
        return False

    def _end_to_make_room(self, session: Session, now: float) -> None:
        self.dropped += 1
        if now - self._warned_at_s >= LIMIT_WARNING_PAUSE_S:
            self._warned_at_s = now
            log.warning(
                "a limit of sessions is reached (%d are connected): session %d (%r, %s, %s) was silent for %.1f s, "
                "held nothing, and was ended; so were %d before it",
                len(self._by_id),
                session.id,
                session.name,
                session.carrier,
                session.origin,
                now - session.heard_at_s,
                self.dropped - 1,
                extra=named("session_limit", sessions=len(self._by_id), dropped=self.dropped),
            )
        self._end(session, SessionEvent.DROP, now)

    def _free_row(self, origin: str, pid: int, *, returns: bool) -> tuple[int, int]:
        """Returns (row, nonce)."""
        self._make_row(origin, returns=returns)
        try:
            return self._segment.claim_row(pid)
        except LimitError:  # rows that former workers still have belong to no session
            if not self._end_seated():
                raise
            return self._segment.claim_row(pid)

    def _make_row(self, origin: str, *, returns: bool) -> None:
        """Free a row of the worker table for another session of this origin. If all rows are taken, a session that has
        not attached gives up its row; if the origin has used up its share, one of its own does. `returns`: the same
        client has a row already, and gives it up when it attaches."""
        rows = self._rows
        spare = ROWS_RETURNING_MAX if returns else 0
        if rows.taken >= rows.total + spare:
            self._end_seated()
        if rows.full_for(origin, spare):
            self._end_dead(origin)
        if rows.full_for(origin, spare) and not self._end_seated(origin):
            raise LimitError(
                f"{rows.taken} of {rows.total} worker rows of pool {self._segment.info.name!r} are in use, "
                f"{rows.of(origin)} of them by {origin}, which gets no more: close some of its clients"
            )

    def _end_dead(self, origin: str) -> None:
        """End lost sessions of the origin whose death is proven by now, before the clock would check them."""
        lost = (each for each in list(self._suspects.values()) if each.state is SessionState.LOST)
        some = islice((each for each in lost if each.origin == origin), LIFE_CHECKS_PER_TURN_MAX)
        for each in [each for each in some if self._proven_dead(each)]:
            self._died(each, self._loop.clock.now)

    def _end_seated(self, origin: str = "") -> bool:
        """End the session, of this origin, that has been silent the longest with a row but unattached and without a
        promise."""
        seated = [each for each in self._by_id.values() if each.state is SessionState.SEATED]
        idle = [each for each in seated if each.origin == (origin or each.origin) and not self._kernel.holds(each.id)]
        if idle:
            self._end_to_make_room(min(idle, key=lambda each: each.heard_at_s), self._loop.clock.now)
        return bool(idle)

    def _seat(self, session: Session, row: int, nonce: int, *, chosen: bool = False) -> None:
        session.move(SessionEvent.SEAT)
        self._tallies.watch(row, chosen=chosen)
        session.row, session.nonce = row, nonce
        self._rows.take(session.origin)

    # --- ends ---------------------------------------------------------------------------------------------

    def _may_hold(self, session: Session) -> bool:
        """Whether its end would lose something: memory that it may touch, or a promise that another one redeems."""
        return session.maps_pool or self._kernel.holds(session.id)

    def _suspect(self, session: Session, now: float) -> None:
        self._suspects[session.id] = session
        self._look_after(session, LIFE_CHECK_S_MIN, now)

    def _look_after(self, session: Session, pause_s: float, now: float) -> None:
        session.check_pause_s = pause_s
        session.check_at_s = now + pause_s
        heapq.heappush(self._looks, (session.check_at_s, session.id))

    def _proven_dead(self, session: Session) -> bool:
        if session.pidfd >= 0:
            fired = select.poll()  # select.select() accepts no descriptor above 1023
            fired.register(session.pidfd, select.POLLIN)
            if fired.poll(0):
                return True
        return session.maps_pool and life_lock_free(self._segment, session.row)

    def _died(self, session: Session, now: float) -> None:
        if session.id in self._by_id:
            self.deaths += 1
            self._end(session, SessionEvent.DIE, now)

    def _drop(self, session: Session) -> None:
        """Drop a peer that has not said hello; there is nothing to settle."""
        self.dropped += 1
        self._end(session, SessionEvent.DROP, self._loop.clock.now)

    def _end(self, session: Session, event: SessionEvent, now: float) -> None:
        """The only way to end a session. Its holdings are settled according to what ended it."""
        session.move(event)
        session.ended_by = event.name.lower()
        self._on_gone(session)
        if event is SessionEvent.DIE:
            self._kernel.session_dead(session.id, now)
        elif event in (SessionEvent.GOODBYE, SessionEvent.DROP):
            self._kernel.session_closed(session.id, now)
        self._by_id.pop(session.id, None)
        self._suspects.pop(session.id, None)
        if session.pidfd >= 0:
            self._loop.remove(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1
        if session.row != NO_ROW:
            self._tallies.fold(session.row)
            if event is SessionEvent.RETURN:  # slots that its successor still holds name it for some more steps
                self._kernel.leave_row(session.row)
            else:
                self._segment.release_row(session.row)
            session.row = NO_ROW
            self._rows.free(session.origin)
        peer, session.peer = session.peer, None
        if peer is not None:
            self._waiting.pop(peer, None)
            peer.session = None
            peer.close()
        self._on_end(session)
        session.tell_end()
