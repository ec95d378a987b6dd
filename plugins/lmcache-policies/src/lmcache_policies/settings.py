"""The settings of the policies, frozen and without extra fields: a misspelt name is an error."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lmcache_core.errors import SettingsError
from lmcache_core.settings.sizes import Size
from lmcache_policies.ghosts import GHOST_KEYS_MAX

Capacity = Annotated[Size, Field(gt=0)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ArcSettings(_Closed):
    capacity_bytes: Capacity | None = Field(default=None, description="bytes to divide; the store's own when unset")
    ghost_keys_max: int = Field(
        default=GHOST_KEYS_MAX, gt=0, description="remembered keys, in each of the two histories"
    )


class S3FifoSettings(_Closed):
    capacity_bytes: Capacity | None = Field(default=None, description="bytes to divide; the store's own when unset")
    small_fraction: float = Field(default=0.1, gt=0, lt=1, description="share of the capacity that newcomers may fill")
    promote_uses: int = Field(default=2, ge=1, le=3, description="uses after its insertion that keep a newcomer")
    ghost_keys_max: int = Field(default=GHOST_KEYS_MAX, gt=0, description="remembered keys")


class LrukSettings(_Closed):
    capacity_bytes: Capacity | None = Field(
        default=None, description="bytes that bound the history; the store's own when unset"
    )
    ghost_capacities: float = Field(
        default=4.0, ge=0, le=1000, description="bytes of remembered objects, in capacities"
    )
    ghost_keys_max: int = Field(default=GHOST_KEYS_MAX, gt=0, description="remembered keys")


class AdaptiveSettings(_Closed):
    watch: tuple[str, ...] = Field(
        default=(), max_length=8, description="further eviction policies whose hits are shown beside, as they would be"
    )

    @model_validator(mode="after")
    def _others_only(self) -> AdaptiveSettings:
        for name in self.watch:
            if name in ("lru", "lruk", "arc", "mru", "reuse", "adaptive"):
                raise SettingsError(f"adaptive has a shadow of {name!r} anyway", cure="take it out of watch")
        return self


def _namespace_id(value: Any) -> Any:
    # 64-bit ids do not fit TOML's integers, and people copy them from `status`, where they are hexadecimal.
    return int(value, 16) if isinstance(value, str) else value


NamespaceId = Annotated[int, BeforeValidator(_namespace_id), Field(ge=0, lt=1 << 64)]


class TenantSettings(_Closed):
    namespaces: tuple[NamespaceId, ...] = Field(description="ids, as numbers or as hexadecimal text")
    quota_bytes: Size = Field(description="what the tenant may keep while others need room")


class IsolatedSettings(_Closed):
    tenants: dict[str, TenantSettings] = Field(max_length=1024, description="tenants by name")
    inner: str = Field(default="lru", description="the eviction policy of each tenant")
    inner_settings: dict[str, Any] = Field(default_factory=dict, description="settings of the inner policy")
    others_quota_bytes: Size | None = Field(
        default=None, description="quota of all unlisted namespaces together; what the tenants leave when unset"
    )

    @model_validator(mode="after")
    def _one_tenant_for_each_namespace(self) -> IsolatedSettings:
        owner: dict[int, str] = {}
        for name, tenant in self.tenants.items():
            for namespace in tenant.namespaces:
                if owner.setdefault(namespace, name) != name:
                    raise SettingsError(
                        f"namespace {namespace:#018x} belongs to tenants {owner[namespace]!r} and {name!r}",
                        cure="name it in one of them",
                    )
        if self.inner == "isolated":
            raise SettingsError("inner = 'isolated' has no end", cure="name the policy that each tenant shall have")
        return self


class WearAwareSettings(_Closed):
    writes_per_hit_max: float = Field(
        default=4.0,
        ge=0,
        le=1e6,
        description="bytes that may be written for each byte that a tier returns; 0: only what was asked for twice",
    )
    remembered_keys_max: int = Field(default=GHOST_KEYS_MAX, gt=0, description="keys that are remembered")


class SizeRange(_Closed):
    min_bytes: Size = Field(default=0, description="smallest object that goes to the tier")
    max_bytes: Size | None = Field(default=None, description="largest object that goes to the tier; unset: no bound")

    @model_validator(mode="after")
    def _not_empty(self) -> SizeRange:
        if self.max_bytes is not None and self.max_bytes < self.min_bytes:
            message = f"max_bytes = {self.max_bytes} is below min_bytes = {self.min_bytes}, so no object fits"
            raise SettingsError(message, cure="raise it")
        return self


class SizeAwareSettings(_Closed):
    tiers: dict[str, SizeRange] = Field(description="sizes for each tier; one that is not named takes all")
