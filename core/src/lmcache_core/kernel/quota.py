"""The cap on quarantine: a writer that goes silent must not take the pool from everyone else."""

from __future__ import annotations

from lmcache_core.kernel.leases import KernelLease
from lmcache_core.kernel.sessions import KernelSession


class Quarantine:
    """Overdue bytes, by session and by holder (a uid, or over ZMQ a CURVE key).

    Slots are charged when their write lease expires. At a cap, the responsible sessions get no new slots: those with
    overdue bytes of their own, and, if sessions without a connection left that much behind, every session of their
    holder (there is nobody else to refuse).
    """

    def __init__(self, pool_bytes_max: int, holder_bytes_max: int) -> None:
        self._pool_bytes_max = pool_bytes_max
        self._holder_bytes_max = holder_bytes_max
        self.nbytes = 0
        self.by_holder: dict[str, int] = {}
        self._lost_by_holder: dict[str, int] = {}

    def charge(self, lease: KernelLease, nbytes: int) -> None:
        """`nbytes` more of the lease's slots are overdue; negative: so many fewer."""
        lease.charged_bytes += nbytes
        self._count(lease.session, nbytes)

    def lost(self, session: KernelSession) -> None:
        """The session's connection ended: from now on its holder is responsible."""
        session.lost = True
        if session.quarantined_bytes:
            _add(self._lost_by_holder, session.holder, session.quarantined_bytes)

    def move(self, lease: KernelLease, session: KernelSession) -> None:
        """Another session is responsible for the lease from now on."""
        self._count(lease.session, -lease.charged_bytes)
        self._count(session, lease.charged_bytes)

    def refuses(self, session: KernelSession) -> bool:
        """Whether a cap is reached and the session is responsible."""
        if not self.nbytes:
            return False
        holder = session.holder
        if self._lost_by_holder.get(holder, 0) >= self._holder_bytes_max:
            return True
        over = self.nbytes >= self._pool_bytes_max or self.by_holder.get(holder, 0) >= self._holder_bytes_max
        return over and session.quarantined_bytes > 0

    def _count(self, session: KernelSession, nbytes: int) -> None:
        if nbytes:
            self.nbytes += nbytes
            session.quarantined_bytes += nbytes
            _add(self.by_holder, session.holder, nbytes)
            if session.lost:
                _add(self._lost_by_holder, session.holder, nbytes)


def _add(sums: dict[str, int], holder: str, nbytes: int) -> None:
    total = sums.get(holder, 0) + nbytes
    if total:
        sums[holder] = total
    else:
        sums.pop(holder, None)
