"""Which sessions are connected, lost, or dead.

End of file is not death, and death is not end of file. A session whose connection ended is *lost*: its leases continue.
It is *dead* when its pidfd fires or the worker's end of its life token is closed; only then is its memory reclaimed at
once. Nobody but the worker can hold either back. A worker without a token (it attached by name) is dead once its life
lock is free; others can take that lock, too, so while it is held nothing is known. A lost client that returns under the
same client id declares what it still holds.

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
from contextlib import ExitStack
from itertools import count, islice
from typing import Any

from lmcache_core.descriptors import Descriptor
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
from lmcache_core.pool.liveness import Life, by_lock, by_pidfd, by_token
from lmcache_core.pool.processes import Process, process_of
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.server.peers.lifeline import LifelinePeer
from lmcache_core.server.peers.session import Peer, Session
from lmcache_core.server.peers.session_states import SessionEvent, SessionState
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.peers.tallies import WorkerTallies
from lmcache_core.server.process.loop import Loop

log = logging.getLogger(__name__)


class SessionTable:
    """All sessions, by id. Lives on the loop's thread."""

    def __init__(
        self,
        kernel: Kernel,
        segment: Segment,
        loop: Loop,
        rows: Share,
        tallies: WorkerTallies,
        on_gone: Callable[[Session], None],
        by_id: dict[int, Session],
    ) -> None:
        """`by_id`: is filled with the sessions, each from its hello on. `on_gone`: the session will not get further
        answers; called before anything happens to its leases."""
        self._kernel = kernel
        self._segment = segment
        self._loop = loop
        self._rows = rows
        self._tallies = tallies
        self._on_gone = on_gone
        self._on_end: list[Callable[[Session], None]] = []
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

    def at_end(self, *ended: Callable[[Session], None]) -> None:
        """Call these, in this order, with each session that has ended; all of them, even if one fails."""
        self._on_end += ended

    def after_fork_in_child(self) -> None:
        """The child of an embedded server watches no session."""
        for session in self:
            for fd in (session.pidfd, session.life_fd):
                if fd >= 0:
                    os.close(fd)
            session.pidfd = session.life_fd = -1

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

    def open(
        self,
        peer: Peer,
        client_id: bytes,
        name: str,
        pid: int,
        now: float,
        *,
        wants_pool: bool,
        takes_token: bool = False,
        chunk_tokens: int = 0,
    ) -> Session:
        """The peer has said hello. If it wants the pool and gets the pool's descriptor now, it gets a row of the worker
        table at once; otherwise it may be on another machine, and gets a row once it has proved that it maps the
        pool. `takes_token`: it keeps the life token that `give_token` makes."""
        self._make_room(peer.origin, now)
        gives_row = wants_pool and peer.can_pass_fd
        former = self._of_client(client_id, peer.uid)
        returns = any(old.row != NO_ROW for old in former)
        row, nonce = self._free_row(peer, pid, returns=returns, locked=not takes_token) if gives_row else (NO_ROW, 0)
        session = self._waiting.get(peer) or self._new(peer, now)  # on some carriers the peers send first
        self._kernel.undo.add((self._unopen, (session, peer, peer in self._waiting)))
        self._waiting.pop(peer, None)
        session.client_id, session.name, session.pid, session.seen_at_s = client_id, name, peer.pid or pid, now
        session.chunk_tokens = chunk_tokens
        session.move(SessionEvent.HELLO)
        self._kernel.open_session(session.id, session.uid, holder=session.origin)
        self._by_id[session.id] = session
        peer.session = session
        for old in former:  # those that were ended to make room for this one hold nothing
            self._kernel.keep_promises(old.id, session.id, now)
            self._kernel.undo.add((self._kernel.keep_promises, (session.id, old.id, now)))
        session.wants_pool, session.takes_token = wants_pool, takes_token and gives_row
        if gives_row:
            self._seat(session, row, nonce)
        if isinstance(peer, LifelinePeer):
            self._watch(session, peer)
        return session

    def _watch(self, session: Session, peer: LifelinePeer) -> None:
        session.pidfd = peer.pidfd()
        if session.pidfd >= 0:
            self._loop.add(session.pidfd, select.EPOLLIN, lambda mask: self._died(session, self._loop.clock.now))

    def _unopen(self, session: Session, peer: Peer, waited: bool) -> None:
        """The hello has failed. The peer may say it again."""
        peer.session = session.peer = None
        self._end(session, SessionEvent.DROP, self._loop.clock.now)
        if waited:
            self._waiting[peer] = self._new(peer, self._loop.clock.now)

    def give_token(self, session: Session) -> Descriptor:
        """The worker's end of a new life token, to send to it and close; closed if it gets none."""
        theirs = Descriptor()
        if session.takes_token:
            try:
                fd, session.life_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # no descriptor is left: the row's lock must do
                return theirs
            theirs = Descriptor.of(fd)
            # Ours is the end to write to: it reports an error once nobody has the other, and nothing else is asked.
            self._loop.add(session.life_fd, 0, lambda mask: self._died(session, self._loop.clock.now))
        return theirs

    def attach(
        self, session: Session, row: int, nonce: int, held: list[int], now: float, *, locked: bool = True
    ) -> list[int]:
        """The session has proved that it maps the pool. Returns the leases that it still holds. `locked`: it holds its
        row's life lock."""
        if not session.wants_pool:
            raise ProtocolError("this session did not ask for the pool in its hello")
        former = [old for old in self._of_client(session.client_id, session.uid) if old is not session]
        if session.row == NO_ROW:
            self._make_row(session.origin, returns=any(old.row != NO_ROW for old in former))
            self._seat(session, row, self._segment.take_row(row, nonce, session.pid, locked=locked), chosen=True)
        elif (row, nonce) != (session.row, session.nonce) or (
            session.life_fd < 0 and (not locked or life_lock_free(self._segment, session.row))
        ):
            raise NotAttachedError(
                f"the client has not proved that it maps row {row} of the pool: attach to this server's "
                f"pool and lock the row"
            )
        session.move(SessionEvent.ATTACH)
        session.maps_pool, session.locked = True, locked
        if not locked:
            self._segment.tables.note_unlocked(row)
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
        if session.id in self._by_id:
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
        if self._life_of(session) is Life.DEAD:
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
            if now < session.seen_at_s + HELLO_S:
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
            if self._life_of(suspect) is Life.DEAD:
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
            deadline = next(iter(self._waiting.values())).seen_at_s + HELLO_S
            due = deadline if due is None else min(due, deadline)
        return due

    def drop_silent(self, now: float) -> None:
        """End sessions without a lifeline, and without a life lock that shows their end, that have been silent for
        long: nothing else would end them. A worker whose death cannot be proven stays as long as it holds anything."""
        for session in self:
            unwatched = session.carrier != "lifeline" and not (session.maps_pool and session.locked)
            if session.maps_pool and self._kernel.holds(session.id):
                continue
            if unwatched and now - session.seen_at_s > SILENT_SESSION_S:
                self._end(session, SessionEvent.DROP, now)

    def close(self) -> None:
        """Drop every connection."""
        for session in [*self._waiting.values(), *self]:
            self._end(session, SessionEvent.SHUT, self._loop.clock.now)

    def _new(self, peer: Peer, now: float) -> Session:
        return Session(next(self._ids), peer, peer.uid, peer.pid, peer.carrier, peer.origin, seen_at_s=now)

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
                seen_at_s, session = idle.popleft()
                current = session.id in self._by_id and session.seen_at_s == seen_at_s
                if current and not self._kernel.holds(session.id):
                    self._end_to_make_room(session, now)
                    return True
            if not again:  # sorted once for many calls: under a flood of hellos each of them comes here
                order = sorted(self._by_id.values(), key=lambda each: (each.maps_pool, each.seen_at_s))
                idle.extend(
                    (each.seen_at_s, each)
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
                now - session.seen_at_s,
                self.dropped - 1,
                extra=named("session_limit", sessions=len(self._by_id), dropped=self.dropped),
            )
        self._end(session, SessionEvent.DROP, now)

    def _free_row(self, peer: Peer, pid: int, *, returns: bool, locked: bool) -> tuple[int, int]:
        """Returns (row, nonce)."""
        self._make_row(peer.origin, returns=returns)
        process = process_of(peer.pid)  # by the system's word, not by the peer's
        try:
            return self._claim_row(pid, process, locked=locked)
        except LimitError:  # rows that former workers still have belong to no session
            if not self._end_seated():
                raise
            return self._claim_row(pid, process, locked=locked)

    def _claim_row(self, pid: int, process: Process, *, locked: bool) -> tuple[int, int]:
        row, nonce = self._segment.claim_row(pid, process, locked=locked)
        self._kernel.undo.add((self._unclaim_row, (row,)))
        return row, nonce

    def _unclaim_row(self, row: int) -> None:
        if self._segment.tables.row_claimed(row):  # otherwise its session has released it
            self._segment.release_row(row)

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
        for each in [each for each in some if self._life_of(each) is Life.DEAD]:
            self._died(each, self._loop.clock.now)

    def _end_seated(self, origin: str = "") -> bool:
        """End the session, of this origin, that has been silent the longest with a row but unattached and without a
        promise."""
        seated = [each for each in self._by_id.values() if each.state is SessionState.SEATED]
        idle = [each for each in seated if each.origin == (origin or each.origin) and not self._kernel.holds(each.id)]
        if idle:
            self._end_to_make_room(min(idle, key=lambda each: each.seen_at_s), self._loop.clock.now)
        return bool(idle)

    def _seat(self, session: Session, row: int, nonce: int, *, chosen: bool = False) -> None:
        session.move(SessionEvent.SEAT)
        tokens, spaces = session.chunk_tokens, session.namespaces
        self._tallies.watch(row, chosen=chosen, chunk_tokens=tokens, namespaces=spaces)
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

    def _life_of(self, session: Session) -> Life:
        life = by_pidfd(session.pidfd)
        if session.life_fd >= 0:
            return life.either(by_token(session.life_fd))
        if session.maps_pool and session.locked:
            return life.either(by_lock(self._segment.fileno(), self._segment.life_offset(session.row)))
        return life

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
        if session.state is not SessionState.ENDED:
            session.move(event)
        _take_all(
            (self._on_gone, session),
            (self._settle, session, event, now),
            (self._unwatch, session),
            (self._leave_row, session, event),
            (self._hang_up, session),
            *((ended, session) for ended in self._on_end),
            (session.tell_end,),
        )

    def _settle(self, session: Session, event: SessionEvent, now: float) -> None:
        session.ended_by = event.name.lower()
        self._by_id.pop(session.id, None)
        self._suspects.pop(session.id, None)
        if event is SessionEvent.DIE:
            self._kernel.session_dead(session.id, now)
        elif event in (SessionEvent.GOODBYE, SessionEvent.DROP):
            self._kernel.session_closed(session.id, now)

    def _unwatch(self, session: Session) -> None:
        for fd in (session.pidfd, session.life_fd):
            if fd >= 0:
                self._loop.remove(fd)
                os.close(fd)
        session.pidfd = session.life_fd = -1

    def _leave_row(self, session: Session, event: SessionEvent) -> None:
        row, session.row = session.row, NO_ROW
        if row == NO_ROW:
            return
        self._rows.free(session.origin)
        self._tallies.fold(row)
        if event is SessionEvent.RETURN:  # slots that its successor still holds name it for some more steps
            self._kernel.leave_row(row)
        elif event is not SessionEvent.SHUT:  # then the next server must know that somebody had it
            self._segment.release_row(row)

    def _hang_up(self, session: Session) -> None:
        peer, session.peer = session.peer, None
        if peer is not None:
            self._waiting.pop(peer, None)
            peer.session = None
            peer.close()


def _take_all(*steps: tuple[Any, ...]) -> None:
    """Take each of these steps, (function, arguments …), even if one fails; then its error is raised."""
    with ExitStack() as last_to_first:
        for step, *arguments in reversed(steps):
            last_to_first.callback(step, *arguments)
