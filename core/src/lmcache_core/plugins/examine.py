"""Checks a plugin before it is accepted. Every refusal is a PluginError that says why, but not which plugin."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pluggy

from lmcache_core.errors import PluginError
from lmcache_core.plugins import hookspecs
from lmcache_core.plugins.components import API_GENERATION, ComponentSpec, Kind, PluginInfo
from lmcache_core.plugins.suggest import suggestion

PREFIX = "lmcache_"
COMPONENT_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_WRAPPERS = ("wrapper", "hookwrapper")


class Examined(NamedTuple):
    """What a plugin says about itself, checked."""

    info: PluginInfo
    components: tuple[ComponentSpec, ...]


def examine(manager: pluggy.PluginManager, plugin: object) -> Examined:
    """Check the plugin's API generation, then names and signatures of its hooks, then its components."""
    _check_generation(manager, plugin)  # first: another generation may have other hooks, which would look like typos
    hooks = dict(_hooks_of(manager, plugin))
    return Examined(_info(hooks.get("lmcache_plugin_info")), _components(hooks.get("lmcache_components")))


def _check_generation(manager: pluggy.PluginManager, plugin: object) -> None:
    name = "lmcache_plugin_info"
    method = getattr(plugin, name, None)
    if not inspect.isroutine(method) or manager.parse_hookimpl_opts(plugin, name) is None:
        return
    if inspect.signature(method).parameters:  # refused with a message when its arguments are checked
        return
    info = _info(method)
    if info.api != API_GENERATION:
        raise PluginError(
            f"it was written for API generation {info.api} and this lmcache-core serves {API_GENERATION}: "
            f"{'upgrade lmcache-core' if info.api > API_GENERATION else 'upgrade the plugin'}"
        )


def hook_names() -> list[str]:
    """The names of all hooks."""
    return sorted(name for name in vars(hookspecs) if name.startswith(PREFIX))


def _hooks_of(manager: pluggy.PluginManager, plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    known = hook_names()
    for name in dir(plugin):
        method = getattr(plugin, name, None)
        if not inspect.isroutine(method):
            continue
        marks = manager.parse_hookimpl_opts(plugin, name)
        if marks is None:
            if name in known and method is not getattr(hookspecs, name):
                raise PluginError(f"its function {name} is not marked: put @hookimpl above it")
            continue
        hook = marks.get("specname") or name
        if hook not in known:
            raise PluginError(f"it implements {hook}, but there is no such hook{suggestion(hook, known)}")
        if any(marks.get(kind) for kind in _WRAPPERS):
            raise PluginError(f"its {name} wraps the hook: plugins add to a hook, they do not wrap each other")
        _check_arguments(hook, method)
        yield hook, method


def _check_arguments(hook: str, method: Callable[..., Any]) -> None:
    allowed = inspect.signature(getattr(hookspecs, hook)).parameters
    for name, parameter in inspect.signature(method).parameters.items():
        if name not in allowed:
            offered = ", ".join(allowed) or "none"
            raise PluginError(f"its {hook} has the argument {name!r}, but the hook passes {offered}")
        if parameter.default is not parameter.empty:
            raise PluginError(
                f"its {hook} has a default for {name!r}, to which pluggy passes nothing: remove the default"
            )


def _info(hook: Callable[..., Any] | None) -> PluginInfo:
    info = hook() if hook is not None else None
    if info is None:
        return PluginInfo()
    if not isinstance(info, PluginInfo):
        raise PluginError(f"its lmcache_plugin_info returned a {type(info).__name__}: return a PluginInfo or None")
    return info


def _components(hook: Callable[..., Any] | None) -> tuple[ComponentSpec, ...]:
    offered = hook() if hook is not None else None
    if offered is None:
        return ()
    if not isinstance(offered, Sequence) or not all(isinstance(spec, ComponentSpec) for spec in offered):
        raise PluginError("its lmcache_components must return a sequence of ComponentSpec")
    seen: set[tuple[Kind, str]] = set()
    for spec in offered:
        _check_spec(spec)
        if (spec.kind, spec.name) in seen:
            raise PluginError(f"it offers {spec.kind} {spec.name!r} twice")
        seen.add((spec.kind, spec.name))
    return tuple(offered)


def _check_spec(spec: ComponentSpec) -> None:
    if not isinstance(spec.kind, Kind):
        raise PluginError(f"its component {spec.name!r} has the unknown kind {spec.kind!r}: use lmcache_core.Kind")
    if not COMPONENT_NAME.fullmatch(spec.name):
        raise PluginError(
            f"its {spec.kind} is named {spec.name!r}: names are lower-case words joined by single underscores"
        )
    for role, path in (("factory", spec.factory), ("settings", spec.settings)):
        if path is not None and not _IMPORT_PATH.fullmatch(path):
            raise PluginError(f"the {role} {path!r} of its {spec.kind} {spec.name!r} is not 'module:attribute'")
