"""What a plugin offers: components by kind and name, named by import path so that nothing heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.errors import CacheError
    from lmcache_core.protocol.hostport import HostPort

__all__ = [
    "API_GENERATION",
    "ComponentSpec",
    "Finding",
    "Kind",
    "PluginInfo",
]

API_GENERATION = 1
"""The version of hooks and contracts. It changes when one of them changes in a way that breaks plugins."""


class Kind(StrEnum):
    """The families of components.

    Attributes:
        L2_ADAPTER: Speaks to a medium; `[l2.NAME] type`.
        EVICTION_POLICY: Which objects go first; `[l1.eviction]`, `[l2.NAME.eviction]`.
        STORE_POLICY: Which tiers get each committed object; `[store_policy]`.
        PREFETCH_POLICY: Which tier loads objects that the L1 does not have; `[prefetch_policy]`.
        SERDE: Bytes to bytes on the way to a tier; `l2.NAME.serde`.
        EVENT_SUBSCRIBER: Gets the server's events; its settings are the table `[subscribers.NAME]`.
        OPERATION: Its own request type; its settings are the table `[operations.NAME]`.
        HELPER: A process beside the server; its settings are the table `[NAME]`.
        TRACER: Follows single requests; its settings are the table `[NAME]`.
        COMPANION: Lives beside the L1; its settings are the table `[NAME]`.
    """

    L2_ADAPTER = "l2_adapter"
    EVICTION_POLICY = "eviction_policy"
    STORE_POLICY = "store_policy"
    PREFETCH_POLICY = "prefetch_policy"
    SERDE = "serde"
    EVENT_SUBSCRIBER = "event_subscriber"
    OPERATION = "operation"
    HELPER = "helper"
    TRACER = "tracer"
    COMPANION = "companion"


@dataclass(frozen=True)
class ComponentSpec:
    """One component, named but not imported.

    Attributes:
        kind: Its family.
        name: What users write: lower-case words joined by single underscores.
        factory: `module:attribute`, imported on first use. Called as `factory(settings, context)` for an adapter, an
            event subscriber, an operation, a helper, a tracer or a companion, and as `factory(settings)` for
            everything else.
        settings: `module:attribute` of a frozen pydantic model that forbids extra fields. None: the component has none,
            and is called with None. In `Settings` an instance of it is `settings.l2[name].settings` for a tier, and
            `.settings` of the table that names a policy or serde.
        summary: A line for `lmcache-core plugins`.
        always: An operation that every server has which has the package, with the defaults of its settings where no
            table is written.
    """

    kind: Kind
    name: str
    factory: str
    settings: str | None = None
    summary: str = ""
    always: bool = False


@dataclass(frozen=True)
class PluginInfo:
    """What a plugin says about itself, in the hook `lmcache_plugin_info`.

    Attributes:
        api: The generation of hooks and contracts that it was written for, as a literal number: a plugin that returns
            `API_GENERATION` itself claims to fit every future version.
        summary: A line about it.
    """

    api: int = API_GENERATION
    summary: str = ""


@dataclass(frozen=True)
class Finding:
    """One line of what `lmcache-core check` prints: a result of an adapter's `check`, and of the hook `lmcache_check`.

    Attributes:
        ok: Whether all is well. A finding that is not ok makes the command exit with status 1.
        subject: What was checked, for example `tier 'cold' (s3://kv)`. Empty, from an adapter: its tier.
        message: What was found.
        cure: What an operator should do if it is not ok. A finding that is ok and has a cure is worth a look.
    """

    ok: bool
    subject: str
    message: str
    cure: str = ""

    @classmethod
    def of_error(cls, subject: str, error: CacheError, otherwise: str) -> Finding:
        """A finding that is not ok. The cure is the error's own, removed from its message; `otherwise` if it has
        none."""
        return cls(False, subject, error.happened, error.cure or otherwise)

    @classmethod
    def of_port(cls, subject: str, at: HostPort, setting: str) -> Finding:
        """Whether a server can listen there. `setting` names the address, or its port."""
        why = at.why_taken()
        if not why:
            return cls(True, subject, f"it can listen at {at}")
        cure = f"set {setting} to a free port, or stop what listens there (`ss -ltnp` names it)"
        return cls(False, subject, f"it cannot listen at {at}: {why}", cure)
