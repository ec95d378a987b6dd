"""A link in the making: what to do in each of its states (`link_states.py`), one step at a time, without waiting."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_core.client.link.channel import Channel, expect
from lmcache_core.client.link.link import MAPS_POOL, Link, Target
from lmcache_core.client.link.link_states import LinkEvent, LinkState
from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import PoolError
from lmcache_core.pool.atfork import PrivateDescriptor
from lmcache_core.protocol import messages as m

if TYPE_CHECKING:
    from lmcache_core.client.link.channel import Orphans, Pending
    from lmcache_core.pool.lifelock import LifeLock

_FOREVER_S = math.inf  # the maker of the link decides how long to wait, not the channel


class Handshake:
    """Connect, say hello, map the pool, attach. The caller calls `step` until `link` is there, or abandons it.

    Errors end it: `DisconnectedError` if no server answers, and `LimitError`, `VersionError` or `PoolError` if one
    refuses or cannot be used; the caller then closes it.
    """

    def __init__(
        self,
        target: Target,
        client_id: bytes,
        held: Callable[[LifeLock], Sequence[int]],
        previous: Link | None,
        on_notice: Callable[[m.LeaseExpiredNotice], None],
        on_silence: Callable[[str], None],
        orphans: Orphans,
        now: float,
    ) -> None:
        """`held`: the leases to continue over the new link, under its life lock. `previous`: the link before, which has
        ended."""
        self.asked_s = now  # when the server was last told something: until then it is not the server that is late
        self._target = target
        self._client_id = client_id
        self._held = held
        self._previous = previous
        self._link: Link | None = None
        self._pending: Pending | None = None
        # Readable once this has ended, either way: a thread that waits for a frame may wait for one that another thread
        # has read. Closed with the last reference, so no thread polls a number that means something else by then.
        self._ended = PrivateDescriptor(Descriptor(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.channel = Channel(
            target.connection(),
            on_notice,
            orphans,
            timeout_s=target.call_timeout_s,
            on_silence=on_silence,
            clock=target.clock,
            state=LinkState.CONNECTING,
        )

    @property
    def link(self) -> Link | None:
        """The link, once it is open."""
        return self._link if self.channel.state is LinkState.OPEN else None

    def wait(self, deadline: float) -> None:
        """Wait until there may be something to do, or another thread has ended this."""
        self.channel.connection.poll(deadline, self._ended.fileno())

    def tell_ended(self) -> None:
        """Wake the threads that wait."""
        if not self._ended.closed:
            os.eventfd_write(self._ended.fileno(), 1)

    def step(self) -> bool:
        """Do what the state requires. False: the server has not answered yet."""
        event = STEPS[self.channel.state](self)
        if event is not None:
            self.channel.move(event)
            self.asked_s = self._target.clock()
        return event is not None

    def _connect(self) -> LinkEvent | None:
        if not self.channel.connection.connect():
            return None
        target = self._target
        hello = [MAPS_POOL] if target.maps_pool else []
        if target.maps_pool and self.channel.connection.takes_token:
            hello.append(m.LIFE_TOKEN)
        if target.chunk_tokens is not None:
            hello.append(f"{m.CHUNK_TOKENS}{target.chunk_tokens}")
        self._pending = self._say(
            m.Hello(
                0,
                m.PROTOCOL_VERSION_MIN,
                m.PROTOCOL_VERSION_MAX,
                self._client_id,
                target.client_name,
                os.getpid(),
                hello,
            )
        )
        return LinkEvent.CONNECTED

    def _greet(self) -> LinkEvent | None:
        assert self._pending is not None
        reply = self.channel.poll(self._pending)
        if reply is None:
            return None
        self._link = Link(self.channel, expect(reply, m.Welcome), self._previous, trace=self._target.trace)
        return LinkEvent.WELCOMED

    def _map(self) -> LinkEvent:
        link, target, connection = self._link, self._target, self.channel.connection
        assert link is not None
        if not target.maps_pool:
            return LinkEvent.UNMAPPED
        try:
            row, nonce = link.map(connection.take_fd(), self._previous, target, connection.take_token())
        except PoolError as error:
            if connection.carrier == "lifeline":
                raise
            link.unmap(str(error))
            return LinkEvent.UNMAPPED
        assert link.life_lock is not None
        held = list(self._held(link.life_lock))
        attach = m.Attach if link.life_lock.locked else m.AttachUnlocked
        self._pending = self._say(attach(0, row, nonce, held))
        return LinkEvent.MAPPED

    def _attach(self) -> LinkEvent | None:
        assert self._pending is not None
        reply = self.channel.poll(self._pending)
        if reply is None:
            return None
        expect(reply, m.Attached)
        return LinkEvent.ATTACHED

    def _say(self, request: m.Message) -> Pending:
        return self.channel.start(request, extra_s=_FOREVER_S, blocks=False)

    def close(self, why: str) -> None:
        """Abandon it. Once open, closing is the link's job."""
        self.channel.close(why)
        self.tell_ended()
        if self._link is not None:
            self._link.life_lock = None  # otherwise the row would seem taken as long as this object lives

    def close_in_child(self) -> None:
        """In a forked child: the connection is the parent's."""
        self.channel.connection.close_in_child()
        if self._link is not None:
            self._link.close_in_child()


STEPS: dict[LinkState, Callable[[Handshake], LinkEvent | None]] = {
    LinkState.CONNECTING: Handshake._connect,
    LinkState.GREETING: Handshake._greet,
    LinkState.MAPPING: Handshake._map,
    LinkState.ATTACHING: Handshake._attach,
}
