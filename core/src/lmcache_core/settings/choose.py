"""The first pass: the tiers, their order, and the component chosen in each place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lmcache_core.errors import SettingsError
from lmcache_core.plugins.suggest import suggestion
from lmcache_core.settings.concrete import Choices, TierChoice
from lmcache_core.settings.model import Component, Settings, check_tier_name
from lmcache_core.settings.schema import read_text
from lmcache_core.settings.sources import Leaf, Origin, SettingPath, Source, dotted, spelled

L2: SettingPath = ("l2",)
L1_EVICTION: SettingPath = ("l1", "eviction")
STORE_POLICY: SettingPath = ("store_policy",)
PREFETCH_POLICY: SettingPath = ("prefetch_policy",)
NONE = "none"


def choose(sources: Sequence[Source], tables: Collection[str] = ()) -> Choices:
    """`sources`: strongest first. `tables`: names of companions and helpers; a table with such a name enables it.
    Raises SettingsError for tiers without a type or without an order."""
    tiers = {}
    for name in _ordered_tiers(sources):
        path = ("l2", name)
        adapter = _strongest(sources, path)
        if adapter is None:
            raise SettingsError(f"the tier {name!r} has no type", cure=f"set l2.{name}.type to the name of an adapter")
        eviction = _strongest(sources, (*path, "eviction")) or "lru"
        tiers[name] = TierChoice(adapter, None if eviction == NONE else eviction, _chain(sources, (*path, "serde")))
    return Choices(
        eviction=_strongest(sources, L1_EVICTION) or "lru",
        store_policy=_strongest(sources, STORE_POLICY) or "default",
        prefetch_policy=_strongest(sources, PREFETCH_POLICY) or "default",
        tiers=tiers,
        tables=tuple(sorted(_tables_in(sources, (), set(tables) - Settings.model_fields.keys()))),
        # in the order of the file, then what stronger origins add
        subscribers=tuple(_tables_in(reversed(sources), ("subscribers",))),
        operations=tuple(_tables_in(reversed(sources), ("operations",))),
    )


def _tables_in(sources: Iterable[Source], above: SettingPath, known: Collection[str] | None = None) -> list[str]:
    """The names of the tables in the table `above`: all, or those of `known`."""
    named: dict[str, None] = {}
    for source in sources:
        for path, leaf in source.leaves.items():
            at = path[: len(above) + 1]
            if at[:-1] != above or (known is not None and at[-1] not in known):
                continue
            if at == path and leaf.value not in ({}, None):
                cure = (
                    f"set {dotted(at)}.type and its settings"
                    if above == L2
                    else f"write [{dotted(at)}] and its settings"
                )
                raise SettingsError(f"{dotted(at)} ({leaf.where}) is a table", cure=cure)
            named[at[-1]] = None
    return list(named)


def component_paths(choices: Choices) -> Iterator[SettingPath]:
    """The path of each setting that names a single policy."""
    yield from (L1_EVICTION, STORE_POLICY, PREFETCH_POLICY)
    for name in choices.tiers:
        yield ("l2", name, "eviction")


def stated_type(source: Source, path: SettingPath) -> str | None:
    """The component that a source names at `path`, by a bare name, by `type`, or in JSON; None if it names none."""
    for at in (path, (*path, "type")):
        leaf = source.leaves.get(at)
        if leaf is None:
            continue
        value = _read(Component, leaf, at)
        if isinstance(value, Mapping):
            value = value.get("type")
        if value is not None and not isinstance(value, str):
            raise SettingsError(f"{dotted(at)} ({leaf.where}) is {_kind_of(value)}", cure="give a name")
        if value is not None:
            return value
    return None


def _strongest(sources: Sequence[Source], path: SettingPath) -> str | None:
    return next((found for source in sources if (found := stated_type(source, path)) is not None), None)


def _chain(sources: Sequence[Source], path: SettingPath) -> tuple[str, ...]:
    for source in sources:
        leaf = source.leaves.get(path)
        if leaf is not None:
            return tuple(_link(each, leaf, path) for each in _listed(leaf, path))
    return ()


def _link(value: Any, leaf: Leaf, path: SettingPath) -> str:
    name = value.get("type") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        raise SettingsError(
            f"{dotted(path)} ({leaf.where}): {_kind_of(value)} does not name a serde",
            cure="give a name or a table with type",
        )
    return name


def _kind_of(value: Any) -> str:
    """What a value is, without itself: it may be a secret, or contain one."""
    if isinstance(value, Mapping):
        return f"a table of {', '.join(sorted(map(str, value))) or 'nothing'}"
    return f"a {type(value).__name__}"


def _listed(leaf: Leaf, path: SettingPath) -> Sequence[Any]:
    value = _read(tuple[str, ...], leaf, path)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SettingsError(f"{dotted(path)} ({leaf.where}) is not a list", cure='write ["…", "…"]')
    return value


def _read(annotation: Any, leaf: Leaf, path: SettingPath) -> Any:
    if not leaf.text:
        return leaf.value
    try:
        return read_text(annotation, leaf.value)
    except ValueError as error:
        raise SettingsError(f"{dotted(path)} ({leaf.where}): {error}") from None


def _ordered_tiers(sources: Sequence[Source]) -> list[str]:
    ordered = (Origin.FILE, Origin.GIVEN, Origin.ENV_FILE, Origin.FLAG)
    stable = _tables_in([source for origin in ordered for source in sources if source.origin is origin], L2)
    known = list(dict.fromkeys([*stable, *_tables_in(sources, L2)]))
    for name in known:
        check_tier_name(name)
    order = _order(sources)
    if order is not None:
        _check_order(order, known)
        return list(order)
    loose = [name for name in known if name not in stable]
    if len(loose) > 1:
        named = f"the tiers {' and '.join(loose)}"
        raise SettingsError(
            f"{named} are configured only by environment variables or secrets, which have no order",
            cure=f"set {spelled(('l2_order',), Origin.ENVIRONMENT)}={','.join(known)}",
        )
    return known


def _order(sources: Sequence[Source]) -> Sequence[str] | None:
    for source in sources:
        leaf = source.leaves.get(("l2_order",))
        if leaf is not None:
            return [str(each) for each in _listed(leaf, ("l2_order",))] or None
    return None


def _check_order(order: Sequence[str], known: Sequence[str]) -> None:
    for name in order:
        if name not in known:
            raise SettingsError(
                f"l2_order names the tier {name!r}, which is not configured",
                cure=suggestion(name, known).removeprefix(": ") or f"remove it, or set l2.{name}.type",
            )
    if len(set(order)) != len(order):
        raise SettingsError(f"l2_order names a tier twice: {', '.join(order)}", cure="name each once")
    absent = [name for name in known if name not in order]
    if absent:
        raise SettingsError(f"l2_order leaves out the tier {absent[0]!r}", cure="name every tier, or remove l2_order")
