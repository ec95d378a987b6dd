"""Where it listens, who may read, and who may make changes."""

from __future__ import annotations

import ipaddress
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lmcache_core.errors import SettingsError
from lmcache_core.protocol.hostport import bare_host
from lmcache_core.settings.paths import OptionalPath


class HttpSettings(BaseModel):
    """The table `[http]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    host: str = Field(
        default="127.0.0.1", description="address to listen on; any address but loopback needs token_file"
    )
    port: int = Field(default=8080, ge=0, le=65535, description="port to listen on")
    unix_socket: OptionalPath = Field(default=None, description="listen on this Unix socket instead")
    token_file: OptionalPath = Field(
        default=None,
        description="file with the bearer token that allows reading and changes; without it nothing can be changed",
    )
    read_token_file: OptionalPath = Field(
        default=None, description="file with the bearer token that allows only reading"
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="host names that clients may use, besides host and loopback's"
    )
    require_tiers: Literal["none", "any", "all"] = Field(
        default="none", description="which tiers must be usable for /readyz to succeed"
    )
    tls_cert_file: OptionalPath = Field(default=None, description="certificate chain, PEM; enables TLS")
    tls_key_file: OptionalPath = Field(default=None, description="its private key, PEM")

    @field_validator("host")
    @classmethod
    def _bare(cls, value: str) -> str:
        return bare_host(value)

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.unix_socket is None and not is_loopback(self.host) and self.token_file is None:
            cure = "set http.token_file, or listen on 127.0.0.1"
            raise SettingsError(f"host {self.host!r} is not a loopback address", cure=cure)
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise SettingsError("TLS needs both", cure="set http.tls_cert_file and http.tls_key_file")
        return self


def is_loopback(host: str) -> bool:
    """Whether nobody from another machine can connect there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
