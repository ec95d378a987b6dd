"""The settings of a node of a cluster: those of the tier, `[l2.NAME] type = "peer"`, and those of the helper that
serves, `[peer]`. What both have says which cluster it is and who belongs to it."""

from __future__ import annotations

import socket
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lmcache_core.errors import SettingsError
from lmcache_core.protocol.hostport import HostPort, bare_host
from lmcache_core.settings.paths import OptionalPath
from lmcache_peer.loopback import is_loopback


class ClusterSettings(BaseModel):
    """What is the same for who serves and who loads, and mostly on all nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    cluster: str = Field(
        default="default",
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$",
        description="name of the cluster: nodes of different clusters see nothing of each other",
    )
    node: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,127}$",
        description="name of this node, unlike that of any other; by default HOSTNAME/SERVER",
    )
    nodes: tuple[str, ...] = Field(
        default=(), description="HOST:PORT of the other nodes, if they are fixed: then no directory is needed"
    )
    redis_url: str | None = Field(
        default=None,
        description="the directory: redis://HOST:PORT/DB, rediss:// for TLS, unix://PATH; no password in it",
    )
    redis_url_file: OptionalPath = Field(
        default=None, description="file with the URL instead, if it has a password: redis://USER:PASSWORD@HOST:PORT/DB"
    )
    redis_mode: Literal["standalone", "sentinel", "cluster"] = Field(
        default="standalone", description="what is at redis_url, or at redis_nodes"
    )
    redis_nodes: tuple[str, ...] = Field(default=(), description="HOST:PORT of Sentinels, or of nodes of the Cluster")
    etcd_nodes: tuple[str, ...] = Field(
        default=(), description="HOST:PORT of the members of an etcd: the directory in place of Redis"
    )
    etcd_ca_file: OptionalPath = Field(default=None, description="authority of etcd's certificate, PEM; enables TLS")
    etcd_cert_file: OptionalPath = Field(default=None, description="certificate that etcd asks of clients, PEM")
    etcd_key_file: OptionalPath = Field(default=None, description="its private key, PEM")
    who_has: Literal["digests", "entries"] = Field(
        default="digests",
        description="how nodes know who has a key: filters that they pull from each other, or an entry for each key in "
        "Redis; the same on all nodes",
    )
    secret_file: OptionalPath = Field(
        default=None, description="file with the secret of the cluster, 16 bytes or more, the same on all nodes"
    )
    tls_ca_file: OptionalPath = Field(
        default=None, description="certificate of the cluster's own authority, PEM: whoever has one of it is a node"
    )
    tls_cert_file: OptionalPath = Field(default=None, description="certificate chain of this node, PEM; enables TLS")
    tls_key_file: OptionalPath = Field(default=None, description="its private key, PEM")
    plaintext: Literal["loopback", "trusted_network"] = Field(
        default="loopback",
        description="where nodes may speak without TLS; trusted_network: anybody there can read and change what they "
        "send",
    )

    @field_validator("nodes", "redis_nodes", "etcd_nodes", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("nodes", "redis_nodes", "etcd_nodes")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                HostPort.parse(each, port_min=1)
            except ValueError:
                raise SettingsError(f"{each!r} is not HOST:PORT", cure="as in node-b:7600 or [::1]:7600") from None
        return value

    @field_validator("redis_url")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and ("@" in value or urlsplit(value).password):
            raise SettingsError("redis_url has a user or a password", cure="put the whole URL into redis_url_file")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        tls = (self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        if any(tls) and not all(tls):
            raise SettingsError("TLS needs all three", cure="set tls_ca_file, tls_cert_file and tls_key_file")
        if self.redis_url is not None and self.redis_url_file is not None:
            raise SettingsError("redis_url and redis_url_file are both set", cure="keep one of them")
        if self.nodes and self.has_directory:
            cure = "leave nodes out, or redis_… and etcd_…"
            raise SettingsError("the nodes are fixed, and there is a directory", cure=cure)
        if self.who_has == "entries" and not self._has_redis:
            raise SettingsError('who_has = "entries" needs Redis', cure="set redis_url, or leave who_has out")
        if self.etcd_nodes and self._has_redis:
            raise SettingsError("Redis and etcd are both set as the directory", cure="keep one of them")
        if (self.etcd_cert_file is None) != (self.etcd_key_file is None) or (
            self.etcd_cert_file and not self.etcd_ca_file
        ):
            cure = "set etcd_ca_file, and etcd_cert_file with etcd_key_file"
            raise SettingsError("TLS to etcd needs its authority, and a certificate has a key", cure=cure)
        if self.etcd_ca_file is not None and not self.etcd_nodes:
            raise SettingsError("etcd_ca_file is set, and no etcd", cure="set etcd_nodes")
        if self.redis_mode == "sentinel" and not self.redis_nodes:
            raise SettingsError('redis_mode "sentinel" needs redis_nodes', cure="HOST:PORT of the Sentinels")
        if self.plaintext == "trusted_network" and self.tls_cert_file is None and self.secret_file is None:
            raise SettingsError(
                "without TLS a network takes a secret", cure="set secret_file, the same on all nodes, or the tls_…_file"
            )
        return self

    @property
    def has_directory(self) -> bool:
        """Whether nodes find each other through Redis or etcd."""
        return self._has_redis or bool(self.etcd_nodes)

    @property
    def _has_redis(self) -> bool:
        return self.redis_url is not None or self.redis_url_file is not None or bool(self.redis_nodes)

    def node_name(self, server: str) -> str:
        """The name of this node."""
        return self.node or f"{socket.gethostname()}/{server or 'default'}"

    def may_reach(self, at: HostPort) -> bool:
        """Whether bytes may go there: encrypted, on this machine, or as the settings allow."""
        return self.tls_cert_file is not None or self.plaintext == "trusted_network" or is_loopback(at.host)


class PeerTierSettings(ClusterSettings):
    """`[l2.NAME] type = "peer"`: loads from the memory of the other nodes."""

    patience_s: float = Field(
        default=0.5,
        gt=0,
        le=30,
        description="a peer that sends nothing for so long is given up, until it answers a probe; others go on",
    )

    @model_validator(mode="after")
    def _knows_others(self) -> Self:
        if not (self.nodes or self.has_directory):
            raise SettingsError(
                "it cannot find the other nodes", cure="set redis_url or etcd_nodes for a directory, or nodes"
            )
        return self


class ServingSettings(ClusterSettings):
    """The table `[peer]`: the helper that serves this node's memory to the others."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=7600, ge=0, le=65535, description="port to listen on; 0: any free one, for the directory")
    advertise: str | None = Field(
        default=None, description="HOST:PORT at which the others reach this node; by default host and port"
    )
    locked_share: float = Field(
        default=0.1,
        gt=0,
        le=0.5,
        description="of the pool, that other nodes may keep from eviction until they load it",
    )

    @field_validator("host")
    @classmethod
    def _bare(cls, value: str) -> str:
        return bare_host(value)

    @field_validator("advertise")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return None if value is None else cls._addresses((value,))[0]

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if not self.may_reach(HostPort(self.host, self.port)):
            raise SettingsError(
                f"host {self.host!r} is not a loopback address, and there is no TLS",
                cure='set tls_ca_file, tls_cert_file and tls_key_file, or plaintext = "trusted_network" if nobody else '
                "is on that network",
            )
        if self.advertise is None and self.host in ("0.0.0.0", "::") and self.has_directory:
            raise SettingsError(f"the others cannot reach {self.host}", cure="set advertise to this node's HOST:PORT")
        return self
