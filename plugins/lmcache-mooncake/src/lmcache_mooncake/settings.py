"""Settings of one Mooncake tier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lmcache_core.protocol.hostport import HostPort
from lmcache_core.settings.sizes import Size

ETCD = "etcd://"


class MooncakeSettings(BaseModel):
    """`[l2.NAME] type = "mooncake"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    master: str = Field(
        default="127.0.0.1:50051",
        description="HOST:PORT of mooncake_master; etcd://HOST:PORT;HOST:PORT for several masters that elect one.",
    )
    metadata: str = Field(
        default="P2PHANDSHAKE",
        min_length=1,
        description="Where nodes find each other's memory: P2PHANDSHAKE, or the address of a metadata server.",
    )
    protocol: str = Field(
        default="tcp",
        pattern=r"^[a-z_]+$",
        description="How bytes travel, as Mooncake names it: tcp, rdma, or another transport of the installed wheel.",
    )
    devices: str = Field(default="", description="For rdma: names of the network devices, separated by commas.")
    host: str = Field(
        default="",
        description="This machine's address for other nodes. Empty: the one from which the master is reached.",
    )
    tenant: str = Field(default="default", min_length=1, description="The tenant at a master that has several.")
    key_prefix: str = Field(
        default="lmcache/",
        max_length=128,
        description="Begins every key, so that several caches and other users can share a store.",
    )
    replicas: int = Field(default=1, ge=1, le=16, description="Copies of each object, each on another node.")
    soft_pin_s: float | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="The master evicts objects last for this long after their store. None: no pin.",
    )
    staging_bytes: Size = Field(
        default=64 << 20,
        ge=1 << 20,
        le=4 << 30,
        description="Memory for each call that is under way, registered with Mooncake: also the largest object.",
    )
    call_timeout_s: int = Field(
        default=5,
        ge=1,
        le=600,
        description="Mooncake's own time-outs. A call ends by its deadline in any case; until then its memory is held.",
    )

    @field_validator("master")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value.startswith(ETCD):
            HostPort.parse(value, port_min=1)
        return value
