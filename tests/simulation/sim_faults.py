"""Faults to plant: what the simulation must find, or it is worth nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import sim_tier_faults

from lmcache_core.client.link.link import Link
from lmcache_core.client.link.occupancy import Holding, Occupancy
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.move import leases as client_leases
from lmcache_core.clock import Clock
from lmcache_core.errors import CacheError
from lmcache_core.kernel.adoption import Adoption
from lmcache_core.kernel.answers import LeaseKind, Reason
from lmcache_core.kernel.endings import Endings
from lmcache_core.kernel.leases import KernelLease, LeaseBook
from lmcache_core.kernel.reading import Reading
from lmcache_core.kernel.writing import Writing
from lmcache_core.pool.liveness import Life
from lmcache_core.protocol import messages as m
from lmcache_core.server.dispatch import Dispatch
from lmcache_core.server.peers.session import Session
from lmcache_core.server.peers.session_table import SessionTable
from lmcache_core.server.waiting.lookups import Lookups


def the_end_of_a_connection_is_taken_for_death() -> None:
    """Slots of a living writer go to the next one."""
    SessionTable._life_of = lambda self, session: Life.DEAD  # type: ignore[method-assign]


def a_lost_session_is_forgotten() -> None:
    """Nobody ever looks whether its client has died."""
    SessionTable._suspect = lambda self, session, now: None  # type: ignore[method-assign]


def the_time_of_a_turn_is_that_before_the_wait() -> None:
    """What comes after a silence is served at the time at which the silence began."""

    def turn(self: Clock) -> float:
        self.now, _before[self] = _before.get(self, self.now), self.read()
        return self.now

    _before: dict[Clock, float] = {}
    Clock.turn = turn  # type: ignore[method-assign]


def a_reconnecting_client_declares_nothing() -> None:
    """The server settles what it goes on writing."""
    attach = Dispatch._attach

    def forgetful(self: Dispatch, session: Session, request: m.Attach) -> m.Message:
        request.held.clear()
        return attach(self, session, request)

    Dispatch._attach = forgetful  # type: ignore[method-assign]


def the_slots_of_an_expired_writer_are_free_at_once() -> None:
    """No quarantine."""
    expire = Writing.expire

    def hasty(self: Writing, lease: KernelLease) -> None:
        expire(self, lease)
        self.abort_lease(lease, Reason.EXPIRED)

    Writing.expire = hasty  # type: ignore[method-assign]


def the_pins_of_a_slow_reader_expire() -> None:
    """The slot is overwritten under its eyes."""
    expire = Reading.expire

    def hasty(self: Reading, lease: KernelLease) -> None:
        expire(self, lease)
        self.settle(lease)

    Reading.expire = hasty  # type: ignore[method-assign]


def promises_never_expire() -> None:
    """What nobody redeems is kept for ever."""
    push = LeaseBook._push

    def patient(self: LeaseBook, lease: KernelLease) -> None:
        if lease.kind is not LeaseKind.PROMISE:
            push(self, lease)

    LeaseBook._push = patient  # type: ignore[method-assign]


def what_was_not_committed_is_committed_at_the_end() -> None:
    """A write lease that ends publishes what it has, written or not."""
    client_leases.WriteLease._settles_by = m.CommitStore  # type: ignore[assignment]


def an_adopting_server_waits_for_no_former_worker() -> None:
    """It gives slots away that workers of its predecessor are writing to."""
    begin = Adoption.begin

    def hasty(self: Adoption, pool: object, rows: object, **options: Any) -> None:
        begin(self, pool, rows, **options)
        for row in list(rows):
            self.former_gone(row)

    Adoption.begin = hasty  # type: ignore[method-assign]


def a_lookup_that_waits_is_never_answered_before_its_loads() -> None:
    """However long they take."""
    Lookups.after_step = lambda self: None  # type: ignore[method-assign]


def the_end_of_a_session_settles_nothing() -> None:
    """What it held stays."""
    Endings.settle_all = lambda self, session, reason, lease_ids=None: None  # type: ignore[method-assign]


def a_client_ends_while_its_threads_copy() -> None:
    """It says goodbye for slots that it is inside of. Who copies still looks after its own lease."""
    end, occupied, ending = Occupancy.end, Holding.occupied.fget, []  # type: ignore[attr-defined]

    def hasty(self: Occupancy, *arguments: Any, **options: Any) -> object:
        ending.append(self)
        try:
            return end(self, *arguments, **options)
        finally:
            ending.pop()

    Occupancy.end = hasty  # type: ignore[method-assign]
    Holding.occupied = property(lambda self: not ending and occupied(self))  # type: ignore[assignment]
    Holding.occupied_by_others = property(lambda self: False)  # type: ignore[assignment]


def a_look_into_the_index_waits_for_a_link() -> None:
    """Hits stop for as long as the server hangs."""

    def look(self: Links) -> Link | None:
        with contextlib.suppress(CacheError):
            self.current(patient=True)
        return self._link

    Links.look = look  # type: ignore[method-assign]


_all: Sequence[Callable[[], None]] = [
    the_end_of_a_connection_is_taken_for_death,
    a_lost_session_is_forgotten,
    the_time_of_a_turn_is_that_before_the_wait,
    a_reconnecting_client_declares_nothing,
    the_slots_of_an_expired_writer_are_free_at_once,
    the_pins_of_a_slow_reader_expire,
    promises_never_expire,
    what_was_not_committed_is_committed_at_the_end,
    an_adopting_server_waits_for_no_former_worker,
    a_lookup_that_waits_is_never_answered_before_its_loads,
    the_end_of_a_session_settles_nothing,
    a_client_ends_while_its_threads_copy,
    a_look_into_the_index_waits_for_a_link,
    *sim_tier_faults.FAULTS,
]
# What steers a schedule to where one shows: a scene, in sim_plans.py.
SCENES: dict[str, str] = {
    "the_pins_of_a_slow_reader_expire": "a reader is slower than its lease",
    "an_adopting_server_waits_for_no_former_worker": "a pool is adopted under a copy",
    "a_client_ends_while_its_threads_copy": "a client reconnects under a copy",
    **sim_tier_faults.SCENES,
}
PLANTED: dict[str, Callable[[], None]] = {plant.__name__: plant for plant in _all}
