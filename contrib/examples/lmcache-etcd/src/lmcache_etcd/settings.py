"""Settings of one etcd tier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

PARTS_MAX = 100  # of an object: etcd takes 128 operations in a transaction


class EtcdSettings(BaseModel):
    """`[l2.NAME] type = "etcd"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(
        default="http://127.0.0.1:2379",
        pattern=r"http://(\[[0-9a-fA-F:.]+\]|[^/:@]+):[0-9]{1,5}",
        description="Where etcd takes clients, as http://HOST:PORT.",
    )
    prefix: str = Field(
        default="lmcache/",
        pattern=r"[!-~]{1,100}",
        description="What our keys begin with, so that others can use the same etcd.",
    )
    part_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        le=64 << 20,
        description="The largest value: a larger object becomes several. Below etcd's --max-request-bytes (1.5 MiB).",
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the endpoint."""
        host, _, port = self.endpoint.removeprefix("http://").rpartition(":")
        return host.strip("[]"), int(port)
