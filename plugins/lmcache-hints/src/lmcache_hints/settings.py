"""The settings of the executor: the table `[operations.hints]`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class HintsSettings(BaseModel):
    """What hints may take, all together and for one tenant, as shares of the pool."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    pinned_share: float = Field(default=0.1, ge=0, le=0.5, description="of the pool, that hints may pin")
    retained_share: float = Field(default=0.3, ge=0, le=0.9, description="of the pool, that hints may retain")
    loading_share: float = Field(
        default=0.3, ge=0, le=0.9, description="of the pool, that scheduled loads may be going to take"
    )
    tenant_share: float = Field(
        default=0.5, gt=0, le=1, description="of each of these, that one tenant may use (tenants are those of quotas)"
    )
