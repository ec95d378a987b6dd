"""What an operator writes into a host's configuration: a tier as in `lmcache.toml`, or a server to connect to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmcache_core import Client
from lmcache_core.errors import SettingsError
from lmcache_core.limits import SECONDS_MAX
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.cores import usable_cores
from lmcache_core.server.tiers.opening import build_tier
from lmcache_core.settings.tier import tier_settings
from lmcache_hosts.naming import BlockFormat
from lmcache_hosts.server_objects import ServerObjects
from lmcache_hosts.tier_objects import Deadlines, TierObjects

__all__ = ["HostSettings", "Objects", "open_objects"]

TIER_NAME = "host"  # in messages, and in the names of threads

Objects = TierObjects | ServerObjects


class ServerSettings(BaseModel):
    """Which server of lmcache-core to use: by name on this node, or by its ZMQ address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "default"
    runtime_dir: str | None = None
    address: str | None = None
    server_uid: int | None = None


class HostSettings(BaseModel):
    """The settings of a shim. Exactly one of `tier` and `server` is given.

    `tier` is a table like `[l2.NAME]` of a server's settings: its `type`, the adapter's settings, `capacity_bytes`,
    `eviction`, `serde`, and so on. `block_format` says what the bytes of a block mean, if several hosts are to
    read each other's blocks; by default it is what the host says of them. `model` replaces the host's name of the
    model, and `weights_version` tells two states of its weights apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: Mapping[str, Any] | None = None
    server: ServerSettings | None = None
    model: str = ""
    weights_version: str = ""
    block_format: str = ""
    lookup_s: float = Field(default=1.0, gt=0, le=SECONDS_MAX)
    load_s: float = Field(default=5.0, gt=0, le=SECONDS_MAX)
    store_s: float = Field(default=30.0, gt=0, le=SECONDS_MAX)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.tier is None) is (self.server is None):
            raise ValueError('give either "tier", as in {"type": "fs", "path": "/var/cache/kv"}, or "server"')
        return self

    @classmethod
    def read(cls, values: Mapping[str, Any], ignored: tuple[str, ...] = ()) -> HostSettings:
        """From a host's configuration. `ignored`: names in it that are the host's own. Raises `SettingsError`."""
        try:
            return cls.model_validate({name: each for name, each in values.items() if name not in ignored})
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, each['loc'])) or 'lmcache-hosts'}: {each['msg']}" for each in error.errors())
            raise SettingsError("; ".join(lines), cure=f"known settings: {', '.join(cls.model_fields)}") from None

    def format_of(self, model: str, meaning: str) -> BlockFormat:
        """What tells this host's blocks apart from others, with what the host says where the settings say nothing."""
        return BlockFormat(self.model or model, self.block_format or meaning, self.weights_version)


def open_objects(settings: HostSettings) -> Objects:
    """The tier, or the client. The server need not be there. Raises `SettingsError` for settings that are wrong and
    for a medium that hangs while it is opened, and `PluginError` for an adapter that is not installed."""
    deadlines = Deadlines(settings.lookup_s, settings.load_s, settings.store_s)
    if settings.server is not None:
        server = settings.server
        client = Client.connect(
            server.name,
            runtime_dir=server.runtime_dir,
            address=server.address,
            server_uid=server.server_uid,
            client_name="lmcache-hosts",
            call_timeout_s=max(settings.load_s, settings.lookup_s),
            connect_timeout_s=settings.lookup_s,
        )
        return ServerObjects(client, deadlines)
    registry = load_plugins()
    # The host paces its stores itself, and waits for them.
    values = {"deadline_s": settings.store_s, "store_cpu_share": usable_cores(), **(settings.tier or {})}
    return TierObjects(build_tier(TIER_NAME, tier_settings(registry, TIER_NAME, values, {}), registry, ""), deadlines)
