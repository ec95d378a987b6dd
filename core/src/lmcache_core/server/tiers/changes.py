"""Tiers that are added, changed and removed while the server runs.

Settings are validated by the same composition as at the start, with the plugins' own models. That, imports and building
an adapter take time, so they happen on a separate thread; the loop only swaps what is ready. No plugin is added: only
adapters that were installed at the start can be named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache_core.errors import CacheError, LimitError, PluginError, UsageError
from lmcache_core.guard import guarded, on_failure
from lmcache_core.limits import TIER_CHANGES_MAX
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import error_reply
from lmcache_core.server.peers.session import Session
from lmcache_core.server.process.loop import Loop
from lmcache_core.server.tiers.opening import TierOpener, build_tier, tier_config
from lmcache_core.settings.model import TierSettings
from lmcache_core.settings.present import plain
from lmcache_core.settings.tier import same_but_for_figures, tier_settings
from lmcache_core.threads import started
from lmcache_core.tiers.tier.tier import Tier

log = logging.getLogger(__name__)

_Finish = Callable[[], None]  # on the loop's thread; may raise an error for the caller


class TierChanges:
    """Serves `Tiers` and `ChangeTier`. Lives on the loop's thread."""

    def __init__(
        self,
        server: str,
        registry: Registry,
        loop: Loop,
        configured: Mapping[str, TierSettings],
        tiers: TierOpener,
        namespaces: Callable[[], Sequence[tuple[int, Layout, str]]],
    ) -> None:
        self._server = server
        self._registry = registry
        self._loop = loop
        self._settings = dict(configured)
        self._tiers = tiers
        self._namespaces = namespaces
        self._under_way: set[str] = set()

    def describe(self, rid: int) -> m.TiersReply:
        """Every tier in order: its status and its settings, secrets hidden."""
        settings = self._settings
        tiers = self._tiers.opened().status()["tiers"] if settings else []
        return m.TiersReply(rid, [{**tier, "settings": _shown(settings[tier["name"]])} for tier in tiers])

    def change(self, session: Session, request: m.ChangeTier) -> m.Message | None:
        """The answer, or None if it follows once the tier has been built."""
        session.check_operates("change tiers")
        name = request.tier
        if name in self._under_way:
            raise UsageError(f"tier {name!r} is already being changed: wait for the answer")
        if request.action == "drain":
            self._tiers.opened().drain_tier(name)
            return m.Done(request.rid)
        if request.action == "remove":
            self._tiers.opened().remove_tier(name)
            del self._settings[name]
            return m.Done(request.rid)
        if request.action == "add":
            self._refuse_taken(name)
            return self._build(session, request, lambda: self._add(name, request))
        if request.action == "reconfigure":
            before = self._settings.get(name)
            if before is None:
                raise UsageError(f"no tier is named {name!r}: there are {', '.join(self._settings) or 'none'}")
            return self._build(session, request, lambda: self._reconfigure(name, request, before))
        raise UsageError(f"unknown tier action {request.action!r}: use add, drain, remove or reconfigure")

    # --- on a thread of its own ---------------------------------------------------------------------------

    def _add(self, name: str, request: m.ChangeTier) -> _Finish:
        settings = tier_settings(self._registry, name, request.values, request.texts)
        tier = build_tier(name, settings, self._registry, self._server)

        def finish() -> None:
            self._refuse_taken(name)
            self._check_namespaces(tier)
            self._tiers.opened().add_tier(tier)
            self._settings[name] = settings

        return _closing_if_refused(finish, tier)

    def _reconfigure(self, name: str, request: m.ChangeTier, before: TierSettings) -> _Finish:
        settings = tier_settings(self._registry, name, request.values, request.texts, before)
        if same_but_for_figures(before, settings):

            def adjust() -> None:
                self._tiers.opened().reconfigure_tier(name, tier_config(settings))
                self._settings[name] = settings

            return adjust
        tier = build_tier(name, settings, self._registry, self._server)

        def replace() -> None:
            self._check_namespaces(tier)
            self._tiers.opened().replace_tier(tier)
            self._settings[name] = settings

        return _closing_if_refused(replace, tier)

    # --- there and back -----------------------------------------------------------------------------------

    def _refuse_taken(self, name: str) -> None:
        if name in self._settings:
            raise UsageError(f"tier {name!r} already exists: reconfigure it, or choose another name")

    def _check_namespaces(self, tier: Tier) -> None:
        for namespace, layout, label in self._namespaces():
            tier.check_namespace(namespace, layout, label)

    def _build(self, session: Session, request: m.ChangeTier, make: Callable[[], _Finish]) -> m.Message | None:
        """None: the answer follows."""
        if len(self._under_way) >= TIER_CHANGES_MAX:
            raise LimitError(f"{TIER_CHANGES_MAX} tiers are already being changed: wait for the answers")
        self._under_way.add(request.tier)

        def work() -> None:
            finish = guarded(_raising, make)
            self._loop.call(lambda: self._answer(session, request, finish))

        if started(work, f"tier-{request.tier}-build") is None:
            self._under_way.discard(request.tier)
            raise LimitError(f"the system gives no thread to build tier {request.tier!r} on: try again later")
        return None

    def _answer(self, session: Session, request: m.ChangeTier, finish: _Finish) -> None:
        self._under_way.discard(request.tier)

        def done() -> m.Message:
            finish()
            return m.Done(request.rid)

        def failed(error: BaseException) -> m.Message:
            if isinstance(error, CacheError):
                return error_reply(request.rid, error)
            log.error("a change of tier %s failed", request.tier, exc_info=error)
            reason = (
                f"tier {request.tier!r} could not be built: {type(error).__name__}; the server's log has the traceback"
            )
            return error_reply(request.rid, PluginError(reason))

        session.send(guarded(failed, done))


def _raising(error: BaseException) -> _Finish:
    def finish() -> None:
        raise error

    return finish


def _closing_if_refused(finish: _Finish, tier: Tier) -> _Finish:
    """Closes a tier that was built but not accepted."""

    def closing_if_refused() -> None:
        with on_failure(lambda: started(tier.adapter.close, f"tier-{tier.name}-close")):
            finish()

    return closing_if_refused


def _shown(settings: TierSettings) -> dict[str, Any]:
    shown: dict[str, Any] = plain(settings)
    return {**{name: value for name, value in shown.items() if name != "settings"}, **(shown["settings"] or {})}
