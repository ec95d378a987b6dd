"""How sessions end, and how a returning client takes over what it still holds."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.errors import UsageError
from lmcache_core.kernel.answers import LeaseKind, Reason
from lmcache_core.kernel.leases import LeaseBook
from lmcache_core.kernel.quota import Quarantine
from lmcache_core.kernel.reading import Reading
from lmcache_core.kernel.releases import Releases
from lmcache_core.kernel.rooms import Rooms
from lmcache_core.kernel.sessions import SERVER_SESSION, KernelSession, SessionBook
from lmcache_core.kernel.writing import Writing


class Endings:
    """Each call assumes that everything due has already been expired."""

    def __init__(
        self,
        releases: Releases,
        sessions: SessionBook,
        leases: LeaseBook,
        quarantine: Quarantine,
        writing: Writing,
        reading: Reading,
        rooms: Rooms,
    ) -> None:
        self._releases = releases
        self._sessions = sessions
        self._leases = leases
        self._quarantine = quarantine
        self._writing = writing
        self._reading = reading
        self._rooms = rooms

    def end(self, session_id: int, reason: Reason) -> None:
        """Settle everything and forget the session. The server's own session never ends."""
        session = self._sessions.by_id.get(session_id)
        if session is not None and session_id != SERVER_SESSION:
            self.settle_all(session, reason)
            self._sessions.remove(session)

    def settle_all(self, session: KernelSession, reason: Reason, lease_ids: Sequence[int] | None = None) -> None:
        """Settle the session's promises and these leases (None: all): nobody touches what they held any more. Its
        waiting grants are cancelled, for they would come after the end."""
        self._rooms.session_ended(session)
        chosen = None if lease_ids is None else frozenset(lease_ids)
        for lease in list(session.leases.values()):
            if chosen is not None and lease.kind is not LeaseKind.PROMISE and lease.id not in chosen:
                continue
            if lease.kind is LeaseKind.WRITE:
                self._writing.abort_lease(lease, reason)
            else:
                self._reading.settle(lease)

    def lost(self, session_id: int) -> None:
        """Its death is not proven: what it holds waits."""
        session = self._sessions.by_id.get(session_id)
        if session is not None and not session.lost and session_id != SERVER_SESSION:
            self._rooms.session_ended(session)
            self._quarantine.lost(session)
            self._sessions.remove_if_done(session)

    def reclaim(self, old_session_id: int, new_session_id: int, lease_ids: Sequence[int]) -> list[int]:
        """Move the named leases and settle the others. Returns the ids that moved."""
        new = self._sessions.get(new_session_id)
        old = self._sessions.by_id.get(old_session_id)
        if old is None or old is new or old_session_id == SERVER_SESSION:
            return []
        if old.uid != new.uid:
            raise UsageError(f"session {new_session_id} is of uid {new.uid} and cannot take over one of uid {old.uid}")
        moved = [lease_id for lease_id in lease_ids if self._move(lease_id, old, new)]
        self.end(old_session_id, Reason.ABORTED)
        return moved

    def keep_promises(self, old_session_id: int, new_session_id: int) -> None:
        """Move the promises of one session to another of the same client instance. Nobody touches memory under a
        promise, so the client need not declare them."""
        old, new = self._sessions.by_id.get(old_session_id), self._sessions.by_id.get(new_session_id)
        if old is None or new is None or old is new or old.uid != new.uid or old_session_id == SERVER_SESSION:
            return
        for lease in [each for each in old.leases.values() if each.kind is LeaseKind.PROMISE]:
            self._move(lease.id, old, new)
        self._sessions.remove_if_done(old)

    def _move(self, lease_id: int, old: KernelSession, new: KernelSession) -> bool:
        lease = self._leases.of_session(old, lease_id)
        if lease is None:
            return False
        self._quarantine.move(lease, new)
        if lease.account is not None and not new.accounts[lease.account_sort].nbytes:
            new.accounts[lease.account_sort] = lease.account  # with everything charged to it
        self._leases.move(lease, new)
        if lease.kind is LeaseKind.WRITE:
            self._releases.moved(lease)
        return True
