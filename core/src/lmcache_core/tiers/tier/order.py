"""The order in which the keys of one tier are read and changed: it has one owner, so that accounts and medium agree.

A medium does not order two calls that overlap, so calls whose order matters never overlap: a call that changes a key (a
store, a delete, setting a damaged object aside) waits until the previous change has returned, however late, and so does
a load. Loads block nothing: what a load says about a key counts only if no change of that key has begun since the load
was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from lmcache_core.tiers.tier.call_states import CallEvent, CallState
from lmcache_core.tiers.tier.lanes import Call, Lane


class KeyAccess(Enum):
    """What a call does to its keys."""

    LOAD = auto()
    STORE = auto()
    DELETE = auto()  # or set aside


class Made(Enum):
    """Whether a call has changed its keys."""

    NOT_YET = auto()  # it still may
    YES = auto()  # it has returned, and its caller has updated the accounts
    NO = auto()  # it expired or was cancelled before a lane began it: nobody reports anything


class Change:
    """A call that changes keys, as watchers of these keys see it; it outlives the call."""

    __slots__ = ("access", "before", "made")

    def __init__(self, access: KeyAccess, before: Sequence[Change]) -> None:
        self.access = access
        self.before = before  # the changes that it waits for
        self.made = Made.NOT_YET


class Watch:
    """Which keys have been changed, or may have been, since it was opened. While open, it records further changes."""

    __slots__ = ("_changes", "of_stores")

    def __init__(self, of_stores: bool = True) -> None:
        self._changes: dict[bytes, list[Change]] = {}
        self.of_stores = of_stores

    def note(self, key: bytes, change: Change) -> None:
        """A change of this key is waiting or has begun."""
        if self.of_stores or change.access is not KeyAccess.STORE:
            self._changes.setdefault(key, []).append(change)

    def note_all(self, key: bytes, last: Change) -> None:
        """The same for this change, and for the earlier ones that have not returned."""
        changes = [last]
        for change in changes:
            if change.made is Made.NOT_YET:
                self.note(key, change)
                changes.extend(each for each in change.before if each not in changes)

    def saw(self, key: bytes) -> bool:
        """Whether what was read of this key is out of date, or may be."""
        return any(change.made is not Made.NO for change in self._changes.get(key, ()))

    def undecided(self, key: bytes) -> bool:
        """Whether it may be out of date without anybody ever reporting it: a waiting change may be dropped unmade."""
        changes = self._changes.get(key, ())
        return any(change.made is Made.NOT_YET for change in changes) and not any(
            change.made is Made.YES for change in changes
        )


class _Ticket:
    """One call in progress: before its lane, in it, or late."""

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
        self.waits_for = 0  # calls that must return first
        self.followers: list[_Ticket] = []
        self.watch = watch


class KeyOrder:
    """Sits in front of the lanes of one tier. Lives on the loop's thread."""

    def __init__(self) -> None:
        self._last: dict[bytes, _Ticket] = {}  # for each key, the last unreturned call that changes it
        self._tickets: dict[Call, _Ticket] = {}
        self._held: dict[_Ticket, None] = {}  # those that no lane has yet
        self._watching: dict[bytes, list[Watch]] = {}
        self._watching_all: dict[Watch, None] = {}
        self._held_by_lane: Counter[Lane] = Counter()

    # --- calls ----------------------------------------------------------------------------------------------
    def submit(
        self, lane: Lane, call: Call, keys: Sequence[bytes], access: KeyAccess, watch: Watch | None = None
    ) -> bool:
        """Give the call to its lane as soon as its keys allow. False: the lane is full, and no callback follows.

        From now on it ends like a call on a lane: `ended` after it has run, `late` if it has not by its deadline.
        `watch` records which of its keys another call begins to change before it has ended.
        """
        before = {id(last): last for key in keys if (last := self._last.get(key)) is not None}
        ticket = _Ticket(lane, call, keys, access, watch, before.values())
        if not before and not lane.submit(call):
            return False
        self._tickets[call] = ticket
        call.order = self
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
        """Cancel a load. True: it will never run, and no callback follows."""
        ticket = self._tickets.get(call)
        if ticket is None:
            return False
        if call.state is CallState.EXPIRED:  # it is being reported in this same turn
            return False
        if ticket in self._held:
            call.move(CallEvent.CANCEL)
        elif not ticket.lane.cancel(call):
            return False
        self.leave(call)
        return True

    def expire(self, now: float, given_up: str | None = None) -> list[Call]:
        """Calls whose deadline has passed before a lane had them, and those of the operation that is `given_up`; the
        caller reports them."""
        held = [ticket.call for ticket in self._held]
        late = [call for call in held if call.deadline <= now or (given_up is not None and call.what == given_up)]
        for call in late:
            if call.state is CallState.QUEUED:
                call.move(CallEvent.EXPIRE)
        return late

    @property
    def kept(self) -> int:
        """The number of records kept for unreturned calls and their watchers: 0 once all is over."""
        return len(self._tickets) + len(self._last) + len(self._watching) + len(self._watching_all)

    def busy(self, key: bytes) -> bool:
        """Whether a call that changes this key has not returned."""
        return key in self._last

    def hung(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys whose last change is late: whatever waits for it may wait for good."""
        last = self._last
        return {key for key in keys if key in last and last[key].call.was_late} if last else set()

    def held(self, lane: Lane) -> int:
        """Calls for this lane that wait for others to return."""
        return self._held_by_lane[lane]

    @property
    def next_deadline(self) -> float:
        """No held call is late before this; infinity if there is none."""
        return min((ticket.call.deadline for ticket in self._held), default=float("inf"))

    def close(self) -> None:
        """Start no held call any more, and call nothing back for them."""
        for ticket in self._held:
            if ticket.call.state is CallState.QUEUED:
                ticket.call.move(CallEvent.CANCEL)
        self._held.clear()
        self._held_by_lane.clear()

    # --- watches --------------------------------------------------------------------------------------------
    def watch(self, keys: Sequence[bytes]) -> Watch:
        """Record changes of these keys from now on, including those about to begin. `unwatch` ends it."""
        watch = Watch()
        for key in keys:
            self._watching.setdefault(key, []).append(watch)
            if key in self._last:
                watch.note_all(key, self._last[key].change)
        return watch

    def watch_all(self, *, of_stores: bool) -> Watch:
        """As `watch`, for every key. `of_stores` False: ignore stores."""
        watch = Watch(of_stores)
        for key, ticket in self._last.items():
            watch.note_all(key, ticket.change)
        self._watching_all[watch] = None
        return watch

    def unwatch(self, watch: Watch, keys: Sequence[bytes] = ()) -> None:
        """Stop recording. What it has recorded stays."""
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
    def leave(self, call: Call) -> None:
        """The call is over, and its caller has updated the accounts: the next calls on these keys find them right."""
        ticket = self._tickets.pop(call, None)
        if ticket is None:
            return
        ticket.change.made = Made.NO if call.state in (CallState.EXPIRED, CallState.CANCELLED) else Made.YES
        ticket.change.before = ()
        self._no_longer_held(ticket)
        if ticket.watch is not None:
            self.unwatch(ticket.watch, ticket.keys)
        followers, ticket.followers = ticket.followers, []
        if ticket.waits_for:
            # It was cancelled before its turn: its followers still wait for what it waited for.
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
                if head.change not in follower.change.before:  # watchers of the follower find it through that
                    follower.change.before = [*follower.change.before, head.change]
        for key in ticket.keys:
            if self._last.get(key) is ticket:
                del self._last[key]
                for head in heads:  # in order of arrival: the latest is the last
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
