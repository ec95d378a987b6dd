"""The settings of KV events, and the addresses that they make."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lmcache_core.errors import SettingsError
from lmcache_core.plugins.components import Finding
from lmcache_core.protocol.hostport import PORT_MAX, HostPort


class KvEventsSettings(BaseModel):
    """Where routers connect, and what they get."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint: str = Field(
        default="tcp://127.0.0.1:5557", description="address of the PUB socket: tcp or ipc; port + dp_rank"
    )
    replay_endpoint: str | None = Field(
        default="tcp://127.0.0.1:5558",
        description="address of the ROUTER socket for replays and snapshots; none: no such socket",
    )
    topic: str = Field(default="", max_length=256, description="topic at the start of each message")
    dp_rank: int | None = Field(default=None, ge=0, le=4095, description="data parallel rank in each batch")
    format: Literal["map", "array"] = Field(
        default="map", description="format of events: maps (vLLM 0.32), or tagged arrays"
    )
    hashes: Literal["int", "bytes"] = Field(default="int", description="block hashes: low 64 bits, or all bytes")
    token_ids: bool = Field(
        default=True, description="pass on the tokens of blocks, which routers index; they are content"
    )
    batches_kept: int = Field(default=10_000, ge=1, le=1_000_000, description="batches kept for replays, up to 64 MiB")
    blocks_max: int = Field(
        default=1_000_000,
        ge=1,
        description="objects whose blocks are remembered, in up to 2 GiB; the oldest are dropped",
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is None or value.startswith("ipc:///"):
            return value
        if not value.startswith("tcp://"):
            raise SettingsError(f"{value!r} is not an endpoint", cure="write tcp://HOST:PORT or ipc:///PATH")
        # Port 0 would be one that the system chooses, and routers could not know it.
        return f"tcp://{HostPort.parse(value.removeprefix('tcp://'), port_min=1)}"


def offset_endpoint(endpoint: str, rank: int | None) -> str:
    """Each data parallel rank has its own port or path."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    at = HostPort.parse(endpoint.removeprefix("tcp://"))
    if at.port + rank > PORT_MAX:
        raise SettingsError(f"{endpoint} and dp_rank {rank} make port {at.port + rank}, and the last is {PORT_MAX}")
    return f"tcp://{at._replace(port=at.port + rank)}"


def check(settings: KvEventsSettings) -> list[Finding]:
    """For `lmcache-core check`: whether the sockets can be bound."""
    table = "subscribers.kv_events"
    findings = []
    for name in ("endpoint", "replay_endpoint"):
        endpoint = offset_endpoint(getattr(settings, name) or "", settings.dp_rank)
        if endpoint.startswith("tcp://"):
            at = HostPort.parse(endpoint.removeprefix("tcp://"))
            findings.append(Finding.of_port(table, at, f"{table}.{name}"))
    return findings
