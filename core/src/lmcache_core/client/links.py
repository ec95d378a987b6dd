"""The client's current link: made when it is needed, made again when it was lost, never shared with a fork."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from lmcache_core.client.link import Link, Target, open_link
from lmcache_core.errors import CacheError, DisconnectedError, LimitError, UsageError
from lmcache_core.protocol.messages import LeaseExpired

if TYPE_CHECKING:
    from lmcache_core.client.leases import Lease

_RETRY_S_MIN = 0.05  # between two attempts to connect; doubles up to the maximum
_RETRY_S_MAX = 1.0
_LOOK_S = 0.1  # a client that only reads the index notices the end of its server after so long


class Links:
    """Owns the link and knows the open leases: what a thread of ours may still be copying to or from."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._start_over()
        _all_links.add(self)

    def _start_over(self) -> None:
        self._client_id = os.urandom(16)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._retry_at_s = 0.0
        self._retry_s = _RETRY_S_MIN
        self._look_at_s = 0.0
        self._why_not = ""
        self._closed = False
        self._former: list[Link] = []  # to servers that are gone, while leases of theirs are in use
        self.open_leases: dict[int, Lease] = {}  # by lease id

    def current(self) -> Link:
        """The link, a new one if need be. Raises `DisconnectedError` at once while there is no server; the next
        attempt is made after a pause, so that a missing server costs its callers nothing."""
        link = self._link
        # A link that ended while nobody looked is noticed here, before something is asked over it in vain.
        if link is not None and not link.channel.found_lost():
            return link
        with self._lock:
            return self._connect()

    def look(self) -> Link | None:
        """The link, also one that has ended: what stands in its pool's index may be right all the same.

        Makes no system call, but for a look at the connection now and then, which makes a new one where the server
        is gone: so whoever never needs the server still finds the next one.
        """
        now = time.monotonic()
        if now >= self._look_at_s and not self._lock.locked():  # whoever connects now does it for everybody
            self._look_at_s = now + _LOOK_S
            # What is wrong is for those to hear who ask the server; a hit is right without it.
            with contextlib.suppress(CacheError):
                self.current()
        return self._link

    def _connect(self) -> Link:
        previous = self._link
        if previous is not None and not previous.channel.lost:
            return previous  # another thread was faster
        if self._closed:
            raise UsageError("the client is closed: connect another")
        if time.monotonic() < self._retry_at_s:
            raise DisconnectedError(self._why_not)
        held = [] if previous is None else previous.declare(self.open_leases)
        try:
            link = open_link(self._target, self._client_id, held, previous, self._on_notice)
        except (DisconnectedError, LimitError) as error:  # no server, or one that has no room for us now
            self._why_not = str(error)
            self._retry_at_s = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_S_MAX)
            raise DisconnectedError(self._why_not) from error
        self._retry_s = _RETRY_S_MIN
        self._former = [each for each in (*self._former, previous) if each is not None and not each.gone]
        self._link = link
        return link

    def _on_notice(self, notice: LeaseExpired) -> None:
        lease = self.open_leases.get(notice.lease)
        if lease is not None:
            lease.expired = True

    def close(self) -> None:
        """Say goodbye and end the link. Idempotent."""
        with self._lock:
            link, self._link, self._closed = self._link, None, True
            former, self._former = self._former, []
        for each in former:
            each.close()
        if link is not None:
            # With the server gone, everything that a goodbye would release is gone, too.
            with contextlib.suppress(DisconnectedError):
                link.say_goodbye()
            link.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the link, its leases and its memory are the parent's. Ours begin anew."""
        links, was_closed = [*self._former, *([self._link] if self._link else [])], self._closed
        self._start_over()
        self._closed = was_closed
        for link in links:
            link.abandon()


_all_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _after_fork() -> None:
    for links in list(_all_links):
        links.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
