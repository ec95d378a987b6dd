"""The first pass: the tiers, their order, and the component chosen in each place."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lmcache_core.errors import SettingsError
from lmcache_core.plugins.suggest import suggestion
from lmcache_core.settings.concrete import Choices, TierChoice
from lmcache_core.settings.model import Settings, check_tier_name
from lmcache_core.settings.sources import Leaf, Origin, SettingPath, Source, dotted, spelled

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
        tables=_tables(sources, tables),
        subscribers=_rows(sources, "subscribers"),
        operations=_rows(sources, "operations"),
    )


def _tables(sources: Sequence[Source], known: Collection[str]) -> tuple[str, ...]:
    named = set()
    for source in sources:
        for path, leaf in source.leaves.items():
            if path[0] in known and path[0] not in Settings.model_fields:
                if len(path) == 1 and leaf.value != {}:
                    raise SettingsError(
                        f"{path[0]} ({leaf.where}) is a table", cure=f"write [{path[0]}] and its settings"
                    )
                named.add(path[0])
    return tuple(sorted(named))


def _rows(sources: Sequence[Source], table: str) -> tuple[str, ...]:
    """The names of the tables within `table`."""
    named: dict[str, None] = {}
    for source in reversed(sources):  # in the order of the file, then what stronger origins add
        for path, leaf in source.leaves.items():
            if path[0] == table and len(path) > 1:
                if len(path) == 2 and leaf.value != {}:
                    where = f"{dotted(path)} ({leaf.where})"
                    raise SettingsError(f"{where} is a table", cure=f"write [{dotted(path)}] and its settings")
                named[path[1]] = None
    return tuple(named)


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
        value = _json(leaf, at) if leaf.text and str(leaf.value).lstrip().startswith("{") else leaf.value
        if isinstance(value, Mapping):
            value = value.get("type")
        if value is not None and not isinstance(value, str):
            raise SettingsError(f"{dotted(at)} ({leaf.where}) is {value!r}", cure="give a name")
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
            f"{dotted(path)} ({leaf.where}): {value!r} does not name a serde", cure="give a name or a table with type"
        )
    return name


def _listed(leaf: Leaf, path: SettingPath) -> Sequence[Any]:
    value = leaf.value
    if leaf.text:
        value = (
            _json(leaf, path)
            if value.lstrip().startswith("[")
            else [part.strip() for part in value.split(",") if part.strip()]
        )
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SettingsError(f"{dotted(path)} ({leaf.where}) is not a list", cure='write ["…", "…"]')
    return value


def _json(leaf: Leaf, path: SettingPath) -> Any:
    try:
        return json.loads(leaf.value)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{dotted(path)} ({leaf.where}) looks like JSON and cannot be parsed: {error.msg} at character {error.pos}"
        ) from None


def _ordered_tiers(sources: Sequence[Source]) -> list[str]:
    named = {source.origin: _tiers_of(source) for source in sources}
    stable = [name for origin in (Origin.FILE, Origin.GIVEN, Origin.FLAG) for name in named.get(origin, [])]
    known = list(dict.fromkeys([*stable, *named.get(Origin.ENVIRONMENT, [])]))
    for name in known:
        check_tier_name(name)
    order = _order(sources)
    if order is not None:
        _check_order(order, known)
        return list(order)
    loose = [name for name in known if name not in stable]
    if len(loose) > 1:
        raise SettingsError(
            f"the tiers {' and '.join(loose)} are configured only by environment variables, which have no order",
            cure=f"set {spelled(('l2_order',), Origin.ENVIRONMENT)}={','.join(known)}",
        )
    return known


def _tiers_of(source: Source) -> list[str]:
    names = []
    for path, leaf in source.leaves.items():
        if path[0] != "l2" or len(path) < 2:
            continue
        if len(path) == 2 and leaf.value != {}:
            raise SettingsError(
                f"{dotted(path)} ({leaf.where}) is a table", cure=f"set {dotted(path)}.type and its settings"
            )
        names.append(path[1])
    return list(dict.fromkeys(names))


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
