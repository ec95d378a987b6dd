"""Tiers that are added, changed and removed while the server runs.

Settings are validated by the same composition as at the start, with the plugins' own models. That, imports and building
an adapter take time, so they happen on a separate thread; the loop only swaps what is ready. No plugin is added: only
adapters that were installed at the start can be named.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lmcache_core.errors import CacheError, LimitError, PluginError, UsageError
from lmcache_core.limits import TIER_CHANGES_MAX
from lmcache_core.plugins.registry import Registry
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import error_reply
from lmcache_core.server.components import TierOpener, build_tier, tier_config
from lmcache_core.server.loop import Loop
from lmcache_core.server.session import Session
from lmcache_core.settings.model import TierSettings
from lmcache_core.settings.present import plain
from lmcache_core.settings.tier import same_but_for_figures, tier_settings
from lmcache_core.tiers.tier.tier import Tier

log = logging.getLogger(__name__)

_Finish = Callable[[], None]  # on the loop's thread; may raise an error for the caller


class TierChanges:
    """Serves `Tiers` and `ChangeTier`. Lives on the loop's thread."""

    def __init__(
        self,
        registry: Registry,
        loop: Loop,
        configured: Mapping[str, TierSettings],
        tiers: TierOpener,
    ) -> None:
        self._registry = registry
        self._loop = loop
        self._settings = dict(configured)
        self._tiers = tiers
        self._under_way: set[str] = set()

    def describe(self, rid: int) -> m.TiersReply:
        """Every tier in order: its status and its settings, secrets hidden."""
        settings = self._settings
        tiers = self._tiers.opened().status()["tiers"] if settings else []
        return m.TiersReply(rid, [{**tier, "settings": _shown(settings[tier["name"]])} for tier in tiers])

    def change(self, session: Session, request: m.ChangeTier) -> m.Message | None:
        """The answer, or None if it follows once the tier has been built."""
        if session.carrier != "lifeline" or session.uid not in (0, os.geteuid()):
            raise UsageError(
                "only the server's own user may change tiers, over the lifeline: run the "
                "command as that user on the server's node"
            )
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
            self._build(session, request, lambda: self._add(name, request))
        elif request.action == "reconfigure":
            before = self._settings.get(name)
            if before is None:
                raise UsageError(f"no tier is named {name!r}: there are {', '.join(self._settings) or 'none'}")
            self._build(session, request, lambda: self._reconfigure(name, request, before))
        else:
            raise UsageError(f"unknown tier action {request.action!r}: use add, drain, remove or reconfigure")
        return None

    # --- on a thread of its own ---------------------------------------------------------------------------

    def _add(self, name: str, request: m.ChangeTier) -> _Finish:
        settings = tier_settings(self._registry, name, request.values, request.texts)
        tier = build_tier(name, settings, self._registry)

        def finish() -> None:
            self._refuse_taken(name)
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
        tier = build_tier(name, settings, self._registry)

        def replace() -> None:
            self._tiers.opened().replace_tier(tier)
            self._settings[name] = settings

        return _closing_if_refused(replace, tier)

    # --- there and back -----------------------------------------------------------------------------------

    def _refuse_taken(self, name: str) -> None:
        if name in self._settings:
            raise UsageError(f"tier {name!r} already exists: reconfigure it, or choose another name")

    def _build(self, session: Session, request: m.ChangeTier, make: Callable[[], _Finish]) -> None:
        if len(self._under_way) >= TIER_CHANGES_MAX:
            raise LimitError(f"{TIER_CHANGES_MAX} tiers are already being changed: wait for the answers")
        self._under_way.add(request.tier)

        def work() -> None:
            try:
                finish = make()
            except BaseException as error:  # noqa: BLE001  # whatever it is, a panic of Rust too, who asked is told
                finish = _raising(error)
            self._loop.call(lambda: self._answer(session, request, finish))

        try:
            threading.Thread(target=work, name=f"tier-{request.tier}-build", daemon=True).start()
        except RuntimeError as error:  # a limit of the user's processes, or of the control group
            self._under_way.discard(request.tier)
            raise LimitError(f"no thread to build tier {request.tier!r} on: {error}; try again later") from error

    def _answer(self, session: Session, request: m.ChangeTier, finish: _Finish) -> None:
        self._under_way.discard(request.tier)
        try:
            finish()
        except CacheError as error:
            session.send(error_reply(request.rid, error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            log.exception("a change of tier %s failed", request.tier)
            reason = (
                f"tier {request.tier!r} could not be built: {type(error).__name__}; the server's log has the traceback"
            )
            session.send(error_reply(request.rid, PluginError(reason)))
        else:
            session.send(m.Done(request.rid))


def _raising(error: BaseException) -> _Finish:
    def finish() -> None:
        raise error

    return finish


def _closing_if_refused(finish: _Finish, tier: Tier) -> _Finish:
    """Closes a tier that was built but not accepted."""

    def guarded() -> None:
        try:
            finish()
        except BaseException:
            threading.Thread(target=tier.adapter.close, name=f"tier-{tier.name}-close", daemon=True).start()
            raise

    return guarded


def _shown(settings: TierSettings) -> dict[str, Any]:
    shown: dict[str, Any] = plain(settings)
    return {**{name: value for name, value in shown.items() if name != "settings"}, **(shown["settings"] or {})}
