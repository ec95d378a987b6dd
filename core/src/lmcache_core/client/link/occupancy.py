"""Who uses which slots. This is the one place that decides when something of ours may be settled.

Every lease of a client has a `Holding` here, from before the server is asked until the server knows that nobody uses
its slots. Nothing is settled, given up or unlocked while a holding is *occupied*:

- by a copy: the call that makes it is still on its thread's stack (`Presence`);
- by a view or tensor: the object that lends its memory lives as long as anything refers to that memory;
- by threads of the extension (`Work`), which copy on while nobody waits for them: it says whether one may be inside.

These are facts that no interrupt can skip. If a lease is gone but still holds something, the next call to the server
settles it. The life lock is kept alive by the holdings that were granted under it, and by the link: it ends, and the
row with it, when the last of them does, in whatever way.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_core.client.link.channel import Pending
from lmcache_core.client.link.presence import Presence
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, LeaseExpiredError, LimitError, UsageError
from lmcache_core.kernel.answers import Grant
from lmcache_core.limits import BATCH_KEYS_MAX, PAGE_JOBS_MAX
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import pack_positions
from lmcache_core.tensors import weakly

if TYPE_CHECKING:
    from lmcache_core.client.link.link import Link

_SWEEP_AT = 64  # views of one lease before the first check which of them are gone
_LOOK_S = 0.01  # polling interval while waiting for views to go: nothing runs when the last one does


class Work(Protocol):
    """Copies by threads of the extension, which continue after the call that began them has returned."""

    @property
    def running(self) -> bool:
        """Whether a thread may be using a slot or the caller's memory."""

    def ask_to_stop(self, dropped: object = None, /) -> None:
        """Begin nothing more. Waits for nothing; in C, so that no interrupt comes before it."""

    def stop(self) -> None:
        """Begin nothing more, and return when no thread copies. That is soon: threads check after each MiB."""


class Page:
    """Requested positions, `count` from `first` on, whose answer the lease has not taken yet."""

    __slots__ = ("count", "first", "link", "pending")

    def __init__(self, first: int, count: int, link: Link, pending: Pending) -> None:
        self.first = first
        self.count = count
        self.link = link
        self.pending = pending

    def granted(self) -> tuple[int, list[int]]:
        """The lease and the positions that the answer grants, if it has come."""
        return granted_by(self.pending.reply, self.first)


class Holding:
    """What one lease holds. `unsettled`: an ordered set of positions."""

    over = False
    work: Work | None = None  # threads of the extension that copy to or from the slots
    link: Link | None = None  # for talking to the server
    life_locks: tuple[LifeLock, ...] = ()  # of the rows under which the server may know it
    id = 0
    page: Page | None = None
    expired = False  # by a notice of the server, which waits for our answer, which is the next settling call
    barred = ""  # why slots are no longer lent
    _numbers = count()
    _sweep_at = _SWEEP_AT

    def __init__(self, settles_by: type[m.Settle], copying: Presence | None) -> None:
        self.settles_by = settles_by  # ends the positions that nothing else has ended
        self.copying = copying  # the call that copies to or from the slots, if they are not lent to the caller
        self.statuses: list[Status] = []
        self.unsettled: dict[int, None] = {}
        self.unanswered: list[Page] = []  # abandoned without an answer: the server may have granted them
        # The lease's views, and what lends the memory of slots, all weakly and under numbers that are used once, so
        # that a dead one can be dropped while others arrive.
        self.views: dict[int, weakref.ref[memoryview]] = {}
        self.tensors: dict[int, Callable[[], Any]] = {}
        self.lent: dict[int, weakref.ref[Any]] = {}
        self.borrowers: set[int] = set()  # threads that have asked for views

    @property
    def occupied(self) -> bool:
        """Whether a thread may be using its slots."""
        copying = self.copying  # its thread may end it while we check
        if copying is not None and copying.lasts:
            return True
        if self.worked_in:
            return True
        return any(lender() is not None for lender in list(self.lent.values()))

    @property
    def worked_in(self) -> bool:
        """Whether threads of the extension may be using its slots."""
        work = self.work
        return work is not None and work.running

    @property
    def occupied_by_others(self) -> bool:
        """The same, ignoring what only this thread can be doing, since it is here."""
        if not self.occupied:
            return False
        copying = self.copying
        if copying is not None and copying.lasts:
            return not copying.is_ours
        return self.worked_in or bool(self.borrowers - {threading.get_ident()})

    def bar(self, why: str) -> None:
        """Lend nothing from now on, and revoke views that are not in use."""
        self.barred = why
        self.release_views()

    def release_views(self) -> None:
        """Make views raise `ValueError` from now on."""
        for each in list(self.views.values()):
            view = each()
            if view is not None:
                with contextlib.suppress(BufferError):  # a call is using it, or an array refers to it
                    view.release()
        self.views.clear()

    def check_lent(self) -> None:
        """Raise `LeaseExpiredError` if slots may no longer be used."""
        if self.barred:
            raise LeaseExpiredError(f"lease {self.id:x} has ended: {self.barred}")
        if self.over:
            raise LeaseExpiredError(f"lease {self.id:x} has ended: its memory may belong to another object")

    def note_view(self, view: memoryview) -> memoryview:
        """Record a view that the lease gives out. Raises `LeaseExpiredError` if another thread has ended the lease
        meanwhile: that thread revokes recorded views, and later ones are ours to revoke."""
        self.views[next(self._numbers)] = weakref.ref(view)
        if self.over or self.barred:
            view.release()
        self.check_lent()
        return view

    def note_tensor(self, tensor: Any) -> None:
        """Record a tensor that the lease gives out. Raises like `note_view`."""
        self.tensors[next(self._numbers)] = weakly(tensor)
        if self.over or self.barred:
            tensor.set_()
        self.check_lent()

    def empty_tensors(self) -> None:
        """Make tensors that are still referenced empty. Only for the lease's own thread: a tensor cannot be emptied
        while another thread may be using it."""
        for each in list(self.tensors.values()):
            tensor = each()
            if tensor is not None:
                tensor.set_()
        self.tensors.clear()

    def note_lender(self, tie: weakref.ref[Any]) -> None:
        """Record an object that lends a slot's memory. From time to time dead ones are removed: a lease may give out
        any number of views, one after another."""
        self.lent[next(self._numbers)] = tie
        if len(self.lent) >= self._sweep_at:
            tables: tuple[dict[int, Any], ...] = (self.lent, self.views, self.tensors)
            for noted in tables:
                for number, each in list(noted.items()):
                    if each() is None:
                        noted.pop(number, None)
            self._sweep_at = 2 * len(self.lent) + _SWEEP_AT

    def left(self) -> list[int]:
        """The positions that the server considers ours, including an unseen answer to the last request."""
        page = self.page
        if page is None:
            return list(self.unsettled)
        lease_id, positions = page.granted()
        self.id = self.id or lease_id
        return list(dict.fromkeys([*self.unsettled, *positions]))

    def end(self) -> None:
        """Give everything up. What was not settled counts as aborted."""
        self.over = True
        for position in list(self.unsettled):
            self.statuses[position] = Status.ABORTED
        self.unsettled.clear()
        if self.lent:
            self._kept_by_lenders(None)
        self.copying = self.page = self.work = None
        self.life_locks = ()

    def leave_to_borrowers(self) -> None:
        """The client is closed. Only our life locks live on, with what still shows slots, or copies."""
        self._kept_by_lenders(self.life_locks)
        copying = self.copying
        if copying is None or not copying.lasts:
            self.life_locks = ()

    def _kept_by_lenders(self, kept: tuple[LifeLock, ...] | None) -> None:
        for lender in list(self.lent.values()):
            lending = lender()
            if lending is not None:
                lending.keeps = kept


class _Tie(weakref.ref[Any]):
    """A weak reference to a lease, or to what lends a slot's memory. `of`: the address of its holding, which it must
    not reference."""

    __slots__ = ("of",)

    of: int


class Occupancy:
    """The holdings of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holdings: dict[int, Holding] = {}  # by address
        self._ties: dict[int, _Tie] = {}  # to their leases
        self.copying: dict[int, Holding] = {}  # those with a copying call, by address
        self.gone: deque[weakref.ref[Any]] = deque()  # `append` is all that runs when a lease or a view is dropped
        # That were begun, by their address, and what asks each to stop when its owner goes.
        self._works: dict[int, tuple[Work, weakref.ref[Any]]] = {}
        self._declared: Link | None = None  # the last link of which the next server is, or was, told
        self._owed: list[m.Message] = []  # what ended since it was told
        self._closed = ""
        # Of threads in `end`. Not a `threading.Event`: its lock is taken in Python code, where an interrupt can leave
        # it locked forever. Putting into one of these is a single call into C that never waits.
        self._enders: list[SimpleQueue[None]] = []

    @property
    def holdings(self) -> list[Holding]:
        """What the leases hold that have not ended."""
        return list(self._holdings.values())

    @property
    def working(self) -> list[Work]:
        """Copies by threads of the extension that may be inside slots, or the caller's memory."""
        return [work for work, _ in list(self._works.values()) if work.running]

    # --- in -------------------------------------------------------------------------------------------------

    def open(self, lease: object, holding: Holding) -> None:
        """A lease is about to be requested: track it from now on."""
        tie = _Tie(lease, self.gone.append)
        tie.of = id(holding)
        self._ties[id(holding)] = tie
        if holding.copying is not None:
            self.copying[id(holding)] = holding
        self._holdings[id(holding)] = holding
        if self._closed:
            raise UsageError(self._closed)

    def requesting(self, holding: Holding, link: Link) -> None:
        """A page is about to be requested over this link, under its life lock. Raises `DisconnectedError` if the
        holding was settled: a grant would have no owner."""
        with self._lock:
            if holding.link is None or not holding.unsettled:
                life_lock = link.life_lock  # the thread that closes the link removes it without asking us
                if life_lock is None:
                    raise DisconnectedError("the connection is being closed")
                holding.link, holding.life_locks = link, (life_lock,)

    def granted(self, holding: Holding, link: Link, lease_id: int) -> bool:
        """Record the lease's id. Returns False if it comes too late for the next link's declaration, so that the server
        gives its slots to others, or for a thread that has ended the session meanwhile and did not know about it."""
        with self._lock:
            if holding.over or (holding.id != lease_id and (link is self._declared or link.left)):
                return False
            holding.id = lease_id
            return True

    def cancel_page(self, holding: Holding, page: Page | None = None) -> None:
        """Give up the answer: what it grants, if it comes, is given back. `page`: from its requester, because another
        thread may have ended the holding."""
        page = page or holding.page
        if page is not None:
            page.link.channel.cancel(page.pending, undoing(holding.settles_by, page.first))
            if page.pending.reply is None:
                if holding.settles_by is m.AbortStore:  # nobody may read the answer for long
                    page.link.channel.post(m.Cancel(0, page.pending.rid))
                holding.unanswered.append(page)
                self._settle_unanswered(holding)
        holding.page = None

    def _settle_unanswered(self, holding: Holding) -> None:
        """Give back what was granted in answers that were lost with their connection. If the server has not read the
        request either, it refuses this."""
        link = holding.link
        if link is None or link.channel.lost or not holding.id:
            return
        for page in [each for each in holding.unanswered if each.link.channel.lost]:
            link.channel.post(settle_page(holding.settles_by, holding.id, range(page.first, page.first + page.count)))
            holding.unanswered.remove(page)

    def lend(self, holding: Holding, lender: Any) -> Any:
        """Record an object that lends a slot's memory. Raises `LeaseExpiredError` if lending has ended."""
        if len(self.gone) >= _SWEEP_AT:  # a caller that only reads makes no call that would do it
            self.tidy()
        tie = _Tie(lender, self.gone.append)
        tie.of = id(holding)
        lender.keeps = holding  # what shows the memory keeps the life lock and the connection alive
        holding.borrowers.add(threading.get_ident())
        holding.note_lender(tie)
        holding.check_lent()  # only now: a thread that bars or ends the lease checks afterwards what is lent
        return lender

    def begin(self, work: Work, holdings: Sequence[Holding], owner: object) -> None:
        """Threads of the extension are about to go into the slots of these holdings (and, in any case, into the
        caller's memory). They are asked to stop when `owner` is dropped. Raises `LeaseExpiredError` where one of these
        has ended, `UsageError` where the client is closed, and `LimitError`: then nothing may be begun. Whoever ends
        something looks at what was begun after it has barred it, and stops it."""
        for begun, _ in list(self._works.values()):
            if not begun.running:
                self.has_ended(begun)
        if len(self._works) >= PAGE_JOBS_MAX:
            raise LimitError(f"{PAGE_JOBS_MAX} page jobs of this client are under way: wait for some, or cancel them")
        self._works[id(work)] = (work, weakref.ref(owner, work.ask_to_stop))
        for holding in holdings:
            holding.work = work
        if self._closed:
            raise UsageError(self._closed)
        for holding in holdings:
            holding.check_lent()

    # --- out ------------------------------------------------------------------------------------------------

    def ended(self, holding: Holding) -> None:
        """Everything of it is settled, or its owner says that nobody uses it."""
        holding.end()
        self.copying.pop(id(holding), None)
        self._holdings.pop(id(holding), None)
        self._ties.pop(id(holding), None)
        for ender in list(self._enders):
            ender.put(None)

    def has_ended(self, work: Work) -> None:
        """None of its threads runs any more. A single operation, because a finalizer may call this."""
        self._works.pop(id(work), None)

    def tidy(self) -> None:
        """Release what was left behind: by a lease that is gone, or by a copy that was interrupted. There is nothing to
        do while both `gone` and `copying` are empty."""
        for tie in list(self.gone):
            assert isinstance(tie, _Tie)
            holding, lease = self._holdings.get(tie.of), self._ties.get(tie.of)
            left = lease is None or lease() is None
            if holding is not None and (left or holding.barred):
                if holding.worked_in:
                    continue  # its threads finish soon: the next call checks again
                if not holding.occupied:
                    self.settle(holding)
            with contextlib.suppress(ValueError):  # another thread was here, too
                self.gone.remove(tie)
        for holding in list(self.copying.values()):
            if not holding.occupied:  # its call is over, and was interrupted before it could end it
                self.settle(holding)

    def settle(self, holding: Holding) -> None:
        """Tell the server that nobody uses any of it, without waiting for the answer."""
        self._expect_no_page(holding)
        self.tell_end(holding)
        self.ended(holding)

    def tell_end(self, holding: Holding) -> None:
        """Tell the server that nobody uses the rest, without waiting for the answer. A message sent while the
        connection ends is lost: it is repeated over the next link, if the lease continues there."""
        while (link := holding.link) is not None and not holding.over:
            for page in self._pages_left(holding):
                link.channel.post(page)
            with self._lock:
                if holding.link is link:  # otherwise there is a new one by now
                    declared = self._declared
                    if (
                        declared is not None and declared.epoch == link.epoch and not declared.left
                    ):  # it is expected to continue
                        self._owed += self._pages_left(holding)
                    self._holdings.pop(id(holding), None)  # inside the lock, or it might be declared now
                    return

    @staticmethod
    def _pages_left(holding: Holding) -> list[m.Message]:
        """The messages that end what is left, including what was granted in answers that never came."""
        positions = holding.left()
        if not holding.id:  # an optimistic one, for which the server holds nothing
            return []
        pages: list[Sequence[int]] = [
            positions[first : first + BATCH_KEYS_MAX] for first in range(0, len(positions), BATCH_KEYS_MAX)
        ]
        pages += [range(page.first, page.first + page.count) for page in holding.unanswered if page.link.channel.lost]
        return [settle_page(holding.settles_by, holding.id, page) for page in pages]

    def end(self, timeout_s: float, why: str, *, closing: bool = False) -> tuple[list[int], list[Holding]]:
        """End everything. Waits for copies in progress, `timeout_s` at most, but not for what only this thread can be
        doing. Returns the leases that may be settled now, and the holdings that are still occupied."""
        if closing:
            self._closed = why
        holdings = self.holdings
        for holding in holdings:
            holding.bar(why)
        for work, _ in list(self._works.values()):
            work.stop()
            self.has_ended(work)
        self._wait_for_others(holdings, time.monotonic() + timeout_s)
        busy = [each for each in holdings if id(each) in self._holdings and each.occupied]
        idle = [each for each in holdings if id(each) in self._holdings and each not in busy]
        ids = []
        for holding in idle:
            self._expect_no_page(holding)
            holding.left()  # records the id
            if holding.id:
                ids.append(holding.id)
        return ids, busy

    def _expect_no_page(self, holding: Holding) -> None:
        """Later grants are given back; `left` knows the earlier ones. The order matters: an answer that came between
        the two would have no owner."""
        if holding.page is not None and not holding.page.pending.settled:
            self.cancel_page(holding)

    def _wait_for_others(self, holdings: Sequence[Holding], deadline: float) -> None:
        ended: SimpleQueue[None] = SimpleQueue()
        self._enders.append(ended)
        try:
            while any(each.occupied_by_others for each in holdings if id(each) in self._holdings):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                with contextlib.suppress(Empty):
                    ended.get(timeout=min(left, _LOOK_S))
        finally:
            self._enders.remove(ended)

    def leave(self, busy: Sequence[Holding]) -> None:
        """The client is closed, but these are still occupied."""
        for holding in busy:
            holding.leave_to_borrowers()

    def remove_idle(self, busy: Sequence[Holding]) -> None:
        """The server knows about all but these, or does not need to."""
        for holding in self.holdings:
            if holding.barred and holding not in busy:
                self.ended(holding)

    # --- from one link to the next --------------------------------------------------------------------------

    def declare(self, link: Link, life_lock: LifeLock) -> list[int]:
        """The link is lost, and the server is about to get another one, with this life lock. Returns the
        leases that continue on it. If that link never opens, nobody knows whether the server knows, and under which
        row it has the leases: so they keep the locks of both."""
        with self._lock:
            self._declared = link
            self._owed.clear()  # what is not declared now is settled by that
            declared = [each for each in self._held_of(link.epoch) if each.id]
            for holding in declared:
                holding.life_locks += (life_lock,)
            return [holding.id for holding in declared]

    def hand_over(self, link: Link, successor: Link) -> None:
        """The next link is open. The same server holds our leases under its new row; a different one keeps their slots
        reserved as long as our old row shows that we live."""
        with self._lock:
            link.left = True
            new = () if successor.life_lock is None else (successor.life_lock,)
            moved = self._held_of(link.epoch)
            for holding in moved:
                if successor.epoch == link.epoch:
                    holding.link, holding.life_locks = successor, new
                else:
                    holding.life_locks = tuple(each for each in holding.life_locks if each not in new)
            owed = self._owed if successor.epoch == link.epoch else []
            self._owed = []
        for message in owed:
            successor.channel.post(message)
        for holding in moved:
            self._settle_unanswered(holding)

    def _held_of(self, epoch: int) -> list[Holding]:
        """The holdings that the server of this epoch knows, or knew, over whichever link: a link that was opened but
        not put to use, because its thread was interrupted, may have some of them."""
        return [each for each in self.holdings if each.link is not None and each.link.epoch == epoch]

    def expire(self, lease_id: int) -> None:
        """The server says that this lease has expired."""
        for holding in self.holdings:
            if holding.id == lease_id:
                holding.expired = True

    def leave_to_parent(self) -> None:
        """In a forked child everything is the parent's. Writable views become invalid; memory lent for reading stays
        readable."""
        for holding in self.holdings:
            if holding.settles_by is m.AbortStore:
                holding.bar(PARENTS)
            holding.barred = PARENTS
            holding.life_locks, holding.copying, holding.work = (), None, None
        self._works.clear()
        self._closed = PARENTS


PARENTS = "it belongs to the parent of this forked process: connect again, and ask for a lease of your own"


def granted_by(reply: object, first: int) -> tuple[int, list[int]]:
    """The lease and the positions that an answer grants. `first`: the position of the first requested key."""
    if not isinstance(reply, m.Granted):
        return 0, []
    return reply.lease, [first + at for at, status in enumerate(reply.statuses) if status == Grant.GRANTED]


def undoing(kind: type[m.Settle], first: int) -> Callable[[m.Reply], m.Message | None]:
    """Makes the message that gives back what a late answer grants."""

    def undo(reply: m.Reply) -> m.Message | None:
        lease_id, positions = granted_by(reply, first)
        return settle_page(kind, lease_id, positions) if positions else None

    return undo


def settle_page(kind: type[m.Settle], lease_id: int, page: Sequence[int], checksums: bytes = b"") -> m.Settle:
    """The message that settles these ascending positions. A run of them is sent as a range: eight bytes for any
    number."""
    more = (checksums,) if checksums else ()
    if page and page[-1] - page[0] == len(page) - 1:
        return kind(0, lease_id, page[0], len(page), b"", *more)
    return kind(0, lease_id, 0, 0, pack_positions(page), *more)
