"""Namespaces: each has one layout, for all sessions of the server."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_core.errors import LimitError, UsageError
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import (
    LABELS_KEPT_MAX,
    NAMESPACES_PER_SESSION_KEPT,
    NAMESPACES_PER_SESSION_MAX,
    NAMESPACES_SHOWN_MAX,
)
from lmcache_core.pool.layout import Layout
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.pool.l1 import L1

if TYPE_CHECKING:
    from lmcache_core.server.peers.session import Session

log = logging.getLogger(__name__)


class InUse(NamedTuple):
    """A namespace that sessions use. The first label that one of them gives stays while it is in use. `readers`: those
    of the sessions that gave none, as tools do, which know it by its id."""

    layout_id: int
    sessions: int
    readers: int
    label: str


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
        self.in_use: dict[int, InUse] = {}
        self._former_labels: dict[int, str] = {}  # of namespaces that no session uses any more
        self._by_layout: Counter[int] = Counter()  # namespaces in use
        self._by_label: dict[str, dict[int, None]] = {}  # those in use that have one
        self.refused: dict[str, str] = {}  # by label: which tier cannot store its objects, and the cure

    def register(self, session: Session, namespace: int, layout: Layout, label: str = "") -> int:
        """Bind the session to a namespace; returns the layout's id. Raises `UsageError` if the namespace has another
        layout, or if a tier cannot store objects of this one."""
        layout_id = self._layout_id(session, layout)
        known = self.layout_of(namespace)
        if known is not None and known != layout_id:
            raise UsageError(
                f"namespace {namespace:016x} has the layout {self._described(known)}, not {layout}: give that "
                "layout, or another namespace (of another model or weights version) for this one"
            )
        self._check_tiers(namespace, layout, label)
        if layout_id not in self._l1.layouts:
            self._l1.add_layout(layout_id, layout, session.origin)
        if namespace not in session.namespaces:
            full = self._share.full_for(session.origin)
            self._l1.tallies.look(session.row)
            self._take_place(session, namespace, layout_id, sys.intern(label))
            if len(session.namespaces) > (NAMESPACES_PER_SESSION_KEPT if full else NAMESPACES_PER_SESSION_MAX):
                self._remove_oldest(session, 1)
        return layout_id

    def _check_tiers(self, namespace: int, layout: Layout, label: str) -> None:
        """Raises `UsageError` if some tier could never store these objects: they would be lost with the L1, and
        nobody would expect it. What was refused stays in `status`."""
        tiering = self._l1.tiering
        if tiering is None:
            return
        name = label or str(layout)
        try:
            tiering.check_namespace(namespace, layout, label)
        except UsageError as error:
            if name not in self.refused:
                log.warning("namespace %s is refused: %s", name, error)
            self.refused[name] = str(error)
            if len(self.refused) > NAMESPACES_SHOWN_MAX:
                del self.refused[next(iter(self.refused))]
            raise
        self.refused.pop(name, None)

    def described(self) -> list[tuple[int, Layout, str]]:
        """The namespaces that sessions use now, each with its layout and label."""
        layouts = self._l1.layouts
        used = self.in_use.items()
        return [(name, layouts[each.layout_id], each.label) for name, each in used if each.layout_id in layouts]

    def _take_place(self, session: Session, namespace: int, layout_id: int, label: str) -> None:
        self._share.take(session.origin)
        sessions, readers, shown = 0, 0, self._former_labels.pop(namespace, "")
        if namespace in self.in_use:
            _, sessions, readers, shown = self.in_use[namespace]
        shown = shown or label
        self.in_use[namespace] = InUse(layout_id, sessions + 1, readers + (not label), shown)
        if shown:
            self._by_label.setdefault(shown, {})[namespace] = None
        session.namespaces[namespace] = layout_id
        if label:
            session.labels[namespace] = label
        self._kernel.charge_namespaces(session.id, 1, len(label))
        if not sessions:
            self._by_layout[layout_id] += 1
        self._kernel.undo.add((self._remove, (session, namespace)))

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
        layout_id, was = session.namespaces.pop(namespace), self.in_use[namespace]
        label = session.labels.pop(namespace, "")
        self._kernel.charge_namespaces(session.id, -1, -len(label))
        if was.sessions > 1:
            self.in_use[namespace] = was._replace(sessions=was.sessions - 1, readers=was.readers - (not label))
            return
        del self.in_use[namespace]
        if was.label:
            del self._by_label[was.label][namespace]
            if not self._by_label[was.label]:
                del self._by_label[was.label]
        self._keep_label(namespace, was.label)
        self._by_layout[layout_id] -= 1
        if not self._by_layout[layout_id]:
            del self._by_layout[layout_id]

    def _keep_label(self, namespace: int, label: str) -> None:
        """No session uses it any more. Its objects may stay for days: people ask whose they are."""
        self._former_labels.pop(namespace, None)
        if label and self._kernel.layout_of(namespace) is not None:
            self._former_labels[namespace] = label
            if len(self._former_labels) > LABELS_KEPT_MAX:
                del self._former_labels[next(iter(self._former_labels))]

    def is_known(self, namespace: int, session: Session) -> bool:
        """Whether anybody else uses it, or the pool has objects of it."""
        there = self.in_use.get(namespace)
        others = 0 if there is None else there.sessions - (namespace in session.namespaces)
        return others > 0 or self._kernel.layout_of(namespace) is not None

    def labelled(self, label: str) -> list[int]:
        """The ids of all that have this label."""
        used = list(self._by_label.get(label, ()))
        former = [namespace for namespace, each in self._former_labels.items() if each == label]
        return used + [each for each in former if self._kernel.layout_of(each) is not None]

    def layout_of(self, namespace: int) -> int | None:
        """The id of its layout; None if no session uses it and the pool has nothing of it."""
        there = self.in_use.get(namespace)
        return self._kernel.layout_of(namespace) if there is None else there.layout_id

    def describe(self, busiest: Iterable[int]) -> dict[str, dict[str, Any]]:
        """For `status`, by id: the `busiest`, then those that sessions use, the newest first, then others of which the
        pool has objects. Tools use some only by their id, without a label: those are not shown."""
        rows: dict[str, dict[str, Any]] = {}
        candidates = chain(busiest, reversed(self.in_use), reversed(self._former_labels))
        for namespace in islice(candidates, 4 * NAMESPACES_SHOWN_MAX):  # a bound: a user may have 100,000
            there = self.in_use.get(namespace)
            layout_id = self.layout_of(namespace)
            label = self._former_labels.get(namespace, "") if there is None else there.label
            if layout_id is not None and (label or there is None):
                rows[f"{namespace:016x}"] = {
                    "label": label,
                    "layout": self._described(layout_id),
                    "sessions": 0 if there is None else there.sessions - there.readers,
                }
            if len(rows) >= NAMESPACES_SHOWN_MAX:
                break
        return rows

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
