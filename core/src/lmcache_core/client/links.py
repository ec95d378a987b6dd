"""The client's current link: made when it is needed, made again when it was lost, never shared with a fork."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from lmcache_core.client.channel import Orphans
from lmcache_core.client.handshake import Handshake
from lmcache_core.client.link import Link, Target
from lmcache_core.client.occupancy import Occupancy
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

log = logging.getLogger("lmcache_core.client")
_V = TypeVar("_V")


class Unsent(Protocol):
    """A call that must not wait, begun while there was no link yet."""

    def get_on(self) -> None:
        """Send it, or find out that there is nobody to send it to. Waits for nothing, and raises nothing."""
        ...


class Links:
    """Owns the link and knows the open leases: what a thread of ours may still be copying to or from.

    A link is made in steps that do not wait, and every call that finds it half made takes them as far as they go.
    What needs the server may then wait for it: `connect_timeout_s` at the first contact, `LINK_WAIT_S` every `wait_s`
    later, a question that has no other answer `connect_timeout_s` again. What the index answers never waits.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._clock = target.clock
        self._start_over()
        _all_links.add(self)

    def _start_over(self) -> None:
        self._client_id = os.urandom(16)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._leaving: Link | None = None  # of a client that is being closed
        self._making: Handshake | None = None
        self._met = False  # there has been a link, or one was waited for in vain
        self._retry_at_s = 0.0
        self._retry_s = LINK_RETRY_S
        self._wait_at_s = 0.0  # when the next call may wait for a link
        self._look_at_s = 0.0
        self._serving_seen = 0
        self._error: CacheError = DisconnectedError("this client has not connected yet")
        self._away = ""  # why no server can be reached, as the log was told
        self._told: set[str] = set()  # codes of refusals that the log has
        self._news: list[tuple[int, str]] = []  # for the log, once no lock is held
        self._unsent: list[weakref.ref[Unsent]] = []
        self._closed = False
        self._orphans = Orphans()  # what a channel that is gone had been granted may be given back over the next
        self.occupancy = Occupancy()

    @property
    def why_unreachable(self) -> str:
        """Why the server cannot be reached; empty while it can, and before it was tried."""
        return self._away

    def refused(self, error: CacheError) -> tuple[Status, Reason]:
        """See `results.refused`. What no server would have said is in the log, once; why there is no link is there
        already."""
        status, reason = refused(error)
        if not (isinstance(error, DisconnectedError) or self._away) and error.code not in self._told:
            self._told.add(error.code)
            log.warning("the lmcache-core server %s refused a call, whose keys are %s: %s", self._target, status, error)
        return status, reason

    def current(self, *, patient: bool = False) -> Link:
        """The link, a new one if need be. Raises `DisconnectedError` while there is none, and `LimitError` where a
        server has no place for us. `patient`: for a question, which has no such answer: it waits for a link that is
        being made, and hears whatever a server refused it with.

        A link that is silent is one: what is asked over it ends at once, unless the server has been heard again.
        """
        occupancy = self.occupancy
        if occupancy.gone or occupancy.copying:  # every call comes here: a property costs 0.1 µs more
            occupancy.tidy()
        link = self._link
        # A link that ended while nobody looked is noticed here, before something is asked over it in vain.
        if link is not None and not link.channel.found_lost():
            return link
        try:
            return self._made(patient)
        finally:
            self._afterwards()

    def asked(self, ask: Callable[[Link], _V], *, patient: bool = False) -> _V:
        """What is asked over the link, as `current` gives it. Where the server has forgotten our session, and so done
        nothing, it is asked once more over the next link."""
        try:
            return ask(self.current(patient=patient))
        except ForgottenError:
            return ask(self.current(patient=patient))

    def step(self) -> Link | None:
        """The link, or None while it is being made: for callers that must not wait. Raises `DisconnectedError` where
        there is no server, or none that answers, and `LimitError` where it has no place for us."""
        link = self._link
        if link is not None and not link.channel.found_lost():
            return link
        try:
            now = self._clock()
            link = self._get_on(now)
            making = self._making
            if link is None and (making is None or now >= making.began_s + self._target.connect_timeout_s):
                raise self._refusal(patient=False)
            return link
        finally:
            self._afterwards()

    def wait_unsent(self, call: Unsent) -> None:
        """Have a call sent as soon as any other call finds the link open, in the order of these; until then `step` gave
        None for it. It is kept weakly."""
        self._unsent.append(weakref.ref(call))

    def free_later(self, promises: Sequence[int]) -> None:
        """Promises that no server could be told of are to be freed over the next link."""
        self._orphans.free_later(promises)

    def now(self) -> float:
        """By the client's clock."""
        return self._clock()

    def wait(self, timeout_s: float) -> None:
        """Wait until the link that is being made may get on, at most for that long."""
        making = self._making
        if making is not None:
            with contextlib.suppress(DisconnectedError):  # another thread closed it: the next step sees why
                making.channel.connection.poll(self._clock() + timeout_s)

    def look(self) -> Link | None:
        """The link, also one that has ended: what stands in the index of a pool with a name may be right all the same.

        Makes no system call, but for a look at the connection now and then, which begins a new one where the server
        is gone, and for the steps of that, none of which waits: so whoever never needs the server still finds the
        next one.
        """
        now = self._clock()
        if now >= self._look_at_s and not self._lock.locked():  # whoever makes a step now does it for everybody
            self._look(now)
        return self._link

    def _look(self, now: float) -> None:
        self._look_at_s = now + LINK_LOOK_S
        link = self._link
        # What is wrong is for those to hear who ask the server; a hit is right without it.
        with contextlib.suppress(CacheError):
            if link is not None and not link.channel.found_lost():
                if link.channel.silent:
                    link.channel.listen()
                return
            if link is not None and not link.pool.backing.has_name:
                link.index = None  # no successor finds this pool, to say in it what is cleared from now on
            self._step(now)
            due = now if self._making is not None else min(self._retry_at_s, self._look_at_s)
            self._look_at_s = max(due, now + LINK_STEP_S)
        self._afterwards()

    # --- a link in the making -------------------------------------------------------------------------------

    def _made(self, patient: bool) -> Link:
        """Take steps, and wait as long as this call may, until there is a link."""
        now, until = self._clock(), None
        while True:
            link = self._get_on(now)
            if link is not None:
                return link
            making = self._making
            if making is None:
                raise self._refusal(patient)
            if until is None:
                until = self._may_wait_until(making, now, patient)
            if now >= until:
                self._met = True
                raise self._refusal(patient)
            self.wait(until - now)
            now = self._clock()

    def _may_wait_until(self, making: Handshake, now: float, patient: bool) -> float:
        if patient or not self._met:
            return making.began_s + self._target.connect_timeout_s
        if now < self._wait_at_s:
            return now
        self._wait_at_s = now + self._target.wait_s
        return now + LINK_WAIT_S

    def _get_on(self, now: float) -> Link | None:
        """Steps, until one has to wait for the server. The link, if it is open."""
        while self._step(now):
            pass
        link = self._link
        return None if link is None or link.channel.lost else link

    def _step(self, now: float) -> bool:
        """One step. False: there is a link, or one has to wait."""
        with self._lock:
            previous = self._link
            if previous is not None and not previous.channel.lost:
                return False  # another thread was faster
            if self._closed:
                raise UsageError("the client is closed: connect another")
            making = self._making
            if making is None:
                if now < self._retry_at_s and not self._new_server(previous):
                    return False
            elif now >= making.began_s + HANDSHAKE_S_MAX:
                self._gave_up(DisconnectedError(f"the server at {self._target} does not answer"), now)
                return False
            try:
                if making is None:
                    making = self._making = self._begin(previous, now)
                got_on = making.step()
            except UsageError:
                self._drop_making()
                raise
            except CacheError as error:  # no server, or one that has no room for us now, or is not for us
                self._gave_up(error, now)
                return False
            except OSError as error:
                self._gave_up(DisconnectedError(f"no link to {self._target}: {error}"), now)
                return False
            except BaseException:  # interrupted: nobody knows how far it came
                self._drop_making()
                raise
            if making.link is not None:
                self._install(making.link, previous)
                return False
            return got_on

    def _begin(self, previous: Link | None, now: float) -> Handshake:
        occupancy = self.occupancy
        if previous is not None and previous.channel.forgotten:
            previous.channel.forgotten = False  # once: should it hang from now on, nobody waits for it again
            self._met = False  # it answers, so calls wait for it as for a server that they have not met yet
        return Handshake(
            self._target,
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
            self.occupancy.hand_over(previous, link)  # only now: until here the old row had to say that we live
            previous.life_lock = None
        self._link = link
        self._note_reachable()

    def _gave_up(self, error: CacheError, now: float) -> None:
        self._drop_making()
        self._error = error
        self._retry_at_s = now + self._retry_s
        if self._target.address is not None or not isinstance(error, DisconnectedError):
            self._retry_s = min(2 * self._retry_s, LINK_RETRY_S_MAX)
        self._note_unreachable(str(error))

    def _drop_making(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.close("the session could not be opened")

    def _new_server(self, previous: Link | None) -> bool:
        """Whether the pool says that a server has come since the last attempt: no pause is due then."""
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
                f"the server at {self._target} has not answered for {now - making.began_s:.3f} s: "
                "it is starting, busy, or stopped"
            )
            if now >= making.began_s + LINK_WAIT_S:
                self._note_unreachable(str(error))
            return error
        error = self._error
        # A limit has an answer for each key; what else a server refuses us with is for those to hear who ask questions.
        told = isinstance(error, LimitError) or (patient and not isinstance(error, DisconnectedError))
        return type(error)(str(error)) if told else DisconnectedError(str(error))

    # --- the log --------------------------------------------------------------------------------------------

    def _on_silence(self) -> Callable[[str], None]:
        """What a channel calls when its server falls silent, or is heard again. It may not keep us."""
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
                    f"cannot reach the lmcache-core server {self._target}: {why}. Nothing is stored meanwhile, and "
                    "only what the mapped pool's index has is found",
                )
            )
        self._away = why

    def _note_reachable(self) -> None:
        if self._away:
            self._away = ""
            self._news.append((logging.INFO, f"the lmcache-core server {self._target} can be reached again"))

    def _afterwards(self) -> None:
        """What is due when a call has taken its steps, and holds no lock."""
        self._tell()
        if self._unsent and self._making is None:
            unsent, self._unsent = self._unsent, []
            for each in unsent:
                call = each()
                if call is not None:
                    call.get_on()

    def _tell(self) -> None:
        while self._news:
            with contextlib.suppress(IndexError):  # another thread told it
                level, words = self._news.pop(0)
                log.log(level, "%s", words)

    # --- the end --------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether there is something to close."""
        return self._link is not None or self._leaving is not None

    def _noting(self) -> Callable[[LeaseExpiredNotice], None]:
        """What a channel calls with a notice. It may not keep us: a client that is dropped ends at once."""
        ours = weakref.ref(self.occupancy)

        def note(notice: LeaseExpiredNotice) -> None:
            occupancy = ours()
            if occupancy is not None:
                occupancy.expire(notice.lease)

        return note

    def end_session(self, timeout_s: float) -> None:
        """Release every lease and promise, but for what a thread is still inside of after `timeout_s`."""
        leases, busy = self.occupancy.end(timeout_s, "its session was ended")
        try:
            self.asked(lambda link: link.channel.call(lambda rid: m.EndSession(rid, False, leases)), patient=True)
        except CacheError:  # it will hear of it, or is gone
            self.occupancy.remove_idle(busy)
            raise
        # Not after an interrupt, for nobody knows what was said by then: each lease can still be ended by itself.
        self.occupancy.remove_idle(busy)

    def close(self, timeout_s: float) -> None:
        """Say goodbye and end the link. Idempotent; after an interrupt, the next call does what is left."""
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
                link.say_goodbye(leases if busy else None)
        finally:  # whatever was said: with the life lock and the connection, all that is not in use ends
            self.occupancy.remove_idle(busy)
            self.occupancy.leave(busy)
            link.close()
            self._leaving = None

    def leave_to_parent(self) -> None:
        """In a forked child: the link, its leases and its memory are the parent's. Ours begin anew."""
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
