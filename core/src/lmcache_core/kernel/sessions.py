"""Sessions as the kernel knows them: who they belong to, whether they map the pool, and what they hold."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lmcache_core.errors import LimitError, NotAttachedError, UsageError
from lmcache_core.kernel.ledger import Account, Ledger, Sort
from lmcache_core.kernel.states import NO_ROW
from lmcache_core.limits import LEASES_PER_SESSION_MAX

if TYPE_CHECKING:
    from lmcache_core.kernel.leases import KernelLease
    from lmcache_core.kernel.rooms import Preparation

SERVER_SESSION = 0  # the server's own lanes
SERVER_UID = -1  # no user's: no user is blamed for a tier's overdue loads


class KernelSession:
    """One connected client. `row` marks its slots in the pool's worker table."""

    __slots__ = (
        "accounts", "attached", "holder", "id", "leases", "lost", "preparations", "quarantined_bytes", "row", "uid"
    )  # fmt: skip

    def __init__(self, session_id: int, uid: int, row: int, holder: str, accounts: list[Account]) -> None:
        self.id = session_id
        self.holder = holder  # the holder's name in the ledger
        self.accounts = accounts  # accounts of the ledger, by `Sort`
        self.uid = uid
        self.row = row
        self.attached = False
        self.lost = False  # its connection ended, but its death is not proven
        self.leases: dict[int, KernelLease] = {}
        self.preparations: dict[Preparation, None] = {}  # grants that wait for room
        self.quarantined_bytes = 0

    def may_lease(self) -> None:
        """Raise `LimitError` if the session is at its limit of leases."""
        if len(self.leases) >= LEASES_PER_SESSION_MAX and self.id != SERVER_SESSION:
            raise LimitError(
                f"session {self.id} has {len(self.leases)} open leases, the limit: commit, abort or finish some"
            )


class SessionBook:
    """All sessions, by id. Session 0 is the server's own and always exists."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        unbounded = [Account(sys.maxsize) for _ in Sort]
        server = KernelSession(SERVER_SESSION, SERVER_UID, NO_ROW, "the server", unbounded)
        server.attached = True
        self.by_id = {SERVER_SESSION: server}

    @property
    def server(self) -> KernelSession:
        return self.by_id[SERVER_SESSION]

    def open(self, session_id: int, uid: int, row: int, holder: str) -> None:
        if session_id in self.by_id:
            raise UsageError(f"session {session_id} is open already: session ids are used once")
        self.by_id[session_id] = KernelSession(session_id, uid, row, holder, self._ledger.opened(holder))

    def remove(self, session: KernelSession) -> None:
        """It has ended. What it held may be charged to its holder for some steps more."""
        if self.by_id.pop(session.id, None) is not None:
            self._ledger.closed(session.holder)

    def get(self, session_id: int) -> KernelSession:
        """A session that may make calls."""
        session = self.by_id.get(session_id)
        if session is None or session.lost:
            raise UsageError(f"session {session_id} is not open: say hello first")
        return session

    def attached(self, session_id: int) -> KernelSession:
        """A session that may be given slots."""
        session = self.get(session_id)
        if not session.attached:
            raise NotAttachedError(
                f"session {session_id} has not shown that it maps the pool: attach it, or use lookup only"
            )
        return session

    def holds(self, session_id: int) -> bool:
        """Whether anything waits for the end of the session."""
        session = self.by_id.get(session_id)
        return session is not None and bool(session.leases or session.quarantined_bytes)

    def remove_if_done(self, session: KernelSession) -> None:
        """Remove a lost session that holds nothing any more."""
        if session.lost and not session.leases:
            self.remove(session)
