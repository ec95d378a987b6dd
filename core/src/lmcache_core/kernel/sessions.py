"""Sessions as the kernel knows them: who they belong to, whether they map the pool, and what they hold."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lmcache_core.errors import LimitError, NotAttachedError, UsageError
from lmcache_core.kernel.ledger import Account, Ledger, Sort, Written
from lmcache_core.kernel.memory import Memory, MemoryAccount, MemorySort
from lmcache_core.kernel.states import NO_ROW
from lmcache_core.limits import LEASES_PER_SESSION_MAX

if TYPE_CHECKING:
    from lmcache_core.kernel.leases import KernelLease
    from lmcache_core.kernel.rooms import Preparation

SERVER_SESSION = 0  # the server's own lanes
SESSION_BYTES = 1600  # of a session, here and in the server's tables; measured
ENDED_BYTES = 700  # of one that has ended, for as long as settled leases of it are remembered; measured
NAMESPACE_BYTES = 105  # of a namespace that it uses; measured
LABEL_BYTES = 356  # of a label that it gives to one, with its place in the index by label; measured
SERVER_UID = -1  # no user's: no user is blamed for a tier's overdue loads


class KernelSession:
    """One connected client. `row` marks its slots in the pool's worker table."""

    __slots__ = (
        "accounts", "attached", "holder", "id", "leases", "lost", "memory", "own_memory", "preparations",
        "quarantined_bytes", "row", "uid", "written",
    )  # fmt: skip

    def __init__(
        self,
        session_id: int,
        uid: int,
        row: int,
        holder: str,
        accounts: list[Account],
        written: Written,
        memory: MemoryAccount,
        own_memory: MemoryAccount,
    ) -> None:
        self.id = session_id
        self.holder = holder  # the holder's name in the ledger
        self.accounts = accounts  # accounts of the ledger, by `Sort`
        self.written = written  # what all sessions of its holder have open to write
        self.memory = memory  # of its leases
        self.own_memory = own_memory  # its own, with its namespaces
        self.uid = uid
        self.row = row
        self.attached = False
        self.lost = False  # its connection ended, but its death is not proven
        self.leases: dict[int, KernelLease] = {}
        self.preparations: dict[Preparation, None] = {}  # grants that wait for room
        self.quarantined_bytes = 0

    def __del__(self) -> None:
        self.own_memory.charge(-self.own_memory.nbytes)

    def may_keep(self, nbytes: int) -> None:
        """Raise `LimitError` if so many bytes more for its leases are beyond its, its holder's or everybody's limit."""
        full = self.memory.full_for(nbytes) or self.accounts[Sort.READ].memory.full_for(1)
        if full is not None:
            raise LimitError(
                f"the leases of {full.name} fill {full.nbytes >> 20} MiB of the server's memory, and the limit is "
                f"{full.nbytes_max >> 20} MiB: commit, abort or finish some"
            )

    def may_lease(self) -> None:
        """Raise `LimitError` if the session is at its limit of leases."""
        if len(self.leases) >= LEASES_PER_SESSION_MAX and self.id != SERVER_SESSION:
            raise LimitError(
                f"session {self.id} has {len(self.leases)} open leases, the limit: commit, abort or finish some"
            )


class SessionBook:
    """All sessions, by id. Session 0 is the server's own and always exists."""

    def __init__(self, ledger: Ledger, memory: Memory) -> None:
        self._ledger = ledger
        self._memory = memory
        leases, own, holds = (MemoryAccount("the server", sys.maxsize) for _ in range(3))
        unbounded = [Account(sys.maxsize, holds) for _ in Sort]
        server = KernelSession(
            SERVER_SESSION, SERVER_UID, NO_ROW, "the server", unbounded, Written(sys.maxsize, ()), leases, own
        )
        server.attached = True
        self.by_id = {SERVER_SESSION: server}

    @property
    def server(self) -> KernelSession:
        return self.by_id[SERVER_SESSION]

    def open(self, session_id: int, uid: int, row: int, holder: str) -> None:
        if session_id in self.by_id:
            raise UsageError(f"session {session_id} is open already: session ids are used once")
        own = self._memory.open(MemorySort.SESSIONS, holder)
        own.charge(SESSION_BYTES)
        accounts, written = self._ledger.opened(holder)
        leases = self._memory.open(MemorySort.LEASES, holder)
        self.by_id[session_id] = KernelSession(session_id, uid, row, holder, accounts, written, leases, own)

    def charge_namespaces(self, session_id: int, count: int, label_chars: int) -> None:
        """The session uses so many namespaces more, or fewer; one that has ended uses none."""
        session = self.by_id.get(session_id)
        if session is not None:
            labels = LABEL_BYTES * ((label_chars > 0) - (label_chars < 0)) + label_chars
            session.own_memory.charge(NAMESPACE_BYTES * count + labels)

    def remove(self, session: KernelSession) -> None:
        """It has ended. What it held may be charged to its holder for some steps more."""
        if self.by_id.pop(session.id, None) is not None:
            self._ledger.closed(session.holder)
            session.own_memory.charge(ENDED_BYTES - session.own_memory.nbytes)

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
