"""Settings of one Redis tier."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from lmcache_core.errors import SettingsError
from lmcache_core.limits import SECONDS_MAX
from lmcache_core.protocol.hostport import HostPort, bare_host
from lmcache_core.settings.paths import OptionalPath

_SCHEMES = ("redis", "rediss", "unix")


class RedisSettings(BaseModel):
    """`[l2.NAME] type = "redis"`. Give the address as `url`, or in fields; the URL takes precedence."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: SecretStr | None = Field(
        default=None,
        description="redis://USER:PASSWORD@HOST:PORT/DB, rediss:// for TLS, unix://USER:PASSWORD@/PATH?db=DB. "
        "Kept like a password, since it may hold one.",
    )
    mode: Literal["standalone", "sentinel", "cluster"] = Field(
        default="standalone",
        description="standalone: one server; sentinel: the primary that Sentinels name; cluster: Redis Cluster.",
    )
    nodes: tuple[str, ...] = Field(
        default=(),
        description="HOST:PORT of Sentinels, or of any nodes of a cluster, as a list or separated by commas. Cluster "
        "without it: host and port, or url, name the first node.",
    )
    host: str = Field(default="localhost", description="The server.")
    port: int = Field(default=6379, ge=1, le=65535, description="Its TCP port.")
    unix_socket: OptionalPath = Field(default=None, description="A Unix socket instead of host and port.")
    db: int = Field(default=0, ge=0, description="The database; a cluster has only 0.")
    username: str | None = Field(default=None, description="An ACL user. None: the default user.")
    password: SecretStr | None = Field(default=None, description="The user's password.")
    sentinel_service: str = Field(default="mymaster", description="The service's name at the Sentinels.")
    sentinel_username: str | None = Field(default=None, description="An ACL user of the Sentinels.")
    sentinel_password: SecretStr | None = Field(default=None, description="The password of the Sentinels.")
    tls: bool = Field(default=False, description="Speak TLS. A rediss:// URL does so too.")
    tls_ca: OptionalPath = Field(default=None, description="CA certificates, PEM. None: those of the system.")
    tls_cert: OptionalPath = Field(default=None, description="Our certificate, for servers that ask for one.")
    tls_key: OptionalPath = Field(default=None, description="Its private key.")
    tls_verify: Literal["full", "ca", "none"] = Field(
        default="full",
        description="full: certificate and host name; ca: the certificate alone; none: neither (anybody can answer).",
    )
    protocol: Literal[2, 3] = Field(default=3, description="RESP version; 2 for servers before Redis 6.")
    key_prefix: str = Field(
        default="lmcache:",
        max_length=128,
        description="Begins every key, so that several caches and other users can share a database.",
    )
    ttl_s: float | None = Field(
        default=None, gt=0, le=SECONDS_MAX, description="Objects expire this long after they were stored. None: never."
    )
    connect_timeout_s: float = Field(
        default=2.0, gt=0, le=SECONDS_MAX, description="Time-out of a connection; a call's own deadline may be earlier."
    )
    failover_wait_s: float = Field(
        default=8.0,
        ge=0,
        le=SECONDS_MAX,
        description="Stores and loads wait this long, within their deadline, for a cluster or Sentinel to name a new "
        "primary. Lookups do not wait.",
    )
    transport: Literal["auto", "direct", "plain"] = Field(
        default="auto",
        description="direct: payloads go between the pool and redis-py's socket without copies; plain: redis-py's own "
        "calls, with copies; auto: direct where the installed redis-py allows it.",
    )

    @field_validator("nodes", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("protocol", mode="before")
    @classmethod
    def _numbered(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdigit() else value

    @field_validator("nodes")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # Never quote a node: a URL given here by mistake may contain a password, and errors go to status and logs.
        for place, node in enumerate(value, 1):
            try:
                HostPort.parse(node, port_min=1)
            except ValueError:
                cure = "write the name or address and the port alone, as in redis-1:6379 or [::1]:6379, and user and "
                cure += "password in username and password"
                raise SettingsError(f"node {place} of {len(value)} is not HOST:PORT", cure=cure) from None
        return value

    @field_validator("host")
    @classmethod
    def _bare_host(cls, value: str) -> str:
        if "/" in value or "@" in value:  # not quoted either: a URL with a password
            raise SettingsError("host is not the name or address of a server", cure="a whole URL belongs into url")
        return bare_host(value)

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        # Never quote the URL: in a malformed one the password may be anywhere.
        try:
            parts = urlsplit(value.get_secret_value())
            port, query = parts.port, parse_qs(parts.query, strict_parsing=bool(parts.query))
        except ValueError:
            raise SettingsError("the URL cannot be read", cure="write redis://USER:PASSWORD@HOST:PORT/DB") from None
        if parts.scheme not in _SCHEMES or port == 0:
            raise ValueError("the URL must begin with redis://, rediss:// or unix://")
        if set(query) - {"db"}:
            raise SettingsError("the URL's only parameter is db", cure="everything else has a setting of its own")
        database = query.get("db", [parts.path.strip("/") if parts.scheme != "unix" else ""])[0]
        if database and not database.isdigit():
            raise ValueError("the database in the URL is not a number")
        return value

    @field_validator("key_prefix")
    @classmethod
    def _no_hash_tag(cls, value: str) -> str:
        if "{" in value or "}" in value:
            raise ValueError("a key prefix must not hold braces: a cluster would put every key on one node")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        scheme = urlsplit(self.url.get_secret_value()).scheme if self.url is not None else ""
        if self.mode == "sentinel" and not self.nodes:
            raise SettingsError('mode "sentinel" needs nodes', cure="HOST:PORT of the Sentinels")
        if self.mode == "standalone" and self.nodes:
            cure = "for one server use url, or host and port"
            raise SettingsError('nodes are for mode "sentinel" or "cluster"', cure=cure)
        if self.mode != "standalone" and (self.unix_socket is not None or scheme == "unix"):
            raise ValueError(f'mode "{self.mode}" speaks TCP: a Unix socket reaches one server only')
        if self.mode == "cluster" and self.database:
            raise ValueError("a cluster has only database 0")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self

    # --- url and fields combined -------------------------------------------------------------------
    @property
    def database(self) -> int:
        if self.url is None:
            return self.db
        parts = urlsplit(self.url.get_secret_value())
        path = "" if parts.scheme == "unix" else parts.path.strip("/")
        return int(parse_qs(parts.query).get("db", [path or str(self.db)])[0])

    @property
    def encrypted(self) -> bool:
        return self.tls or (self.url is not None and urlsplit(self.url.get_secret_value()).scheme == "rediss")

    @property
    def socket_path(self) -> str | None:
        if self.url is not None:
            parts = urlsplit(self.url.get_secret_value())
            return unquote(parts.path) if parts.scheme == "unix" else None
        return str(self.unix_socket) if self.unix_socket is not None else None

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of the one server, or of the first node."""
        parts = urlsplit(self.url.get_secret_value()) if self.url is not None else None
        host = unquote(parts.hostname) if parts is not None and parts.hostname else self.host
        return host, parts.port if parts is not None and parts.port else self.port

    @property
    def credentials(self) -> tuple[str | None, str | None]:
        """User and password in plain text: only for the connection."""
        parts = urlsplit(self.url.get_secret_value()) if self.url is not None else None
        user = unquote(parts.username) if parts is not None and parts.username else self.username
        if parts is not None and parts.password:
            return user, unquote(parts.password)
        return user, self.password.get_secret_value() if self.password is not None else None
