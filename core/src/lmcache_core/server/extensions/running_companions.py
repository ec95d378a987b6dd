"""The companions of a server: informed in time, and kept from harming the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_core.errors import UsageError
from lmcache_core.guard import guarded, on_failure
from lmcache_core.kernel.effects import Committed, Effect, Evicted, Read, Removed
from lmcache_core.plugins.components import Kind
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import plain
from lmcache_core.server.companion import Companion, CompanionContext

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.server.peers.session import Session
    from lmcache_core.server.pool.l1 import L1

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RunningCompanions:
    """All of them. Lives on the loop's thread."""

    def __init__(self) -> None:
        self._all: dict[str, Companion] = {}
        self._at_work: dict[str, Companion] = {}
        self._faults: dict[str, str] = {}

    def start(self, registry: Registry, configured: Mapping[str, Any], server: str, l1: L1) -> None:
        """Build the configured ones. If one cannot be built, its error is raised and nothing stays open."""
        with on_failure(self.close):
            for name, settings in configured.items():
                context = CompanionContext(server, l1)
                self._all[name] = registry.build(Kind.COMPANION, name, settings, context)
        self._at_work = dict(self._all)

    def on_effect(self, effect: Effect) -> None:
        """Pass on what happened to objects. Never raises."""
        for name, companion in list(self._at_work.items()):
            match effect:
                case Committed():
                    self._safely(name, companion.committed, effect.objects)
                case Evicted() | Removed():
                    self._safely(name, companion.left, effect.objects)
                case Read():
                    self._safely(name, companion.read, effect.objects)

    def next_step(self) -> float | None:
        """When the first of them has work to do; None: none has."""
        first: float | None = None
        if self._at_work:  # every turn of the loop asks, and most servers have no companion
            for name, companion in list(self._at_work.items()):
                due = self._safely(name, companion.next_step)
                if due is not None and (first is None or due < first):
                    first = due
        return first

    def step(self, now: float) -> None:
        """Call those whose time has come. Never raises."""
        if self._at_work:
            for name, companion in list(self._at_work.items()):
                due = self._safely(name, companion.next_step)
                if due is not None and due <= now:
                    self._safely(name, companion.step, now)

    def offers(self) -> dict[str, dict[str, Any]]:
        """For `Welcome`."""
        offered = {name: self._safely(name, companion.offers) for name, companion in list(self._at_work.items())}
        return {name: offer for name, offer in offered.items() if offer is not None}

    def operate(self, session: Session, request: m.Operate) -> m.Message:
        """Run a requested operation. Raises `UsageError`."""
        session.check_operates(f"operate {request.companion}")
        companion = self._at_work.get(request.companion)
        if companion is None:
            there = ", ".join(self._at_work) or "none"
            why = f" ({self._faults[request.companion]})" if request.companion in self._faults else ""
            raise UsageError(f"this server has no companion {request.companion!r}{why}: it has {there}")
        return m.Operated(request.rid, companion.operate(request.operation, request.arguments))

    def status(self) -> dict[str, Any]:
        """The figures of each, and why it is disabled, if it is."""
        shown: dict[str, Any] = {}
        for name, companion in self._all.items():
            shown[name] = guarded(partial(_no_status, name), _status_of, companion)
            if name in self._faults:
                shown[name]["disabled"] = self._faults[name]
        return shown

    def close(self) -> None:
        """End all of them, in the reverse order."""
        self._at_work = {}
        while self._all:
            name, companion = self._all.popitem()
            for step in (companion.abandon, companion.close):
                guarded(partial(_failed, name, "closing"), step)

    def _safely(self, name: str, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """The result of a companion's method. None: it raised, and is disabled."""
        return guarded(partial(self._abandon, name), call, *arguments)

    def _abandon(self, name: str, error: BaseException) -> None:
        log.error("the companion %s failed and is disabled", name, exc_info=error)
        self._faults[name] = f"{type(error).__name__}: {error}"
        companion = self._at_work.pop(name, None)
        if companion is not None:
            guarded(partial(_failed, name, "it was disabled"), companion.abandon)


def _status_of(companion: Companion) -> dict[str, Any]:
    return plain(companion.status)


def _no_status(name: str, error: BaseException) -> dict[str, Any]:
    log.error("the companion %s has no status", name, exc_info=error)
    return {"error": f"{type(error).__name__}: {error}"}


def _failed(name: str, when: str, error: BaseException) -> None:
    log.error("the companion %s failed while %s", name, when, exc_info=error)
