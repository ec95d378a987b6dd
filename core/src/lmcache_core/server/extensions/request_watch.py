"""Requests with their answers, for an operation that watches them: also of those that are answered later.

While one watches, the index is closed to clients, so they ask for what they would have found by themselves: what is
watched would be useless without the hits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_core.errors import UsageError
from lmcache_core.guard import guarded
from lmcache_core.kernel.answers import Grant
from lmcache_core.protocol import messages as m
from lmcache_core.server.operation import AnsweredRequest
from lmcache_core.server.peers.late_answers import LateAnswers

if TYPE_CHECKING:
    from lmcache_core.server.peers.session import Session
    from lmcache_core.server.pool.l1 import L1

log = logging.getLogger(__name__)

_KINDS: dict[type[m.Message], str] = {
    m.LookupRequest: "lookup",
    m.TracedLookup: "lookup",
    m.PrepareStore: "store",
    m.TracedPrepareStore: "store",
    m.PrepareRetrieve: "retrieve",
    m.Clear: "clear",
}
_GRANTED = bytes([Grant.GRANTED])
Watcher = Callable[[AnsweredRequest], None]


class _Pending(NamedTuple):
    """A request whose answer is not known yet."""

    request: Any
    at_s: float  # of the loop's clock
    session: int
    nbytes: int  # of an object; 0 if unknown


class RequestWatch:
    """Lives on the loop's thread."""

    def __init__(self, l1: L1) -> None:
        self._l1 = l1
        self._watcher: Watcher | None = None
        self._late = LateAnswers[_Pending](self._answered)

    @property
    def on(self) -> bool:
        """Whether somebody watches."""
        return self._watcher is not None

    def begin(self, watcher: Watcher) -> Callable[[], None]:
        """See `OperationContext.watch`."""
        if self._watcher is not None:
            raise UsageError("another operation watches the requests to this server: end that first")
        self._watcher = watcher
        self._l1.serve_index(False)
        return partial(self._end, watcher)

    def close(self) -> None:
        """For the server's end."""
        if self._watcher is not None:
            self._end(self._watcher)

    def _end(self, watcher: Watcher) -> None:
        if self._watcher is watcher:
            self._late.end()
        if self._watcher is watcher:  # it has not failed just now
            self._watcher = None
            self._l1.serve_index(True)

    def served(self, session: Session | None, request: m.Request, reply: m.Message | None) -> None:
        """A request was answered, or will be (None)."""
        if session is None or type(request) not in _KINDS:
            return
        layout = self._l1.layouts.get(session.namespaces.get(getattr(request, "namespace", None) or 0, 0))
        pending = _Pending(request, self._l1.clock.now, session.id, 0 if layout is None else layout.nbytes)
        if reply is not None:
            self._answered(pending, reply)
        else:
            self._late.keep(session, request.rid, pending)

    def _answered(self, pending: _Pending, reply: m.Message | None) -> None:
        """None: its client was gone before there was an answer, or nobody watches any more."""
        watcher, request = self._watcher, pending.request
        if watcher is None:
            return
        statuses: bytes = getattr(reply, "statuses", b"")

        def failed(error: BaseException) -> None:
            log.error("the operation that watches the requests failed, and is disabled", exc_info=error)
            self._watcher = None
            self._l1.serve_index(True)
            self._late.end()

        guarded(
            failed,
            watcher,
            AnsweredRequest(
                asked_at_s=pending.at_s,
                took_s=self._l1.clock.now - pending.at_s,
                session=pending.session,
                kind=_KINDS[type(request)],
                namespace=request.namespace or 0,
                nbytes=pending.nbytes,
                keys=getattr(request, "keys", b""),
                prefix=getattr(request, "prefix", False),
                hits=reply.hits if isinstance(reply, m.LookupReply) else statuses.count(_GRANTED),
                statuses=statuses,
            ),
        )
