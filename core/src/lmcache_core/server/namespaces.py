"""Namespaces: each has one layout, for all sessions of the server."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lmcache_core.errors import LimitError, UsageError
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import NAMESPACES_PER_SESSION_KEPT, NAMESPACES_PER_SESSION_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.server.l1 import L1
from lmcache_core.server.shares import Share

if TYPE_CHECKING:
    from lmcache_core.server.session import Session


class Namespaces:
    """The layout of each namespace, as long as a session uses it or the pool has an object of it.

    A session's namespaces are forgotten by age: an engine may give each request its own salt, and so its own namespace.
    If a user's sessions together exceed their share, its namespaces are forgotten sooner. A namespace is never
    forgotten while a store into it waits.

    Objects of one namespace differ only by their keys, in the pool and on every tier: with two layouts, one of them
    would be given the other's bytes.
    """

    def __init__(self, kernel: Kernel, l1: L1, share: Share) -> None:
        self._kernel = kernel
        self._l1 = l1
        self._share = share  # of registrations: one for each session's use
        self.in_use: dict[int, tuple[int, int]] = {}  # namespace → layout id, sessions that use it
        self._by_layout: Counter[int] = Counter()  # namespaces in use

    def register(self, session: Session, namespace: int, layout: Layout) -> int:
        """Bind the session to a namespace; returns the layout's id. Raises `UsageError` if the namespace has another
        layout."""
        layout_id = self._layout_id(session, layout)
        known, sessions = self.in_use.get(namespace, (self._kernel.layout_of(namespace), 0))
        if known is not None and known != layout_id:
            raise UsageError(
                f"namespace {namespace:016x} has the layout {self._described(known)}, not {layout}: use a separate "
                "namespace for each layout"
            )
        if layout_id not in self._l1.layouts:
            self._l1.add_layout(layout_id, layout, session.origin)
        if namespace not in session.namespaces:
            full = self._share.full_for(session.origin)
            self._share.take(session.origin)
            self.in_use[namespace] = layout_id, sessions + 1
            session.namespaces[namespace] = layout_id
            if not sessions:
                self._by_layout[layout_id] += 1
            if len(session.namespaces) > (NAMESPACES_PER_SESSION_KEPT if full else NAMESPACES_PER_SESSION_MAX):
                self._remove_oldest(session, 1)
        return layout_id

    def session_ended(self, session: Session) -> None:
        """It no longer uses any of them."""
        for namespace in list(session.namespaces):
            self._remove(session, namespace)

    def _remove_oldest(self, session: Session, count: int) -> None:
        """Remove `count` of the session's oldest. A namespace into which a store waits has no object yet that would
        keep its layout."""
        idle = [namespace for namespace in session.namespaces if namespace not in session.storing]
        for namespace in idle[:count]:
            self._remove(session, namespace)

    def _remove(self, session: Session, namespace: int) -> None:
        """The session no longer uses it, or has met so many others that it must register it again. Its existing
        objects, and those being written or stored, keep their layout in the pool."""
        self._share.free(session.origin)
        layout_id, sessions = session.namespaces.pop(namespace), self.in_use.pop(namespace)[1] - 1
        if sessions:
            self.in_use[namespace] = layout_id, sessions
            return
        self._by_layout[layout_id] -= 1
        if not self._by_layout[layout_id]:
            del self._by_layout[layout_id]

    def _layout_id(self, session: Session, layout: Layout) -> int:
        """If there is no room for another layout, or none for this user, the session forgets the older half of its
        namespaces: their layouts go if nobody else uses them and no object has them."""
        try:
            return self._l1.layout_id(layout, self._by_layout.keys, session.origin)
        except LimitError:
            if not session.namespaces:
                raise
            self._remove_oldest(session, len(session.namespaces) // 2 + 1)
            return self._l1.layout_id(layout, self._by_layout.keys, session.origin)

    def _described(self, layout_id: int) -> str:
        layout = self._l1.layouts.get(layout_id)
        if layout is not None:
            return str(layout)
        fingerprint, nbytes = self._l1.former_layouts[layout_id]
        return f"of fingerprint {fingerprint:x} ({nbytes:,} bytes, adopted)"
