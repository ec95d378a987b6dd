"""Clears: the fence takes effect at once, memory is freed between other messages, and the answer comes last."""

from __future__ import annotations

from collections import deque

from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.protocol import messages as m
from lmcache_core.server.l1 import L1
from lmcache_core.server.session import Session
from lmcache_core.server.store_waits import StoreWaits


class Clears:
    """The callers that wait for clears. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, l1: L1, store_waits: StoreWaits) -> None:
        self._kernel = kernel
        self._l1 = l1
        self._store_waits = store_waits
        self.waiting: deque[tuple[Clearing, Session, int]] = deque()  # in the order in which they will be done

    def clear(self, session: Session, request: m.Clear) -> m.Message | None:
        """The answer to a small clear; None: it follows once everything is freed, whether or not the session still
        exists.

        If a fence cannot be saved for the tiers, the answer is an error at once; the L1 is cleared anyway.
        """
        now = self._l1.clock.now
        self._store_waits.clear(request.namespace)
        clearing = self._kernel.begin_clear(now, request.namespace, session_id=session.id)
        if self._l1.tiering is not None:
            self._l1.tiering.clear(request.namespace, tiers=request.tiers)
        self._kernel.free_cleared(now)
        if self._l1.taps is not None:
            self._l1.taps.cleared(request.namespace, request.tiers, session.id)
        if clearing.done:
            return _answer(clearing, request.rid)
        self.waiting.append((clearing, session, request.rid))
        return None

    def step(self) -> bool:
        """Free a bounded part of what was cleared. Returns whether there is more: then the next turn of the loop should
        come at once, after everybody's next message."""
        if not self._kernel.clearing and not self.waiting:
            return False
        self._kernel.free_cleared(self._l1.clock.now)
        self._l1.apply()  # when the answer is sent, nothing of it can be found any more
        while self.waiting and self.waiting[0][0].done:
            clearing, session, rid = self.waiting.popleft()
            session.send(_answer(clearing, rid))
        return self._kernel.clearing


def _answer(clearing: Clearing, rid: int) -> m.Message:
    cleared = clearing.cleared
    return m.ClearedReply(rid, cleared.objects, cleared.nbytes, cleared.doomed)
