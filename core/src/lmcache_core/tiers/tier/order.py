"""The order in which the keys of one tier are read and changed: one owner, so that the books and the medium agree.

A medium knows no order between two calls that overlap. So none overlap that could matter: what changes a key (a
store, a delete, a damaged object set aside) waits until what changed it before has returned, however late that is,
and a load waits for it, too. Loads hold up nobody: what one says of a key counts only if nothing has begun to change
that key since the load was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from functools import partial

from lmcache_core.tiers.tier.call_states import CallEvent, CallState
from lmcache_core.tiers.tier.lanes import Call, Lane


class KeyAccess(Enum):
    """What a call does to its keys."""

    LOAD = auto()
    STORE = auto()
    DELETE = auto()  # or set aside


class Made(Enum):
    """Whether a call has changed its keys."""

    NOT_YET = auto()  # it may still
    YES = auto()  # it has returned, and whoever made it has told the books
    NO = auto()  # its time was up, or it was taken back, before any lane had begun it: nobody tells anything


class Change:
    """A call that changes keys, for those who watch these; it outlives the call."""

    __slots__ = ("access", "before", "made")

    def __init__(self, access: KeyAccess, before: Sequence[Change]) -> None:
        self.access = access
        self.before = before  # those that it waits for
        self.made = Made.NOT_YET


class Watch:
    """Which keys have been changed, or may be, since it was opened. Open: it goes on taking note."""

    __slots__ = ("_changes", "of_stores")

    def __init__(self, of_stores: bool = True) -> None:
        self._changes: dict[bytes, list[Change]] = {}
        self.of_stores = of_stores

    def note(self, key: bytes, change: Change) -> None:
        """This is on its way to the key, or has been begun."""
        if self.of_stores or change.access is not KeyAccess.STORE:
            self._changes.setdefault(key, []).append(change)

    def note_all(self, key: bytes, last: Change) -> None:
        """The same of this one, and of those before it that have not returned."""
        changes = [last]
        for change in changes:
            if change.made is Made.NOT_YET:
                self.note(key, change)
                changes.extend(each for each in change.before if each not in changes)

    def saw(self, key: bytes) -> bool:
        """Whether what was found of this key is out of date, or may be."""
        return any(change.made is not Made.NO for change in self._changes.get(key, ()))

    def undecided(self, key: bytes) -> bool:
        """Whether it may be, and nobody may ever tell: what is on its way to it may yet be given up unmade."""
        changes = self._changes.get(key, ())
        return any(change.made is Made.NOT_YET for change in changes) and not any(
            change.made is Made.YES for change in changes
        )


class _Ticket:
    """One call on its way: before its lane, in it, or late."""

    __slots__ = ("access", "call", "change", "followers", "keys", "lane", "waits_for", "watch")

    def __init__(
        self,
        lane: Lane,
        call: Call,
        keys: Sequence[bytes],
        access: KeyAccess,
        watch: Watch | None,
        before: Iterable[_Ticket],
    ) -> None:
        self.change: Change = Change(access, [each.change for each in before])
        self.lane = lane
        self.call = call
        self.keys = keys
        self.access = access
        self.waits_for = 0  # calls that are to return first
        self.followers: list[_Ticket] = []
        self.watch = watch


class KeyOrder:
    """Stands before the lanes of one tier. Lives on the loop's thread."""

    def __init__(self) -> None:
        self._last: dict[bytes, _Ticket] = {}  # the last call that changes each key, of those that have not returned
        self._tickets: dict[Call, _Ticket] = {}
        self._held: dict[_Ticket, None] = {}  # those that no lane has yet
        self._watching: dict[bytes, list[Watch]] = {}
        self._watching_all: dict[Watch, None] = {}
        self._held_by_lane: Counter[Lane] = Counter()

    # --- calls ----------------------------------------------------------------------------------------------
    def submit(
        self, lane: Lane, call: Call, keys: Sequence[bytes], access: KeyAccess, watch: Watch | None = None
    ) -> bool:
        """Give the call to its lane as soon as its keys allow. False: the lane is full, and nothing is called back.

        From now on it ends as a lane's call does: `on_end` once it has run, `on_late` where it has not by its deadline.
        `watch` notes which of its keys something else begins to change before it has ended.
        """
        before = {id(last): last for key in keys if (last := self._last.get(key)) is not None}
        ticket = _Ticket(lane, call, keys, access, watch, before.values())
        if not before and not lane.submit(call):
            return False
        self._tickets[call] = ticket
        call.on_over = partial(self._leave, ticket)
        for last in before.values():
            last.followers.append(ticket)
        ticket.waits_for = len(before)
        if before:
            self._held[ticket] = None
            self._held_by_lane[lane] += 1
        if access is not KeyAccess.LOAD:
            self._note(keys, ticket.change)
            self._last.update(dict.fromkeys(keys, ticket))
        if watch is not None:
            for key in keys:
                self._watching.setdefault(key, []).append(watch)
        return True

    def cancel(self, call: Call) -> bool:
        """Take a load back. True: it will never run, and nothing is called back."""
        ticket = self._tickets.get(call)
        if ticket is None:
            return False
        if call.state is CallState.EXPIRED:  # somebody is being told, in this same turn
            return False
        if ticket in self._held:
            call.move(CallEvent.CANCEL)
        elif not ticket.lane.cancel(call):
            return False
        self._leave(ticket)
        return True

    def expire(self, now: float) -> list[Call]:
        """Those whose deadline has passed before any lane had them; `on_late` is the caller's to call."""
        late = [ticket.call for ticket in self._held if ticket.call.deadline <= now]
        for call in late:
            if call.state is CallState.QUEUED:
                call.move(CallEvent.EXPIRE)
        return late

    @property
    def kept(self) -> int:
        """How much is kept of calls that have not returned, and for those who watch them: 0 once all is over."""
        return len(self._tickets) + len(self._last) + len(self._watching) + len(self._watching_all)

    def busy(self, key: bytes) -> bool:
        """Whether something that changes this key has not returned."""
        return key in self._last

    def held(self, lane: Lane) -> int:
        """Calls for this lane that wait for others to return."""
        return self._held_by_lane[lane]

    @property
    def next_deadline(self) -> float:
        """No call that is held back is late before this; infinity where there is none."""
        return min((ticket.call.deadline for ticket in self._held), default=float("inf"))

    def close(self) -> None:
        """Nothing that is held back is started any more, and nothing of it is called back."""
        for ticket in self._held:
            if ticket.call.state is CallState.QUEUED:
                ticket.call.move(CallEvent.CANCEL)
        self._held.clear()
        self._held_by_lane.clear()

    # --- watches --------------------------------------------------------------------------------------------
    def watch(self, keys: Sequence[bytes]) -> Watch:
        """Take note of what changes these keys from now on, or is about to. `unwatch` ends it."""
        watch = Watch()
        for key in keys:
            self._watching.setdefault(key, []).append(watch)
            if key in self._last:
                watch.note_all(key, self._last[key].change)
        return watch

    def watch_all(self, *, of_stores: bool) -> Watch:
        """As `watch`, for every key. `of_stores` False: stores are of no interest."""
        watch = Watch(of_stores)
        for key, ticket in self._last.items():
            watch.note_all(key, ticket.change)
        self._watching_all[watch] = None
        return watch

    def unwatch(self, watch: Watch, keys: Sequence[bytes] = ()) -> None:
        """It takes no more notes, and keeps those that it has."""
        self._watching_all.pop(watch, None)
        for key in keys:
            watches = self._watching.get(key)
            if watches is not None and watch in watches:
                watches.remove(watch)
                if not watches:
                    del self._watching[key]

    def _note(self, keys: Sequence[bytes], change: Change) -> None:
        if not self._watching and not self._watching_all:
            return
        for key in keys:
            for watch in self._watching.get(key, ()):
                watch.note(key, change)
            for watch in self._watching_all:
                watch.note(key, change)

    # --- one after the other --------------------------------------------------------------------------------
    def _leave(self, ticket: _Ticket) -> None:
        """Its call is over, and whoever made it has written the books: what follows on these keys finds them right."""
        call = ticket.call
        if self._tickets.pop(call, None) is None:
            return
        ticket.change.made = Made.NO if call.state in (CallState.EXPIRED, CallState.CANCELLED) else Made.YES
        ticket.change.before = ()
        # Call and ticket would keep each other, and all that the callbacks have: the server's collector does not look
        # at what is old, as a call to a slow medium is by now.
        call.forget()
        self._no_longer_held(ticket)
        if ticket.watch is not None:
            self.unwatch(ticket.watch, ticket.keys)
        followers, ticket.followers = ticket.followers, []
        if ticket.waits_for:
            # It was taken back before its turn: who waits for it goes on waiting for what it waited for.
            self._hand_on(ticket, followers)
        else:
            for key in ticket.keys:
                if self._last.get(key) is ticket:
                    del self._last[key]
        for follower in followers:
            follower.waits_for -= 1
            if not follower.waits_for and follower in self._held:
                self._start(follower)

    def _hand_on(self, ticket: _Ticket, followers: Sequence[_Ticket]) -> None:
        heads = [each for each in self._tickets.values() if ticket in each.followers]
        for head in heads:
            head.followers.remove(ticket)
            for follower in followers:
                if follower not in head.followers:
                    head.followers.append(follower)
                    follower.waits_for += 1
                if head.change not in follower.change.before:  # who watches the follower finds it through that
                    follower.change.before = [*follower.change.before, head.change]
        for key in ticket.keys:
            if self._last.get(key) is ticket:
                del self._last[key]
                for head in heads:  # in the order in which they came: the latest of them is the last
                    if key in head.keys:
                        self._last[key] = head

    def _start(self, ticket: _Ticket) -> None:
        self._no_longer_held(ticket)
        call = ticket.call
        if call.state is CallState.QUEUED and not ticket.lane.submit(call):
            call.move(CallEvent.EXPIRE)  # the lane is full: it will not run in time
            call.tell_late()

    def _no_longer_held(self, ticket: _Ticket) -> None:
        if self._held.pop(ticket, ticket) is None:
            self._held_by_lane[ticket.lane] -= 1
