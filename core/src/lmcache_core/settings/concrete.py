"""The second pass: the model of one configuration, with the settings models of the components it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WrapSerializer, create_model
from typing_extensions import TypedDict

from lmcache_core.limits import SETTINGS_MODELS_MAX
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.model import Component, L1Settings, Section, Settings, TierSettings

# A class stands in cycles, and a server collects none that have lived long: each change of a tier would cost 100 KB.
kept = lru_cache(SETTINGS_MODELS_MAX)


@dataclass(frozen=True)
class TierChoice:
    """What the first pass found for one tier."""

    type: str
    eviction: str | None
    serde: tuple[str, ...]


@dataclass(frozen=True)
class Choices:
    """What the first pass found: every component by name, and the tiers in order."""

    eviction: str
    store_policy: str
    prefetch_policy: str
    tiers: Mapping[str, TierChoice]
    tables: tuple[str, ...] = ()  # of companions, helpers and tracers
    subscribers: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(repr(self))  # the order of the tiers counts


@dataclass(frozen=True)
class Concrete:
    """The model of one configuration, and those of its tiers, event subscribers and operations by name."""

    model: type[Settings]
    tiers: Mapping[str, type[TierSettings]]
    rows: Mapping[str, Mapping[str, type[BaseModel]]]  # of `subscribers` and `operations`


@kept
def concrete_model(registry: Registry, choices: Choices) -> Concrete:
    """Raises PluginError if a named component is not installed, or its settings model is broken."""
    tiers = {name: _tier(registry, choice) for name, choice in choices.tiers.items()}
    eviction = component_model(registry, Kind.EVICTION_POLICY, choices.eviction)
    l1 = create_model("L1Settings", __base__=L1Settings, eviction=_chosen(L1Settings, "eviction", eviction))
    fields: dict[str, Any] = {
        "l1": (l1, Field(default={})),
        "store_policy": _chosen(
            Settings, "store_policy", component_model(registry, Kind.STORE_POLICY, choices.store_policy)
        ),
        "prefetch_policy": _chosen(
            Settings, "prefetch_policy", component_model(registry, Kind.PREFETCH_POLICY, choices.prefetch_policy)
        ),
        "l2": (_table_of(tiers), Field(default={}, description=_description(Settings, "l2"))),
    }
    rows: dict[str, dict[str, type[BaseModel]]] = {}
    for table, kind, names in (
        ("subscribers", Kind.EVENT_SUBSCRIBER, choices.subscribers),
        ("operations", Kind.OPERATION, choices.operations),
    ):
        rows[table] = {name: registry.settings_model(kind, name) or Section for name in names}
        fields[table] = (_table_of(rows[table]), Field(default={}, description=_description(Settings, table)))
    tabled: dict[Kind, tuple[str, ...]] = {}
    for kind in (Kind.HELPER, Kind.TRACER, Kind.COMPANION):
        tabled[kind] = tuple(name for name in choices.tables if name in registry.nameable(kind) and name not in fields)
        for name in tabled[kind]:
            fields[name] = (registry.settings_model(kind, name) or Section, Field(default={}))
    model = create_model("Settings", __base__=Settings, **fields)
    model.companion_names, model.helper_names = tabled[Kind.COMPANION], tabled[Kind.HELPER]
    model.tracer_names = tabled[Kind.TRACER]
    return Concrete(model, tiers, rows)


@kept
def component_model(registry: Registry, kind: Kind, name: str) -> type[Component]:
    """The table of one policy or serde."""
    own = registry.settings_model(kind, name)
    fields: dict[str, Any] = {"type": (Literal[name], Field(default=name))}
    fields["settings"] = (NoneType, None) if own is None else (own, Field())
    return create_model(name, __base__=Component, **fields)


@kept
def _tier(registry: Registry, choice: TierChoice) -> type[TierSettings]:
    own = registry.settings_model(Kind.L2_ADAPTER, choice.type)
    fields: dict[str, Any] = {
        "type": (Literal[choice.type], Field(description=_description(TierSettings, "type"))),
        "settings": (NoneType, None) if own is None else (own, Field()),
    }
    if choice.eviction is not None:
        eviction = component_model(registry, Kind.EVICTION_POLICY, choice.eviction)
        fields["eviction"] = _chosen(TierSettings, "eviction", eviction | None)
    if choice.serde:
        links = tuple(component_model(registry, Kind.SERDE, each) for each in choice.serde)
        fields["serde"] = (tuple[links], Field(description=_description(TierSettings, "serde")))  # type: ignore[valid-type]  # made here
    return create_model(choice.type, __base__=TierSettings, **fields)


def _chosen(base: type[BaseModel], name: str, annotation: Any) -> Any:
    return annotation, Field(default={}, description=_description(base, name))


def _description(base: type[BaseModel], name: str) -> str | None:
    return base.model_fields[name].description


def _table_of(rows: Mapping[str, type[BaseModel]]) -> Any:
    table: Any = TypedDict("Table", dict(rows))  # type: ignore[misc]  # its fields are known only now
    setattr(table, "__pydantic_config__", ConfigDict(extra="forbid"))  # noqa: B010  # unknown to type checkers
    return Annotated[
        table, AfterValidator(MappingProxyType), WrapSerializer(lambda rows, serialize: serialize(dict(rows)))
    ]
