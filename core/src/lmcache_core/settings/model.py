"""The settings of a server: one frozen model. Its concrete form for one configuration, with the plugins' own
settings models inside, is made by `lmcache_core.settings.concrete`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from lmcache_core import limits
from lmcache_core.errors import SettingsError
from lmcache_core.paths import absolute_path, xdg_path
from lmcache_core.plugins.components import Kind
from lmcache_core.protocol.address import NAME_PATTERN
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.settings.paths import AbsolutePath, OptionalPath
from lmcache_core.settings.sizes import Size
from lmcache_core.tiers.drills import parse_wrap

__all__ = [
    "Component",
    "Settings",
    "TierSettings",
]

_TIER_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def check_tier_name(name: str) -> None:
    """Raises `SettingsError`. A tier's name appears in threads, logs, metrics and every status."""
    if len(name) > limits.TIER_NAME_CHARS_MAX:
        raise SettingsError(
            f"{name[:20]!r}… is not a tier name: it has {len(name):,} of at most "
            f"{limits.TIER_NAME_CHARS_MAX} characters"
        )
    if not _TIER_NAME.fullmatch(name):
        raise SettingsError(f"{name!r} is not a tier name", cure="use lower-case words joined by single underscores")


Fraction = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=limits.SECONDS_MAX, allow_inf_nan=False)]
_SWITCH_WORDS = {
    "true": True,
    "on": True,
    "yes": True,
    "1": True,
    "false": False,
    "off": False,
    "no": False,
    "0": False,
}


def _switch_or_path(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        return False
    value = _SWITCH_WORDS.get(value.lower(), value) if isinstance(value, str) else value
    return absolute_path(value) if isinstance(value, str | Path) else value


class Section(BaseModel):
    """A table of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)


class Component(Section):
    """A chosen policy or serde: its name, or a table of its name and its own settings.

    In the table, the component's settings stand beside `type`; here they are gathered in `settings`, an instance of the
    component's own model (None if it has none). Build it with
    `registry.build(kind, component.type, component.settings)`.
    """

    type: str
    settings: Any = None

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"type": value}
        return gather(value, {"type"}, "settings", isinstance_of=Component, offers=has_own(cls, "settings"))


def has_own(model: type[BaseModel], inner: str) -> bool:
    """Whether the model is concrete and its component has settings of its own."""
    return model.model_fields[inner].annotation not in (Any, type(None))


def gather(value: Any, ours: set[str], inner: str, *, isinstance_of: type, offers: bool) -> Any:
    """Split one flat table, as users write it, into our settings and, under `inner`, the component's own."""
    if not isinstance(value, Mapping) or isinstance(value, isinstance_of) or not offers:
        return value
    split: dict[str, Any] = {name: part for name, part in value.items() if name in ours}
    split[inner] = {name: part for name, part in value.items() if name not in ours}
    return split


class AdoptSettings(Section):
    """How to take over a pool left by a dead server."""

    verify: Literal["first", "background", "never"] = Field(
        default="first",
        description="first: drop objects without a checksum, and have each worker check each object on its first read; "
        "background: the same, and the server also checks all objects while it serves; never: check nothing",
    )


class L1Settings(Section):
    """The shared-memory pool."""

    size_bytes: Size = Field(default=1 << 30, description="bytes of shared memory for objects")
    backing: Literal["shm", "memfd", "hugetlb", "file"] = Field(
        default="shm", description="where the memory comes from"
    )
    path: OptionalPath = Field(
        default=None, description="with backing file: the pool's file, on a disk of this machine"
    )
    eviction: Component = Field(default=Component(type="lru"), description="which objects are evicted first")
    watermark: Fraction = Field(
        default=limits.L1_WATERMARK, description="fill level at which background eviction starts"
    )
    evict_ratio: Fraction = Field(default=limits.EVICT_RATIO, description="fraction of the pool to free at once")
    access: Literal["owner", "group"] = Field(
        default="owner", description="who may attach: only the server's uid, or also the groups in gids"
    )
    gids: tuple[int, ...] = Field(default=(), description="group ids that may attach when access is group")
    index_entries: int = Field(
        default=0, ge=0, description="entries of the index, a power of two; 0: enough for objects of 8 KiB or more"
    )
    on_stale: Literal["adopt", "recreate", "refuse"] = Field(
        default="adopt",
        description="what to do with a pool left by a dead server: adopt it, recreate it, or refuse to start",
    )
    adopt: AdoptSettings = AdoptSettings()
    keep_pool: bool | None = Field(
        default=None, description="keep the pool for the next server at a clean shutdown; unset: with backing file"
    )

    @model_validator(mode="after")
    def _kept(self) -> Self:
        if self.keep_pool and self.backing not in ("shm", "file"):
            cure = 'set backing = "shm", or "file"'
            raise SettingsError(f"keep_pool needs a named pool, which {self.backing} is not", cure=cure)
        if (self.path is None) == (self.backing == "file"):
            words = (
                'backing = "file" needs path'
                if self.path is None
                else f'path is given, and backing is "{self.backing}"'
            )
            cure = "set path to a file on a disk" if self.path is None else 'set backing = "file", or remove path'
            raise SettingsError(words, cure=cure)
        if self.index_entries & (self.index_entries - 1):
            raise SettingsError(f"index_entries is {self.index_entries}", cure="use a power of two, or 0")
        return self

    @property
    def keeps_pool(self) -> bool:
        """`keep_pool`, or what holds without it."""
        return self.backing == "file" if self.keep_pool is None else self.keep_pool

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.access == "group" and not self.gids:
            raise SettingsError('access = "group" needs the ids of the groups', cure="set gids")
        if self.gids and self.access == "owner":
            raise SettingsError('gids are given, but access is "owner"', cure='set access = "group"')
        return self


class LeaseSettings(Section):
    """How long a worker may stay silent."""

    write_ttl_s: Seconds = Field(default=limits.WRITE_TTL_S, description="time until a write lease expires")
    read_ttl_s: Seconds = Field(default=limits.READ_TTL_S, description="time until a read lease expires")
    promise_ttl_s: Seconds = Field(default=limits.PROMISE_TTL_S, description="time until a held lookup expires")


class QuarantineSettings(Section):
    """How much memory may wait for writers that may still be writing, as a fraction of the pool."""

    fraction_max: Fraction = Field(
        default=limits.QUARANTINE_FRACTION_MAX,
        description="fraction of the pool in quarantine, all sessions together",
    )
    fraction_per_uid_max: Fraction = Field(
        default=limits.QUARANTINE_FRACTION_PER_UID_MAX, description="the same for one uid, or over ZMQ one CURVE key"
    )


class HoldingSettings(Section):
    """How much one session, and all sessions of one uid (over ZMQ: of one CURVE key), may keep from eviction, as a
    fraction of the pool."""

    promised_fraction_max: Fraction = Field(
        default=limits.PROMISED_FRACTION_MAX,
        description="fraction of the pool promised to one uid or key",
    )
    promised_fraction_per_session_max: Fraction = Field(
        default=limits.PROMISED_FRACTION_PER_SESSION_MAX, description="the same for one session"
    )
    read_fraction_max: Fraction = Field(
        default=limits.READ_FRACTION_MAX, description="fraction of the pool under read leases of one uid or key"
    )
    read_fraction_per_session_max: Fraction = Field(
        default=limits.READ_FRACTION_PER_SESSION_MAX, description="the same for one session"
    )
    pinned_fraction_max: Fraction = Field(
        default=limits.PINNED_FRACTION_MAX, description="fraction of the pool pinned by everybody"
    )
    pinned_fraction_per_holder_max: Fraction = Field(
        default=limits.PINNED_FRACTION_PER_HOLDER_MAX,
        description="the same for one uid or key, including its ended sessions",
    )
    pinned_fraction_per_session_max: Fraction = Field(
        default=limits.PINNED_FRACTION_PER_SESSION_MAX, description="the same for one session"
    )
    written_fraction_max: Fraction = Field(
        default=limits.WRITTEN_FRACTION_MAX,
        description="fraction of the pool that one uid or key may have open to write, neither committed nor aborted",
    )
    shared_fraction_per_holder_max: Fraction = Field(
        default=limits.SHARED_FRACTION_PER_HOLDER_MAX,
        description="fraction of worker rows, layouts, namespaces and waiting requests for one uid or key; "
        "less if others use some",
    )


class ZmqSettings(Section):
    """The carrier for clients that do not share our runtime directory."""

    ipc: Annotated[bool | Path, BeforeValidator(_switch_or_path)] = Field(
        default=False, description="serve on a Unix socket: true for one in the runtime directory, or a path"
    )
    tcp: str | None = Field(default=None, description="serve on this address, as host:port; needs the CURVE keys")
    curve_secret_key_file: OptionalPath = Field(default=None, description="file with the server's secret CURVE key")
    curve_clients_dir: OptionalPath = Field(
        default=None, description="directory with the public keys of the clients that may connect"
    )

    @field_validator("tcp")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        return str(HostPort.parse(value.removeprefix("tcp://")))

    @model_validator(mode="after")
    def _keys(self) -> Self:
        if self.tcp is not None and (self.curve_secret_key_file is None or self.curve_clients_dir is None):
            raise SettingsError("tcp requires CURVE", cure="set curve_secret_key_file and curve_clients_dir")
        return self


class TierSettings(Section):
    """One L2 tier. The settings of its adapter stand in the same table, and here in `settings`, an instance of the
    adapter's own model (None if it has none)."""

    type: str = Field(description="the adapter")
    capacity_bytes: Size | None = Field(default=None, description="bytes that the tier may use; none: no limit")
    eviction: Component | None = Field(
        default=Component(type="lru"), description="which objects are evicted first; none: none are evicted"
    )
    watermark: Fraction = Field(default=limits.L1_WATERMARK, description="fill level at which eviction starts")
    evict_ratio: Fraction = Field(default=limits.EVICT_RATIO, description="fraction of the capacity to free at once")
    serde: tuple[Component, ...] = Field(default=(), description="codec chain, in the order of encoding")
    connections: int = Field(default=4, ge=1, le=1024, description="concurrent requests")
    deadline_s: Seconds = Field(default=limits.TIER_DEADLINE_S, description="time limit of one batch")
    wrap: tuple[str, ...] = Field(
        default=(),
        description="wrappers for drills, outermost first: latency:SECONDS, faults:RULE; RULE, record",
    )
    rescan_s: Seconds | None = Field(
        default=None, description="how often to recount the medium if several servers share it; none: never"
    )
    store_cpu_share: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = Field(
        default=None, description="cores that stores to the tier may use on average; none: a quarter of all cores"
    )
    store_io: Literal["idle", "normal"] = Field(
        default="idle", description="whether stores wait while other programs read or write the disk"
    )
    locality: Literal["auto", "local", "remote"] = Field(
        default="auto",
        description="for routers: whether other nodes have the medium too; auto: if the adapter shares it",
    )
    require_certificate: OptionalPath = Field(
        default=None,
        description="certificate, by `lmcache-core quality`, that lossy serdes must have; none: not demanded",
    )
    divergence_max: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = Field(
        default=limits.DIVERGENCE_MAX, description="the most that a certificate may say, in nats a token"
    )
    agreement_min: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=limits.AGREEMENT_MIN, description="how often the most likely token must stay the same"
    )
    settings: Any = None

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        ours = set(TierSettings.model_fields) - {"settings"}
        return gather(value, ours, "settings", isinstance_of=TierSettings, offers=has_own(cls, "settings"))

    @field_validator("wrap")
    @classmethod
    def _wrappers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_wrap(text)
        return value

    @field_validator("eviction", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value == "none" else value


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class HelperSettings(Section):
    """A process that the server runs."""

    command: Annotated[tuple[str, ...], BeforeValidator(_words), Field(min_length=1)] = Field(
        description="program and arguments; run without a shell"
    )
    environment: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        default=(), description="names of environment variables that are also passed from the server to it"
    )


class StoreQuota(Section):
    """What a tenant may use of one store."""

    reserved_bytes: Annotated[Size, Field(ge=0)] | None = Field(
        default=None, description="bytes that no other tenant can take"
    )
    limit_bytes: Annotated[Size, Field(ge=0)] | None = Field(
        default=None, description="bytes that the tenant may use at most"
    )


class TenantQuota(Section):
    """A tenant: its namespaces, and what it may use of the pool (`l1`) and of tiers, by name."""

    namespaces: Annotated[
        tuple[Annotated[str, Field(pattern="^[0-9a-fA-F]{1,16}$")], ...], BeforeValidator(_listed), Field(min_length=1)
    ] = Field(description="namespace ids, as hexadecimal text")
    stores: Mapping[str, StoreQuota] = Field(default={}, description="a table for l1, and for each tier, by name")


class Settings(BaseModel):
    """All settings of a server. Frozen; unknown names are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True, defer_build=True
    )
    companion_names: ClassVar[tuple[str, ...]] = ()  # of a concrete model: which of its tables belong to companions
    helper_names: ClassVar[tuple[str, ...]] = ()  # which to helpers
    tracer_names: ClassVar[tuple[str, ...]] = ()  # and which to tracers

    name: str = Field(default="default", description="name of the server and of its pool")
    l1: L1Settings = L1Settings()
    lease: LeaseSettings = LeaseSettings()
    quarantine: QuarantineSettings = QuarantineSettings()
    holding: HoldingSettings = HoldingSettings()
    chunk_tokens: int = Field(
        default=limits.CHUNK_TOKENS, ge=1, le=limits.CHUNK_TOKENS_MAX, description="tokens whose KV makes one object"
    )
    prefetch_in_flight_max: int = Field(
        default=limits.PREFETCH_IN_FLIGHT_MAX, ge=1, le=4096, description="concurrent prefetch jobs"
    )
    store_policy: Component = Field(
        default=Component(type="default"), description="which tiers get each committed object"
    )
    store_in_flight_bytes_max: Size = Field(
        default=limits.STORE_IN_FLIGHT_BYTES_MAX, gt=0, description="bytes on their way to the tiers at once"
    )
    dirty: Literal["drop", "keep", "wait"] = Field(
        default="drop",
        description="objects that a tier does not have yet: drop evicts them last and counts them as lost; "
        "keep refuses new stores instead; wait makes new stores wait",
    )
    store_wait_s: Annotated[Seconds, Field(le=limits.STORE_WAIT_S_MAX)] = Field(
        default=limits.STORE_WAIT_S, description="how long a store waits for tiers to make room if dirty is wait"
    )
    prefetch_policy: Component = Field(
        default=Component(type="default"), description="which tier loads objects that the L1 does not have"
    )
    l2: Mapping[str, TierSettings] = Field(default={}, description="the tiers, in order")
    l2_order: tuple[str, ...] = Field(default=(), description="order of the tiers; none: the order in the file")
    drain_s: Seconds = Field(default=limits.DRAIN_S, description="time to write to the tiers at shutdown")
    runtime_dir: OptionalPath = Field(default=None, description="directory of the lifeline sockets")
    state_dir: AbsolutePath = Field(
        default_factory=lambda: default_state_dir(), description="directory for files that outlive the server"
    )
    secrets_dir: Annotated[tuple[AbsolutePath, ...], BeforeValidator(_listed)] = Field(
        default=(), description="directories of files that hold one setting each; the last one wins"
    )
    zmq: ZmqSettings = ZmqSettings()
    subscribers: Mapping[str, Any] = Field(default={}, description="event subscribers: a table of settings for each")
    operations: Mapping[str, Any] = Field(
        default={}, description="operations that packages add: a table of settings for each"
    )
    helpers: Mapping[str, HelperSettings] = Field(
        default={}, description="helper processes: a table of settings for each"
    )
    quotas: Mapping[str, TenantQuota] = Field(
        default={}, description="tenants: a table of namespaces and quotas for each"
    )
    event_bus_queue_size: int = Field(
        default=limits.EVENT_BUS_QUEUE_SIZE, ge=1, le=1 << 20, description="events that may wait for subscribers"
    )

    @field_validator("helpers")
    @classmethod
    def _helper_names(cls, value: Mapping[str, HelperSettings]) -> Mapping[str, HelperSettings]:
        for name in value:
            if not _TIER_NAME.fullmatch(name):
                cure = "use lower-case words joined by single underscores"
                raise SettingsError(f"{name!r} is not a valid name for a helper", cure=cure)
        return value

    @field_validator("name")
    @classmethod
    def _server_name(cls, value: str) -> str:
        if not NAME_PATTERN.fullmatch(value):
            raise ValueError("use lower-case letters, digits, - and _, at most 64")
        return value

    def companions(self) -> dict[str, Any]:
        """The settings of each companion by name: an instance of its own model."""
        return {name: getattr(self, name) for name in self.companion_names}

    def plugin_helpers(self) -> dict[str, Any]:
        """The settings of each helper that a plugin brings, by name: an instance of its own model."""
        return {name: getattr(self, name) for name in self.helper_names}

    def tracers(self) -> dict[str, Any]:
        """The settings of each tracer, by name: an instance of its own model."""
        return {name: getattr(self, name) for name in self.tracer_names}

    def components(self) -> Iterator[tuple[Kind, str]]:
        """Every component named in these settings."""
        for name in self.companion_names:
            yield Kind.COMPANION, name
        for name in self.helper_names:
            yield Kind.HELPER, name
        for name in self.tracer_names:
            yield Kind.TRACER, name
        for name in self.subscribers:
            yield Kind.EVENT_SUBSCRIBER, name
        for name in self.operations:
            yield Kind.OPERATION, name
        yield Kind.EVICTION_POLICY, self.l1.eviction.type
        yield Kind.STORE_POLICY, self.store_policy.type
        yield Kind.PREFETCH_POLICY, self.prefetch_policy.type
        for tier in self.l2.values():
            yield Kind.L2_ADAPTER, tier.type
            if tier.eviction is not None:
                yield Kind.EVICTION_POLICY, tier.eviction.type
            for serde in tier.serde:
                yield Kind.SERDE, serde.type


def default_state_dir() -> Path:
    """`XDG_STATE_HOME/lmcache-core`, else `~/.local/state/lmcache-core`; in a container without a home, a directory in
    /var/tmp that carries the user's id."""
    root, home = xdg_path(os.environ.get("XDG_STATE_HOME")), xdg_path(os.environ.get("HOME"))
    if root is not None:
        return root / "lmcache-core"
    return Path(f"/var/tmp/lmcache-core-{os.geteuid()}") if home is None else home / ".local/state/lmcache-core"
