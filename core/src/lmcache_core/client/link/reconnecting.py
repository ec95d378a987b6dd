"""The client's current link: made when needed, remade when lost, never shared with a fork."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from typing import Protocol, TypeVar

from lmcache_core.client.link.channel import Orphans
from lmcache_core.client.link.handshake import Handshake
from lmcache_core.client.link.link import Link, Target
from lmcache_core.client.link.occupancy import Occupancy
from lmcache_core.client.results import Status, refused
from lmcache_core.errors import CacheError, DisconnectedError, ForgottenError, LimitError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import (
    HANDSHAKE_S_MAX,
    LINK_LOOK_S,
    LINK_RETRY_S,
    LINK_RETRY_S_MAX,
    LINK_STEP_S,
    LINK_WAIT_S,
)
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.messages import LeaseExpiredNotice
from lmcache_core.tokens.namespace import Namespace

log = logging.getLogger("lmcache_core.client")
_V = TypeVar("_V")
_MADE_CHECK_S = 0.1  # how often a thread that waits for a link makes sure: an interrupt can swallow a wake-up


class Unsent(Protocol):
    """A call that must not wait, begun while there was no link."""

    def get_on(self) -> None:
        """Send it, or find out that there is no server. Never waits and never raises."""
        ...


class Links:
    """Owns the link and knows the open leases, which threads may still be copying to or from.

    A link is made in steps that do not wait, and every call that finds it unfinished takes as many as it can. Calls
    that need the server may then wait for it: `connect_timeout_s` at the first contact, later `LINK_WAIT_S` once in
    `wait_s`; a question without a fallback answer waits `connect_timeout_s` again. Answers from the index never wait.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._clock = target.clock
        self._start_over()
        _all_links.add(self)

    def _start_over(self) -> None:
        self._client_id = os.urandom(16)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._leaving: Link | None = None  # of a client that is being closed
        self._making: Handshake | None = None
        self._met = False  # there has been a link, or a call has waited for one in vain
        self._retry_at_s = 0.0
        self._retry_s = LINK_RETRY_S
        self._wait_at_s = 0.0  # when the next call may wait for a link
        self._look_at_s = 0.0
        self._serving_seen = 0
        self._error: CacheError = DisconnectedError("this client has not connected yet")
        self._away = ""  # why no server is reachable, as last logged
        self._logged: set[str] = set()  # codes of refusals that were logged
        self._news: list[tuple[int, str]] = []  # to log once no lock is held
        self._unsent: list[weakref.ref[Unsent]] = []
        self._closed = False
        self._orphans = Orphans()  # grants of a lost channel may be given back over the next
        self.occupancy = Occupancy()

    @property
    def link(self) -> Link | None:
        """The link that was opened last, also one that has ended; None before the first. Takes no step."""
        return self._link

    @property
    def making(self) -> Handshake | None:
        """The next link, while it is being made."""
        return self._making

    @property
    def why_unreachable(self) -> str:
        """Why the server is unreachable; empty while it is reachable, and before the first attempt."""
        return self._away

    def refused(self, error: CacheError) -> tuple[Status, Reason]:
        """See `results.refused`. A refusal that is not an ordinary answer is logged once; a missing link is logged
        elsewhere."""
        status, reason = refused(error)
        if not (isinstance(error, DisconnectedError) or self._away) and error.code not in self._logged:
            self._logged.add(error.code)
            log.warning("the lmcache-core server %s refused a call, whose keys are %s: %s", self.target, status, error)
        return status, reason

    def current(self, *, patient: bool = False) -> Link:
        """The link, a new one if needed. Raises `DisconnectedError` if there is none, and `LimitError` if the server
        has no room for us. `patient`: for a question without a fallback answer: it waits for a link that is being made,
        and raises whatever error the server refused it with.

        A silent link counts: calls over it end at once, unless the server has answered again.
        """
        occupancy = self.occupancy
        if occupancy.gone or occupancy.copying:  # every call comes here, and a property would cost 0.1 µs more
            occupancy.tidy()
        link = self._link
        # A link that ended meanwhile is noticed here, before a call is sent over it in vain.
        if link is not None and not link.channel.found_lost():
            return link
        try:
            return self._made(patient)
        finally:
            self._afterwards()

    def call(self, ask: Callable[[Link], _V], *, patient: bool = False) -> _V:
        """The answer of `ask` over the link that `current` returns. If the server has forgotten our session, and so has
        done nothing, it is called once more with the next link."""
        try:
            return ask(self.current(patient=patient))
        except ForgottenError:
            return ask(self.current(patient=patient))

    def call_in(self, namespace: Namespace, request: m.Message) -> m.Reply:
        """The answer to a question in a namespace. See `Link.in_namespace`."""
        return self.call(lambda link: link.in_namespace(namespace, link.channel.call, request), patient=True)

    def step(self) -> Link | None:
        """The link, or None while it is being made: for callers that must not wait. Raises `DisconnectedError` if no
        server answers, and `LimitError` if it has no room for us."""
        link = self._link
        if link is not None and not link.channel.found_lost():
            return link
        try:
            now = self._clock()
            link, making = self._get_on(now)
            if link is None and (making is None or now >= making.asked_s + self.target.connect_timeout_s):
                raise self._refusal(patient=False)
            return link
        finally:
            self._afterwards()

    def wait_unsent(self, call: Unsent) -> None:
        """Send a call as soon as any other call finds the link open, in the order of these calls; until then `step`
        returned None for it. It is referenced weakly."""
        self._unsent.append(weakref.ref(call))

    def free_later(self, promises: Sequence[int]) -> None:
        """Free these promises over the next link, because no server could be reached."""
        self._orphans.free_later(promises)

    def now(self) -> float:
        """The time on the client's clock."""
        return self._clock()

    def wait(self, timeout_s: float) -> None:
        """Wait at most that long until the link that is being made can advance."""
        making = self._making
        if making is not None:
            with contextlib.suppress(DisconnectedError):  # another thread closed it: the next step finds out why
                making.wait(self._clock() + timeout_s)

    def look(self) -> Link | None:
        """The link, even one that has ended: the index of a named pool may still be right.

        Makes no system call, apart from a check of the connection from time to time. If the server is gone, that check
        begins a new link and takes its steps, none of which waits. So a caller that never needs the server still finds
        the next one.
        """
        now = self._clock()
        if now >= self._look_at_s and not self._lock.locked():  # one thread's step counts for everybody
            self._look(now)
        return self._link

    def _look(self, now: float) -> None:
        self._look_at_s = now + LINK_LOOK_S
        link = self._link
        # Errors are for callers that ask the server; a hit is right without it.
        with contextlib.suppress(CacheError):
            if link is not None and not link.channel.found_lost():
                if link.channel.silent:
                    link.channel.listen()
                return
            if link is not None and not link.pool.backing.has_name:
                link.index = None  # no successor finds this pool, so nobody would mark later clears in it
            self._step(now)
            due = now if self._making is not None else min(self._retry_at_s, self._look_at_s)
            self._look_at_s = max(due, now + LINK_STEP_S)
        self._afterwards()

    # --- a link in the making -------------------------------------------------------------------------------

    def _made(self, patient: bool) -> Link:
        """Take steps, and wait as long as this call may, until there is a link."""
        now, until = self._clock(), None
        while True:
            link, making = self._get_on(now)
            if link is not None:
                return link
            if making is None:
                raise self._refusal(patient)
            now = self._clock()  # to map the pool takes time of ours
            if until is None:
                until = self._may_wait_until(making, now, patient)
            if now >= until:
                self._met = True
                raise self._refusal(patient)
            with contextlib.suppress(DisconnectedError):  # another thread closed it: the next step finds out why
                making.wait(min(until, now + _MADE_CHECK_S))
            now = self._clock()

    def _may_wait_until(self, making: Handshake, now: float, patient: bool) -> float:
        if patient or not self._met:
            return making.asked_s + self.target.connect_timeout_s
        if now < self._wait_at_s:
            return now
        self._wait_at_s = now + self.target.wait_s
        return now + LINK_WAIT_S

    def _get_on(self, now: float) -> tuple[Link | None, Handshake | None]:
        """Take steps until one must wait for the server. Returns the link if it is open, and the one in the making, as
        they are at one moment: another thread may be about to open it."""
        begun = self._making
        stale = begun if begun is not None and now >= begun.asked_s + LINK_RETRY_S_MAX else None
        while self._step(now, stale):
            pass
        with self._lock:
            link, making = self._link, self._making
        return (None if link is None or link.channel.lost else link), making

    def _step(self, now: float, stale: Handshake | None = None) -> bool:
        """One step. False: there is a link, or a step must wait. `stale`: the link in the making, if nobody has looked
        at it for long: should it fail, that is old news, and another is begun at once."""
        with self._lock:
            previous = self._link
            if previous is not None and not previous.channel.lost:
                return False  # another thread was faster
            if self._closed:
                raise UsageError("the client is closed: connect another")
            making = self._making
            if making is None and now < self._retry_at_s and not self._new_server(previous):
                return False
            old = making is not None and making is stale
            try:
                if making is None:
                    making = self._making = self._begin(previous, now)
                got_on = making.step()
            except UsageError:
                self._drop_making()
                raise
            except CacheError as error:  # no server, or one that has no room for us now, or refuses us
                return self._gave_up(error, now, again=old)
            except OSError as error:
                return self._gave_up(DisconnectedError(f"no link to {self.target}: {error}"), now, again=old)
            except BaseException:  # interrupted: nobody knows how far it got
                self._drop_making()
                raise
            if making.link is not None:
                try:
                    self._install(making.link, previous)
                finally:
                    making.tell_ended()
                return False
            if not got_on and now >= making.asked_s + HANDSHAKE_S_MAX:
                self._gave_up(DisconnectedError(f"the server at {self.target} does not answer"), now)
            return got_on

    def _begin(self, previous: Link | None, now: float) -> Handshake:
        occupancy = self.occupancy
        if previous is not None and previous.channel.forgotten:
            previous.channel.forgotten = False  # once: if it hangs from now on, no call waits for it again
            self._met = False  # it answers, so calls wait for it as for a new server
        return Handshake(
            self.target,
            self._client_id,
            lambda life_lock: [] if previous is None else occupancy.declare(previous, life_lock),
            previous,
            self._noting(),
            self._on_silence(),
            self._orphans,
            now,
        )

    def _install(self, link: Link, previous: Link | None) -> None:
        self._making, self._met = None, True
        self._retry_s, self._wait_at_s = LINK_RETRY_S, 0.0
        if previous is not None:
            self.occupancy.hand_over(previous, link)  # only now: until here the old row had to show that we live
            previous.life_lock = None
        self._link = link
        self._note_reachable()

    def _gave_up(self, error: CacheError, now: float, *, again: bool = False) -> bool:
        """Returns `again`: whether to try again at once."""
        self._drop_making()
        # Never raised: what was raised keeps the frames it went through, and with them this client.
        self._error = copy(error)
        self._retry_at_s = now + self._retry_s
        if self.target.address is not None or not isinstance(error, DisconnectedError):
            self._retry_s = min(2 * self._retry_s, LINK_RETRY_S_MAX)
        if again:
            self._retry_at_s = now
        else:
            self._note_unreachable(str(error))
        return again

    def _drop_making(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.close("the session could not be opened")

    def _new_server(self, previous: Link | None) -> bool:
        """Whether the pool shows that a server has come since the last attempt: then no pause is needed."""
        if previous is None or previous.segment is None:
            return False
        serving = previous.segment.serving
        if serving in (0, previous.epoch, self._serving_seen):
            return False
        self._serving_seen = serving
        self._retry_s = LINK_RETRY_S
        return True

    def _refusal(self, patient: bool) -> CacheError:
        making = self._making
        if making is not None:
            now = self._clock()
            error: CacheError = DisconnectedError(
                f"the server at {self.target} has not answered for {now - making.asked_s:.3f} s: "
                "it is starting, busy, or stopped"
            )
            if now >= making.asked_s + LINK_WAIT_S:
                self._note_unreachable(str(error))
            return error
        error = self._error
        # A limit has an answer for each key; other refusals are raised to callers that ask questions.
        explicit = isinstance(error, LimitError) or (patient and not isinstance(error, DisconnectedError))
        return copy(error) if explicit else DisconnectedError(str(error))

    # --- the log --------------------------------------------------------------------------------------------

    def _on_silence(self) -> Callable[[str], None]:
        """The callback of a channel whose server falls silent or answers again. It must not reference this object."""
        ours = weakref.ref(self)

        def note(why: str) -> None:
            links = ours()
            if links is not None:
                if why:
                    links._note_unreachable(why)
                else:
                    links._note_reachable()
                links._tell()

        return note

    def _note_unreachable(self, why: str) -> None:
        if not self._away:
            self._news.append(
                (
                    logging.WARNING,
                    f"cannot reach the lmcache-core server {self.target}: {why}. Until it is back, nothing is stored, "
                    "and lookups find only what the index of a pool that is mapped already has",
                )
            )
        self._away = why

    def _note_reachable(self) -> None:
        if self._away:
            self._away = ""
            self._news.append((logging.INFO, f"the lmcache-core server {self.target} is reachable again"))

    def _afterwards(self) -> None:
        """What to do after a call has taken its steps and holds no lock."""
        self._tell()
        if self._unsent and self._making is None:
            unsent, self._unsent = self._unsent, []
            for each in unsent:
                call = each()
                if call is not None:
                    call.get_on()

    def _tell(self) -> None:
        while self._news:
            with contextlib.suppress(IndexError):  # another thread logged it
                level, message = self._news.pop(0)
                log.log(level, "%s", message)

    # --- the end --------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether there is something to close."""
        return self._link is not None or self._leaving is not None

    def _noting(self) -> Callable[[LeaseExpiredNotice], None]:
        """The callback of a channel for notices. It must not reference this object: a dropped client ends at once."""
        ours = weakref.ref(self.occupancy)

        def note(notice: LeaseExpiredNotice) -> None:
            occupancy = ours()
            if occupancy is not None:
                occupancy.expire(notice.lease)

        return note

    def end_session(self, timeout_s: float) -> None:
        """Release every lease and promise, except those that a thread is still inside of after `timeout_s`."""
        leases, busy = self.occupancy.end(timeout_s, "its session was ended")
        try:
            self.call(lambda link: link.channel.call(m.EndSession(0, False, leases)), patient=True)
        except CacheError:  # the server gets it later, or is gone
            self.occupancy.remove_idle(busy)
            raise
        # Not after an interrupt, because nobody knows what was sent by then: each lease can still be ended by itself.
        self.occupancy.remove_idle(busy)

    def close(self, timeout_s: float) -> None:
        """Say goodbye and end the link. Idempotent; after an interrupt, the next call does the rest."""
        until = self._clock() + timeout_s
        leases, busy = self.occupancy.end(timeout_s, "the client is closed: connect another", closing=True)
        with self._lock:
            link = self._leaving = self._link or self._leaving
            self._link, self._closed = None, True
            self._drop_making()
        if link is None:
            return
        try:
            # With the server gone, everything that a goodbye would release is gone, too.
            with contextlib.suppress(DisconnectedError):
                link.say_goodbye(leases if busy else None, max(0.0, until - self._clock()))
        finally:  # whatever was sent: the life lock and the connection end everything that is not in use
            self.occupancy.remove_idle(busy)
            self.occupancy.leave(busy)
            link.close()
            self._leaving = None

    def leave_to_parent(self) -> None:
        """In a forked child: the link, its leases and its memory are the parent's. Ours start anew."""
        link, making, was_closed, occupancy = self._link, self._making, self._closed, self.occupancy
        self._start_over()
        self._closed = was_closed
        occupancy.leave_to_parent()
        if link is not None:
            link.close_in_child()
        if making is not None:
            making.close_in_child()


_all_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _after_fork() -> None:
    for links in list(_all_links):
        links.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
