"""Loads installed plugins. A broken plugin is recorded and the rest still load; pluggy's own loader does neither.

Order: find, apply the allow-list, refuse names with two claimants, import, examine, refuse components with two
claimants, register. Nothing depends on the order in which the file system lists files.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from lmcache_core.errors import PluginError
from lmcache_core.guard import guarded
from lmcache_core.plugins import builtin
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.discovery import (
    ALLOW_LIST,
    Candidate,
    allowed_distributions,
    canonical,
    find_candidates,
)
from lmcache_core.plugins.error_text import error_text
from lmcache_core.plugins.examine import Examined, examine
from lmcache_core.plugins.hookspecs import PROJECT
from lmcache_core.plugins.patience import patience
from lmcache_core.plugins.records import PluginRecord, Refusal
from lmcache_core.plugins.registry import Registry
from lmcache_core.plugins.requirement import allows

__all__ = [
    "load_plugins",
]

BUILTIN = "builtin"
Loaded = tuple[Candidate, object, Examined, float]


def load_plugins(environ: Mapping[str, str] = os.environ) -> Registry:
    """The registry of built-ins and of all valid and allowed plugins that are installed. Never raises for a plugin's
    fault: refusals are in `registry.refused`, and are fatal only if the settings name a refused component."""
    from lmcache_core import __version__

    registry = Registry()
    registry.register(builtin, BUILTIN, distribution="lmcache-core", version=__version__)
    candidates = _without_shared_names(registry, _allowed(registry, find_candidates(), environ))
    loaded = [one for candidate in candidates if (one := _load(registry, candidate)) is not None]
    for candidate, plugin, examined, load_s in _without_shared_components(registry, loaded):
        record = PluginRecord(
            candidate.name, candidate.distribution, candidate.version, examined.info, examined.components, load_s
        )
        registry.admit(plugin, record)
    return registry


def _allowed(registry: Registry, candidates: Iterable[Candidate], environ: Mapping[str, str]) -> list[Candidate]:
    candidates = list(candidates)
    allowed = allowed_distributions(environ)
    if allowed is None:
        return candidates
    for absent in sorted(allowed - {canonical(candidate.distribution) for candidate in candidates}):
        why = f"{ALLOW_LIST} names it, but no installed distribution of that name has a plugin: pip install {absent}"
        registry.refuse(Refusal("-", absent, "not installed", why))
    for candidate in candidates:
        if canonical(candidate.distribution) not in allowed:
            why = f"{ALLOW_LIST} leaves it out: add {candidate.distribution} to allow it"
            registry.refuse(Refusal(candidate.name, candidate.distribution, candidate.version, why, chosen=True))
    return [candidate for candidate in candidates if canonical(candidate.distribution) in allowed]


def _without_shared_names(registry: Registry, candidates: Iterable[Candidate]) -> list[Candidate]:
    by_name: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_name[candidate.name].append(candidate)
    kept = []
    for name, claimants in by_name.items():
        if name == BUILTIN:
            for candidate in claimants:
                _refuse(registry, candidate, f"the plugin name {BUILTIN!r} is reserved: rename the entry point")
        elif len(claimants) > 1:
            for candidate in claimants:
                _refuse(registry, candidate, _claimed_by(claimants, f"the plugin name {name!r}"))
        else:
            kept.append(claimants[0])
    return kept


def _without_shared_components(registry: Registry, loaded: Iterable[Loaded]) -> list[Loaded]:
    claims: dict[tuple[Kind, str], list[Candidate]] = defaultdict(list)
    loaded = list(loaded)
    for candidate, _, examined, _ in loaded:
        for spec in examined.components:
            claims[spec.kind, spec.name].append(candidate)
    kept = []
    for one in loaded:
        candidate, _, examined, _ = one
        why = ""
        for spec in examined.components:
            claimants = claims[spec.kind, spec.name]
            if registry.offers(spec.kind, spec.name):
                why = f"{spec.kind} {spec.name!r} is built in, and built-in names are reserved: rename it"
            elif len(claimants) > 1:
                why = _claimed_by(claimants, f"{spec.kind} {spec.name!r}")
        if why:
            _refuse(registry, candidate, why, examined.components)
        else:
            kept.append(one)
    return kept


def _claimed_by(claimants: Iterable[Candidate], what: str) -> str:
    who = " and ".join(f"{each.distribution} {each.version} (plugin {each.name})" for each in claimants)
    return (
        f"{what} is claimed by {who}: uninstall one of them, "
        f"or set {ALLOW_LIST} to the distributions you want, separated by commas"
    )


def _load(registry: Registry, candidate: Candidate) -> Loaded | None:
    def load() -> Loaded:
        began = time.perf_counter()
        who = f"{candidate.name} ({candidate.distribution} {candidate.version})"
        _check_wanted(candidate)
        with patience(who, "its import"):
            plugin = importlib.metadata.EntryPoint(candidate.name, candidate.target, PROJECT).load()
        load_s = time.perf_counter() - began
        with patience(who, "lmcache_plugin_info or lmcache_components"):
            return candidate, plugin, examine(registry.manager, plugin), load_s

    def refuse(error: BaseException) -> None:
        failed = f"it failed to load with {error_text(error)}{_wanted(candidate, error)}"
        _refuse(registry, candidate, str(error) if isinstance(error, PluginError) else failed)

    return guarded(refuse, load)


def _check_wanted(candidate: Candidate) -> None:
    """Refuse a plugin that was made for another lmcache-core, before any of its code runs."""
    from lmcache_core import __version__

    for wanted in candidate.wanted:
        if not allows(wanted, __version__):
            raise PluginError(f"it asks for {wanted}, and this is {__version__}: install matching versions")


def _wanted(candidate: Candidate, error: BaseException) -> str:
    """If it lacks one of our names: which lmcache-core it was made for."""
    if not isinstance(error, ImportError) or not (error.name or "").startswith(PROJECT):
        return ""
    from lmcache_core import __version__

    wants = f"it asks for {candidate.wanted[0]}" if candidate.wanted else "it does not say which lmcache-core it needs"
    return f"; {wants}, and this is {__version__}: install matching versions"


def _refuse(registry: Registry, candidate: Candidate, why: str, claims: tuple[ComponentSpec, ...] = ()) -> None:
    registry.refuse(Refusal(candidate.name, candidate.distribution, candidate.version, why, claims))
