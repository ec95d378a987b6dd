"""Clears: the fence takes effect at once, memory is freed between other messages, and the answer comes last.

A clear of the tiers by another server clears the pool, too: otherwise write-back would store what was cleared again,
under the new epoch.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from lmcache_core.errors import CacheError, PoolError, SettingsError
from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import error_reply
from lmcache_core.server.peers.session import Session
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.waiting.tier_waits import TierWaits
from lmcache_core.tiers.object.epochs import Epochs

log = logging.getLogger(__name__)


class Clears:
    """The callers that wait for clears. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, l1: L1, tier_waits: TierWaits, epochs: Epochs) -> None:
        self._kernel = kernel
        self._l1 = l1
        self._tier_waits = tier_waits
        self._epochs = epochs
        self.waiting: deque[tuple[Clearing, Session, int]] = deque()  # in the order in which they will be done
        self.unnoted = False  # the pool is not noted to be cleared yet
        epochs.on_risen.append(self._cleared_elsewhere)
        if l1.segment.adopted and epochs.digest not in (0, l1.segment.clears):
            log.warning("pool %r is cleared: the tiers were, while no server had it", l1.segment.info.name)
            self._cleared_elsewhere([None])
        self._note()

    def clear(self, session: Session, request: m.Clear) -> m.Message | None:
        """The answer to a small clear; None: it follows once everything is freed, whether or not the session still
        exists.

        With `tiers` the namespace's epoch moves first. If the new one cannot be kept, the L1 is cleared anyway, and the
        answer is an error.
        """
        tiering = self._l1.tiering
        if not request.tiers or tiering is None:
            if failed := self._note_begin():
                raise failed
            return self._answer(session, request, request.tiers)
        tiering.move_epoch(request.namespace, partial(self._moved, session, request))
        return None

    def _moved(self, session: Session, request: m.Clear, error: Exception | None) -> None:
        error = error or self._note_begin()
        reply = self._answer(session, request, tiers=error is None)
        self._l1.apply()
        self._note()
        if error is not None:
            kept = error if isinstance(error, CacheError) else SettingsError(f"the tiers are not cleared: {error}")
            self.waiting = deque(each for each in self.waiting if each[1:] != (session, request.rid))
            reply = error_reply(request.rid, kept)
        if reply is not None:
            session.send(reply)

    def _answer(self, session: Session, request: m.Clear, tiers: bool) -> m.Message | None:
        clearing = self._begin(request.namespace, tiers, session.id)
        if clearing.done:
            return _reply(clearing, request.rid)
        self.waiting.append((clearing, session, request.rid))
        return None

    def _cleared_elsewhere(self, scopes: Sequence[int | None]) -> None:
        if failed := self._note_begin():
            log.warning("%s", failed)
        for namespace in scopes:
            self._begin(namespace, True, SERVER_SESSION)
        self._l1.apply()
        self._note()

    def _begin(self, namespace: int | None, tiers: bool, session_id: int) -> Clearing:
        now = self._l1.clock.now
        self._tier_waits.clear(namespace)
        clearing = self._kernel.begin_clear(now, namespace, session_id=session_id)
        if self._l1.tiering is not None:
            self._l1.tiering.clear(namespace)
        self._kernel.free_cleared(now)
        self._l1.observer.cleared(namespace, tiers, session_id)
        return clearing

    def step(self) -> bool:
        """Free a bounded part of what was cleared. Returns whether there is more: then the next turn of the loop should
        come at once, after everybody's next message."""
        if not (self._kernel.clearing or self.waiting or self.unnoted):
            return False
        self._kernel.free_cleared(self._l1.clock.now)
        self._l1.apply()  # when the answer is sent, nothing of it can be found any more
        while self.waiting and self.waiting[0][0].done:
            clearing, session, rid = self.waiting.popleft()
            session.send(_reply(clearing, rid))
        self._note()
        return self._kernel.clearing

    def _note_begin(self) -> PoolError | None:
        """Note in the pool when it is cleared, before anything is; what is in the way, if it lies on a disk."""
        try:
            self._l1.segment.note_cleared(math.ceil(time.time()))
        except PoolError as error:
            return error
        return None

    def _note(self) -> None:
        """Note in the pool for which epochs it is cleared, once nothing is left that a clear has to free: a server that
        dies before that leaves a pool that the next one clears."""
        self.unnoted = self._kernel.clearing
        if not self.unnoted:
            self._l1.segment.note_clears(self._epochs.digest)


def _reply(clearing: Clearing, rid: int) -> m.Message:
    cleared = clearing.cleared
    return m.ClearedReply(rid, cleared.objects, cleared.nbytes, cleared.doomed)
