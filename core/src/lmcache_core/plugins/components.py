"""What a plugin offers: components by kind and name, named by import path so that nothing heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

API_GENERATION = 1  # moves when a hook or a contract changes in a way that breaks plugins


class Kind(StrEnum):
    """The families of components."""

    L2_ADAPTER = "l2_adapter"
    EVICTION_POLICY = "eviction_policy"
    STORE_POLICY = "store_policy"
    PREFETCH_POLICY = "prefetch_policy"
    SERDE = "serde"
    EVENT_SUBSCRIBER = "event_subscriber"  # hears what happens; its settings are the table `[subscribers.NAME]`
    HELPER = "helper"  # a process beside the server; its settings are the table `[NAME]`
    COMPANION = "companion"  # beside the L1; its settings are the table `[NAME]`


@dataclass(frozen=True)
class ComponentSpec:
    """One component. `factory` and `settings` are `module:attribute` paths, imported when first used.

    `factory` is called as `factory(settings, context)` for an adapter, an event subscriber, a helper and a companion,
    and as `factory(settings)` for everything else; `settings` names a frozen pydantic model that forbids extra fields
    (None: the component has none and is called with None).
    """

    kind: Kind
    name: str
    factory: str
    settings: str | None = None
    summary: str = ""


@dataclass(frozen=True)
class PluginInfo:
    """What a plugin says of itself. `api` is the generation of hooks and contracts that it was written for."""

    api: int = API_GENERATION
    summary: str = ""


@dataclass(frozen=True)
class Finding:
    """One result of `lmcache_check`: what was looked at, whether it is well, and the cure where it is not."""

    ok: bool
    subject: str
    message: str
    cure: str = ""
