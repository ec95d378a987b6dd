"""Who is connected, who is lost, and who is dead.

End of file is not death, and death is not end of file. A session whose connection ended is *lost*: its leases
go on. It is *dead* when its pidfd fires or its life lock is found free, and only then is its memory taken back
at once. A lost client that comes back under the same client id declares what it still holds.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from itertools import count

from lmcache_core.errors import LimitError, NotAttachedError, ProtocolError
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import LIFE_CHECK_S_MAX, LIFE_CHECK_S_MIN, SESSIONS_MAX, SILENT_SESSION_S
from lmcache_core.pool.lifelock import life_lock_free
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.server.lifeline import LifelinePeer
from lmcache_core.server.loop import Loop
from lmcache_core.server.session import Peer, Session


class Sessions:
    """All sessions, by id. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, segment: Segment, loop: Loop, on_end: Callable[[Session], None]) -> None:
        self._kernel = kernel
        self._segment = segment
        self._loop = loop
        self._on_end = on_end
        self._ids = count(1)
        self._by_id: dict[int, Session] = {}
        self._suspects: dict[int, Session] = {}  # life lock to be looked at by the clock
        self.deaths = 0

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

    def open(self, peer: Peer, client_id: bytes, name: str, pid: int, now: float, *, maps_pool: bool) -> Session:
        """A new session for a peer that said hello."""
        if len(self._by_id) >= SESSIONS_MAX:
            raise LimitError(f"{SESSIONS_MAX} sessions are connected: close some, or run another server")
        session = Session(
            next(self._ids), peer, client_id, name, peer.uid, peer.pid or pid, peer.carrier, heard_at_s=now
        )
        if maps_pool:
            session.row, session.nonce = self._segment.claim_row(session.pid)
        self._kernel.open_session(session.id, session.uid)
        self._by_id[session.id] = session
        peer.session = session
        if isinstance(peer, LifelinePeer):
            session.pidfd = peer.pidfd()
            if session.pidfd >= 0:
                self._loop.add(session.pidfd, select.EPOLLIN, lambda mask: self._dead(session))
        return session

    def attach(self, session: Session, row: int, nonce: int, held: list[int], now: float) -> list[int]:
        """The session has shown that it maps the pool. Returns the leases that it goes on holding."""
        if session.row == NO_ROW:
            raise ProtocolError("this session did not ask for the pool in its hello")
        if (row, nonce) != (session.row, session.nonce) or life_lock_free(self._segment, session.row):
            raise NotAttachedError(
                f"row {row} of the pool was not shown to be mapped: attach to the pool of this server and lock the row"
            )
        session.attached = True
        self._kernel.attach_session(session.id, row)
        kept: list[int] = []
        for old in self:
            if old.client_id == session.client_id and old is not session:
                kept += self._kernel.reclaim(old.id, session.id, held, now)
                self._forget(old)
        if session.carrier != "lifeline":
            self._suspect(session, now)  # no end of file will ever tell
        return kept

    def goodbye(self, session: Session, now: float) -> None:
        """It answers for everything it held."""
        self._kernel.session_closed(session.id, now)
        self._forget(session)

    def lost(self, peer: Peer, now: float) -> None:
        """The connection ended. Look whether its client is dead; if nothing proves it, look again by and by."""
        session, peer.session = peer.session, None
        if session is None or session.id not in self._by_id:
            return
        session.peer = None
        if not session.attached or self._proven_dead(session):
            self._dead(session)
            return
        self._kernel.session_lost(session.id, now)
        self._suspect(session, now)

    def check(self, now: float) -> None:
        """Look at the life locks that are due."""
        for session in list(self._suspects.values()):
            if session.check_at_s <= now:
                if self._proven_dead(session):
                    self._dead(session)
                else:
                    pause = 2 * session.check_pause_s if session.peer is None else LIFE_CHECK_S_MAX
                    session.check_pause_s = min(pause, LIFE_CHECK_S_MAX)
                    session.check_at_s = now + session.check_pause_s

    def next_check(self) -> float | None:
        """When `check` is due."""
        if not self._suspects:
            return None
        return min(session.check_at_s for session in self._suspects.values())

    def drop_silent(self, now: float) -> None:
        """End sessions without a lifeline or a life lock that have said nothing for long: nothing else would."""
        for session in self:
            unwatched = session.carrier != "lifeline" and not session.attached
            if unwatched and now - session.heard_at_s > SILENT_SESSION_S:
                self.goodbye(session, now)

    def close(self) -> None:
        """Drop every connection."""
        for session in self:
            self._forget(session)

    def _suspect(self, session: Session, now: float) -> None:
        session.check_pause_s = LIFE_CHECK_S_MIN
        session.check_at_s = now + LIFE_CHECK_S_MIN
        self._suspects[session.id] = session

    def _proven_dead(self, session: Session) -> bool:
        if session.pidfd >= 0:
            fired = select.poll()  # select.select() takes no descriptor above 1023
            fired.register(session.pidfd, select.POLLIN)
            if fired.poll(0):
                return True
        return session.attached and life_lock_free(self._segment, session.row)

    def _dead(self, session: Session) -> None:
        if session.id in self._by_id:
            self.deaths += 1
            self._kernel.session_dead(session.id, self._loop.now)
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        self._suspects.pop(session.id, None)
        if session.pidfd >= 0:
            self._loop.remove(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1
        if session.row != NO_ROW:
            self._segment.release_row(session.row)
            session.row = NO_ROW
        peer, session.peer = session.peer, None
        if peer is not None:
            peer.session = None
            peer.close()
        self._on_end(session)
