"""What a server can be built from: components by kind and name, and the hooks of the plugins in use."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import pluggy

from lmcache_core.errors import CacheError, PluginError
from lmcache_core.guard import guarded
from lmcache_core.limits import COMPONENT_IMPORT_S
from lmcache_core.plugins import hookspecs
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.error_text import error_text
from lmcache_core.plugins.examine import examine, hook_names
from lmcache_core.plugins.patience import patience
from lmcache_core.plugins.records import PluginFault, PluginRecord, Refusal
from lmcache_core.plugins.suggest import install_command, suggestion

if TYPE_CHECKING:
    from pydantic import BaseModel

log = logging.getLogger(__name__)

# A tier is one table that also contains its adapter's settings, so these names are reserved.
TIER_FIELDS = frozenset(
    {
        "agreement_min",
        "capacity_bytes",
        "connections",
        "deadline_s",
        "divergence_max",
        "evict_ratio",
        "eviction",
        "locality",
        "require_certificate",
        "rescan_s",
        "store_cpu_share",
        "store_io",
        "serde",
        "settings",
        "type",
        "watermark",
        "wrap",
    }
)
_RESERVED_FIELDS: dict[Kind, frozenset[str]] = {Kind.L2_ADAPTER: TIER_FIELDS}
_RESERVED_FIELDS_ELSEWHERE = frozenset({"type", "settings"})
_WITH_CONTEXT = (Kind.L2_ADAPTER, Kind.COMPANION, Kind.EVENT_SUBSCRIBER, Kind.HELPER, Kind.OPERATION, Kind.TRACER)

# The packages of components from the same family, for the error that says what to install.
KNOWN_HOMES: dict[tuple[Kind, str], str] = {
    (Kind.L2_ADAPTER, "block"): "lmcache-block",
    (Kind.L2_ADAPTER, "mooncake"): "lmcache-mooncake",
    (Kind.L2_ADAPTER, "fs"): "lmcache-fs",
    (Kind.L2_ADAPTER, "s3"): "lmcache-s3",
    (Kind.L2_ADAPTER, "redis"): "lmcache-redis",
    (Kind.L2_ADAPTER, "peer"): "lmcache-peer",
    (Kind.L2_ADAPTER, "mock"): "lmcache-mock",
    (Kind.SERDE, "fp8"): "lmcache-fp8",
    **{(Kind.SERDE, name): "lmcache-quant" for name in ("int8", "k8v4", "int4")},
    **{(Kind.SERDE, name): "lmcache-compress" for name in ("zstd", "lz4", "planes")},
    (Kind.SERDE, "aesgcm"): "lmcache-crypto",
    **{
        (Kind.EVICTION_POLICY, name): "lmcache-policies"
        for name in ("fifo", "lfu", "mru", "arc", "s3fifo", "lruk", "adaptive", "isolated")
    },
    (Kind.COMPANION, "l0"): "lmcache-l0",
    (Kind.EVENT_SUBSCRIBER, "kv_events"): "lmcache-kv-events",
    (Kind.HELPER, "copier"): "lmcache-copier",
    (Kind.HELPER, "http"): "lmcache-http",
    (Kind.OPERATION, "record"): "lmcache-lab",
    (Kind.OPERATION, "blend"): "lmcache-blend",
    (Kind.TRACER, "otel"): "lmcache-otel",
    **{(Kind.STORE_POLICY, name): "lmcache-policies" for name in ("size_aware", "wear_aware")},
}
# What people call a medium, and the adapter for it.
_ALSO_CALLED = {
    **{(Kind.L2_ADAPTER, word): "fs" for word in ("disk", "file", "filesystem", "nvme", "ssd", "nfs")},
    **{(Kind.L2_ADAPTER, word): "s3" for word in ("aws", "minio", "object")},
    (Kind.L2_ADAPTER, "valkey"): "redis",
}


class Registry:
    """Filled by `load_plugins`; closed when the server starts."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.hook = HookRelay(self)
        self.refused: list[Refusal] = []
        self.faults: list[PluginFault] = []
        self._plugins: dict[str, PluginRecord] = {}
        self._components: dict[tuple[Kind, str], tuple[ComponentSpec, PluginRecord]] = {}
        self._models: dict[tuple[Kind, str], type[BaseModel] | None] = {}
        self._closed = False

    # --- filling --------------------------------------------------------------------------------------------

    def register(self, plugin: object, name: str, *, distribution: str = "-", version: str = "-") -> PluginRecord:
        """Add a plugin object of the caller's. Raises PluginError if the loader would refuse it."""
        try:
            examined = examine(self.manager, plugin)
        except PluginError as error:
            raise PluginError(f"plugin {name} ({distribution} {version}) is refused: {error}") from error
        record = PluginRecord(name, distribution, version, examined.info, examined.components)
        self.admit(plugin, record)
        return record

    def admit(self, plugin: object, record: PluginRecord) -> None:
        """Add an examined plugin and its components. The names must be free."""
        if self._closed:
            raise PluginError(f"plugin {record} comes too late: registration closed when the server started")
        if record.name in self._plugins:
            raise PluginError(f"plugin {record} is refused: the name is taken by {self._plugins[record.name]}")
        for spec in record.components:
            if self.offers(spec.kind, spec.name):
                owner = self._components[spec.kind, spec.name][1]
                raise PluginError(f"plugin {record} is refused: {owner} has the {spec.kind} {spec.name!r}")
        self.manager.register(plugin, record.name)
        self._plugins[record.name] = record
        for spec in record.components:
            self._components[spec.kind, spec.name] = (spec, record)

    def refuse(self, refusal: Refusal) -> None:
        """Record a refused plugin."""
        self.refused.append(refusal)

    def close(self) -> None:
        """Refuse further plugins. Idempotent."""
        self._closed = True

    # --- asking ---------------------------------------------------------------------------------------------

    @property
    def plugins(self) -> list[PluginRecord]:
        """The plugins in use: built-ins first, then by name."""
        return list(self._plugins.values())

    def components(self, kind: Kind) -> list[ComponentSpec]:
        """The components of a kind, by name."""
        return [spec for (each, _), (spec, _) in sorted(self._components.items()) if each is kind]

    def nameable(self, kind: Kind) -> frozenset[str]:
        """Names that settings may use: installed ones, refused ones, and ones known to be in other packages, so that
        the error for these says what to install."""
        there = {name for each, name in self._components if each is kind}
        refused = {claim.name for refusal in self.refused for claim in refusal.claims if claim.kind is kind}
        return frozenset(there | refused | {name for each, name in KNOWN_HOMES if each is kind})

    @property
    def tables(self) -> frozenset[str]:
        """Names of settings tables that enable a component: companions', helpers' and tracers'."""
        return self.nameable(Kind.COMPANION) | self.nameable(Kind.HELPER) | self.nameable(Kind.TRACER)

    def offers(self, kind: Kind, name: str) -> bool:
        """Whether there is such a component."""
        return (kind, name) in self._components

    def owner(self, kind: Kind, name: str) -> PluginRecord:
        """The plugin that offers a component. Raises PluginError as `spec` does."""
        self.spec(kind, name)
        return self._components[kind, name][1]

    def spec(self, kind: Kind, name: str) -> ComponentSpec:
        """The component with that name. Raises PluginError that says why there is none, and what to do."""
        found = self._components.get((kind, name))
        if found is not None:
            return found[0]
        for refusal in self.refused:
            brings = any((claim.kind, claim.name) == (kind, name) for claim in refusal.claims)
            home = KNOWN_HOMES.get((kind, name)) == refusal.distribution
            if brings or home or refusal.name == name:
                raise PluginError(f"{kind} {name!r} cannot be used: plugin {refusal}")
        known = [spec.name for spec in self.components(kind)]
        text = f"there is no {kind} {name!r}"
        if (kind, name) in KNOWN_HOMES:
            raise PluginError(text, cure=install_command(KNOWN_HOMES[kind, name]))
        other = _ALSO_CALLED.get((kind, name), "")
        meant = f"did you mean {other!r}?" if other else suggestion(name, known).removeprefix(": ")
        cure = f"{meant} Or install the package that has it" if meant else "install the package that has it"
        raise PluginError(text, cure=f"{cure} (installed: {', '.join(known) or 'none'})")

    def settings_model(self, kind: Kind, name: str) -> type[BaseModel] | None:
        """The component's settings model, imported now; None if it has no settings.

        Raises PluginError if it cannot be imported, is not a frozen pydantic model that forbids extra fields, or has a
        field with a reserved name.
        """
        if (kind, name) not in self._models:
            spec = self.spec(kind, name)
            self._models[kind, name] = self._checked_model(spec) if spec.settings is not None else None
        return self._models[kind, name]

    def factory(self, kind: Kind, name: str) -> Any:
        """The component's class or function, imported now. Raises PluginError if it cannot be imported."""
        spec = self.spec(kind, name)
        return self._imported(spec, spec.factory)

    def build(
        self, kind: Kind, name: str, settings: BaseModel | Mapping[str, Any] | None = None, context: Any = None
    ) -> Any:
        """A new component. `settings` is an instance of its model, or values for one; `context` is the AdapterContext
        of an adapter, the CompanionContext of a companion, the SubscriberContext of an event subscriber, the
        HelperContext of a helper or the TracerContext of a tracer, and None for everything else. Raises PluginError
        that names the plugin if it cannot be built; lmcache-core's own errors pass unchanged, and so does the
        ValidationError for values that the model refuses."""
        spec = self.spec(kind, name)
        model = self.settings_model(kind, name)
        factory = self.factory(kind, name)
        if model is not None and (settings is None or isinstance(settings, Mapping)):
            settings = model.model_validate(dict(settings or {}))
        arguments = (settings, context) if kind in _WITH_CONTEXT else (settings,)

        def broken(error: BaseException) -> NoReturn:
            if isinstance(error, CacheError):
                raise error
            raise PluginError(f"{self._whose(spec)} could not be built: {error_text(error)}") from error

        return guarded(broken, factory, *arguments)

    # --- inside ---------------------------------------------------------------------------------------------

    def _whose(self, spec: ComponentSpec) -> str:
        return f"{spec.kind} {spec.name!r} of plugin {self._components[spec.kind, spec.name][1]}"

    def _imported(self, spec: ComponentSpec, path: str) -> Any:
        module, _, attribute = path.partition(":")
        who = str(self._components[spec.kind, spec.name][1])

        def find() -> Any:
            with patience(who, f"the import of {module}", COMPONENT_IMPORT_S):
                found: Any = import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
            return found

        def broken(error: BaseException) -> NoReturn:
            raise PluginError(f"{self._whose(spec)} could not be imported from {path}: {error_text(error)}") from error

        return guarded(broken, find)

    def _checked_model(self, spec: ComponentSpec) -> type[BaseModel]:
        from pydantic import BaseModel

        model = self._imported(spec, str(spec.settings))
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError(f"the settings of {self._whose(spec)} are not a pydantic model: {spec.settings}")
        if not model.model_config.get("frozen") or model.model_config.get("extra") != "forbid":
            raise PluginError(
                f"the settings model of {self._whose(spec)} must be frozen and forbid extra fields: "
                'set model_config = ConfigDict(frozen=True, extra="forbid")'
            )
        taken = sorted(_RESERVED_FIELDS.get(spec.kind, _RESERVED_FIELDS_ELSEWHERE) & set(model.model_fields))
        if taken:
            raise PluginError(
                f"the settings model of {self._whose(spec)} has a field {taken[0]!r}, which lmcache-core uses in "
                "the same table: rename it"
            )
        return model

    def _record_fault(self, record: PluginRecord, hook: str, error: BaseException) -> None:
        fault = PluginFault(record, hook, error_text(error))
        self.faults.append(fault)
        log.warning("%s", fault)

    def call(self, hook: str, plugins: Collection[str] | None = None, **arguments: Any) -> list[Any]:
        """Call a hook of each plugin separately, in order; of all plugins, or of the named ones. What a plugin raises
        is recorded in `faults` and logged, and the others are still called. None results are left out."""
        results = []
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook)
        position = {name: number for number, name in enumerate(self._plugins)}
        # Called one by one, because pluggy's own call stops at the first plugin that raises.
        for implementation in sorted(caller.get_hookimpls(), key=lambda each: position[each.plugin_name]):
            record = self._plugins[implementation.plugin_name]
            if plugins is not None and record.name not in plugins:
                continue
            fault = partial(self._record_fault, record, hook)
            results.append(guarded(fault, _called, str(record), hook, implementation, arguments))
        return [result for result in results if result is not None]


def _called(who: str, hook: str, implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    with patience(who, hook):
        return implementation.function(*(arguments[name] for name in implementation.argnames))


class HookRelay:
    """`registry.hook.lmcache_started(settings=…, address=…)`: a list of results, never an exception."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(hook_names())

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"there is no hook {name!r}{suggestion(name, self._names)}")

        def call(**arguments: Any) -> list[Any]:
            return self._registry.call(name, **arguments)

        return call
