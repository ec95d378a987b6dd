"""Stores that wait for room: with `dirty = "wait"` the answer to a store that finds the pool full is delayed while
tiers are still writing what fills it, for `store_wait_s` at most. The loop continues meanwhile."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_core.errors import CacheError
from lmcache_core.kernel.answers import Grant, Grants, Settled
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.rooms import Preparation
from lmcache_core.limits import HOUSEKEEPING_S, STORES_PER_SESSION_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import pack_u64
from lmcache_core.server.peers.session import GrantedPage, Session
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.pool.l1 import L1


@dataclass(eq=False)
class _Wait:
    """One page of a store: granted in part, or not at all, and not answered yet."""

    session: Session
    rid: int
    namespace: int
    layout_id: int
    keys: list[bytes]
    grants: Grants
    reply_at_s: float
    preparation: Preparation | None = None  # slabs are being emptied for it


class TierWaits:
    """First come, first served: room goes to the oldest. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, l1: L1, share: Share, wait_s: float) -> None:
        """`wait_s` 0: stores do not wait."""
        self._kernel = kernel
        self._l1 = l1
        self._share = share
        self._wait_s = wait_s
        self.waits: dict[_Wait, None] = {}
        self._by_session: Counter[Session] = Counter()
        self._unshielded = 0  # the kernel's count at the last attempt …
        self._retry_at_s = 0.0  # … and when to try again even if it has not changed, because readers end, too
        self.waited = 0  # since the start
        self.waited_in_vain = 0  # of these, those answered FULL anyway
        self.refused_full = 0  # objects answered FULL, whether their stores waited or not

    def __len__(self) -> int:
        """Stores that wait."""
        return len(self.waits)

    def answer(
        self, session: Session, request: m.PrepareStore, layout_id: int, keys: list[bytes], grants: Grants
    ) -> m.Granted | None:
        """The answer to a page of a store. None: it is held back, since the page is full, and room is to come."""
        if self._holds(session, request, layout_id, keys, grants):
            return None
        return self._granted(session, request.rid, grants)

    def _holds(
        self, session: Session, request: m.PrepareStore, layout_id: int, keys: list[bytes], grants: Grants
    ) -> bool:
        if not self._wait_s or Grant.FULL not in grants.statuses or not self._kernel.shielded:
            return False
        if self._by_session[session] >= STORES_PER_SESSION_MAX or self._share.full_for(session.origin):
            return False
        now = self._l1.clock.now
        if not self.waits:
            self._unshielded, self._retry_at_s = self._kernel.unshielded, now + HOUSEKEEPING_S
        self._take_place(_Wait(session, request.rid, request.namespace, layout_id, keys, grants, now + self._wait_s))
        self.waited += 1
        return True

    def _take_place(self, wait: _Wait) -> None:
        self.waits[wait] = None
        self._by_session[wait.session] += 1
        wait.session.storing[wait.namespace] += 1
        self._share.take(wait.session.origin)
        self._kernel.undo.add((self._remove, (wait,)))

    def step(self) -> bool:
        """Give the oldest what room there is, and answer those that have waited long enough. A bounded piece of work,
        for one page; returns whether there is more."""
        now, kernel = self._l1.clock.now, self._kernel
        while self.waits and (oldest := next(iter(self.waits))).reply_at_s <= now:
            self._answer(oldest)
        if not self.waits or (kernel.unshielded == self._unshielded and now < self._retry_at_s):
            return False
        oldest = next(iter(self.waits))
        if oldest.preparation is not None:
            return False
        self._unshielded, self._retry_at_s = kernel.unshielded, now + HOUSEKEEPING_S
        try:
            oldest.preparation = kernel.grant_more(
                oldest.session.id,
                oldest.namespace,
                oldest.layout_id,
                oldest.keys,
                oldest.grants,
                now,
                wait_s=oldest.reply_at_s - now,
            )
        except CacheError:  # its lease has expired: it keeps what it had
            self._answer(oldest)
            return bool(self.waits)
        if oldest.preparation is not None:
            self._l1.answer_later(oldest.preparation, partial(self._prepared, oldest, oldest.preparation))
            return False
        return self._tried(oldest)

    def _prepared(self, wait: _Wait, done: Preparation) -> None:
        """The slabs that could be freed are empty, and what was granted there belongs to it."""
        wait.preparation = None
        if done.grants is not None:
            self._take(wait, done.grants)
        if wait in self.waits:
            self._tried(wait)

    def _take(self, wait: _Wait, more: Grants) -> None:
        kernel, session, now = self._kernel, wait.session, self._l1.clock.now
        with contextlib.suppress(CacheError):  # its lease has expired, or its session has ended
            if wait in self.waits:
                kernel.take_more(session.id, wait.namespace, wait.grants, more, now)
                return
        with contextlib.suppress(CacheError):  # it was answered or withdrawn in the step that made room
            kernel.abort_store(session.id, more.lease_id, now)

    def _tried(self, oldest: _Wait) -> bool:
        """It got what there is: answer it, unless it lacks something that may come. Returns whether there is
        another."""
        if Grant.FULL in oldest.grants.statuses and self._kernel.shielded:
            return False
        self._answer(oldest)
        self._retry_at_s = self._l1.clock.now  # for the next one: there may be room left
        return bool(self.waits)

    @property
    def next_at_s(self) -> float | None:
        """When `step` has something to do even if nothing else happens."""
        if not self.waits:
            return None
        return min(self._retry_at_s, next(iter(self.waits)).reply_at_s)  # they all have the same time limit

    def session_gone(self, session: Session) -> None:
        """Withdraw its stores: what they were granted was not answered, so nobody writes there. Called before anything
        happens to its leases."""
        if self._by_session[session]:
            for wait in [wait for wait in self.waits if wait.session is session]:
                self._remove(wait)
                granted = [at for at, status in enumerate(wait.grants.statuses, wait.grants.first) if not status]
                with contextlib.suppress(CacheError):  # its leases have ended with it
                    self._kernel.abort_store(session.id, wait.grants.lease_id, self._l1.clock.now, granted)
        del self._by_session[session]

    def clear(self, namespace: int | None) -> None:
        """What was offered before a clear gets no room after it."""
        self._answer_all([wait for wait in self.waits if namespace in (None, wait.namespace)])

    def session_ends(self, session: Session) -> None:
        """Its leases are about to be settled: report grants before that, and grant nothing afterwards."""
        if self._by_session[session]:
            self._answer_all([wait for wait in self.waits if wait.session is session])

    def end(self) -> None:
        """Grant nothing new any more."""
        self.clear(None)

    def _answer_all(self, waits: Sequence[_Wait]) -> None:
        for wait in waits:
            if wait in self.waits:  # otherwise its session has gone, which was noticed since
                self._answer(wait)

    def _answer(self, wait: _Wait) -> None:
        self._remove(wait)
        self.waited_in_vain += Grant.FULL in wait.grants.statuses
        reply = self._granted(wait.session, wait.rid, wait.grants)
        self._l1.answer(wait.session, reply)

    def _granted(self, session: Session, rid: int, grants: Grants) -> m.Granted:
        """Where its client has given it up, nobody will write there."""
        self.refused_full += grants.statuses.count(Grant.FULL)
        now, page = self._l1.clock.now, GrantedPage(grants.lease_id, grants.first, grants.statuses)
        given_up = session.granted.get(rid, page) is None
        session.note_granted(rid, page)
        if given_up:
            take_back(self._kernel, session, rid, now)
        return granted(rid, grants, now)

    def _remove(self, wait: _Wait) -> None:
        del self.waits[wait]
        if wait.preparation is not None:
            self._kernel.cancel_store(wait.preparation)
        self._by_session[wait.session] -= 1
        wait.session.storing -= Counter([wait.namespace])
        self._share.free(wait.session.origin)
        if not self._by_session[wait.session]:  # sessions come and go
            del self._by_session[wait.session]


def take_back(kernel: Kernel, session: Session, rid: int, now: float) -> int:
    """The client has given up this store, and never looks at the answer: what that grants is free at once. Returns how
    many slots. Where there is no answer yet, it is remembered."""
    page = session.granted.get(rid)
    session.note_granted(rid, None)
    if page is None:
        return 0
    positions = [at for at, status in enumerate(page.statuses, page.first) if status == Grant.GRANTED]
    with contextlib.suppress(CacheError):  # its lease has ended
        return kernel.abort_store(session.id, page.lease_id, now, positions).count(Settled.ABORTED)
    return 0


def granted(rid: int, grants: Grants, now: float) -> m.Granted:
    """The answer to a prepare."""
    return m.Granted(
        rid,
        grants.lease_id,
        max(0.0, grants.deadline - now),
        bytes(grants.statuses),
        bytes(grants.reasons),
        pack_u64(grants.offsets),
        b"" if grants.checksums is None else pack_u64(grants.checksums),
        b"" if grants.incarnations is None else pack_u64(grants.incarnations),
    )
