"""The companions of a server: informed in time, and kept from harming the loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_core.errors import UsageError
from lmcache_core.kernel.effects import Committed, Effect, Evicted, Read, Removed
from lmcache_core.plugins.components import Kind
from lmcache_core.protocol import messages as m
from lmcache_core.server.companion import Companion, CompanionContext

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.server.l1 import L1
    from lmcache_core.server.session import Session

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Companions:
    """All of them. Lives on the loop's thread."""

    def __init__(self) -> None:
        self._all: dict[str, Companion] = {}
        self._at_work: dict[str, Companion] = {}
        self._faults: dict[str, str] = {}

    def start(self, registry: Registry, configured: Mapping[str, Any], server: str, l1: L1) -> None:
        """Build the configured ones. If one cannot be built, its error is raised and nothing stays open."""
        try:
            for name, settings in configured.items():
                context = CompanionContext(server, l1)
                self._all[name] = registry.build(Kind.COMPANION, name, settings, context)
        except BaseException:
            self.close()
            raise
        self._at_work = dict(self._all)

    def hear(self, effect: Effect) -> None:
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
        if session.carrier != "lifeline" or session.uid not in (0, os.geteuid()):
            raise UsageError(
                f"only the server's own user may operate {request.companion}, over the lifeline: run the "
                f"command as that user on the server's node"
            )
        companion = self._at_work.get(request.companion)
        if companion is None:
            there = ", ".join(self._at_work) or "none"
            why = f" ({self._faults[request.companion]})" if request.companion in self._faults else ""
            raise UsageError(f"this server has no companion {request.companion!r}{why}: it has {there}")
        return m.Operated(request.rid, companion.operate(request.operation, request.arguments))

    def status(self) -> dict[str, Any]:
        """The figures of each, and why it was abandoned, if it was."""
        shown: dict[str, Any] = {}
        for name, companion in self._all.items():
            try:
                shown[name] = dict(companion.status())
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                log.exception("the companion %s has no status", name)
                shown[name] = {"error": f"{type(error).__name__}: {error}"}
            if name in self._faults:
                shown[name]["abandoned"] = self._faults[name]
        return shown

    def close(self) -> None:
        """End all of them, in the reverse order."""
        self._at_work = {}
        while self._all:
            name, companion = self._all.popitem()
            for step in (companion.abandon, companion.close):
                try:
                    step()
                except KeyboardInterrupt:
                    raise
                except BaseException:
                    log.exception("the companion %s failed while closing", name)

    def _safely(self, name: str, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """The result of a companion's method. None: it raised, and was abandoned."""
        try:
            return call(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's fault must not end the server, nor must a panic in Rust
            log.error("the companion %s failed and is abandoned", name, exc_info=error)
            self._faults[name] = f"{type(error).__name__}: {error}"
        companion = self._at_work.pop(name, None)
        if companion is not None:
            try:
                companion.abandon()
            except KeyboardInterrupt:
                raise
            except BaseException:
                log.exception("the companion %s failed while it was abandoned", name)
        return None
