"""Settings of one S3 tier."""

from __future__ import annotations

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from lmcache_core.errors import SettingsError
from lmcache_core.protocol.hostport import is_base_url
from lmcache_core.settings.paths import OptionalPath
from lmcache_core.settings.sizes import Size

PREFIX_BYTES_MAX = 512  # a name has at most 1,024 bytes, and a key takes 128 of them
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()-]+(/[A-Za-z0-9!_.*'()-]+)*")


class S3Settings(BaseModel):
    """`[l2.NAME] type = "s3"`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    bucket: str = Field(
        min_length=3, examples=["lmcache"], description="The bucket. It must exist; several servers may share one."
    )
    prefix: str = Field(
        default="lmcache", description="Prefix of the objects' names. Empty: the bucket is used for nothing else."
    )
    endpoint_url: str | None = Field(
        default=None, description="The service, as in https://s3.example.com. Default: what boto3 finds, or AWS."
    )
    region: str | None = Field(default=None, description="The region. Default: what boto3 finds.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        default="auto", description="Where the bucket's name goes: into the path, or in front of the host's name."
    )
    profile: str | None = Field(default=None, description="A profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(
        default=None, description="The access key. Default: boto3's chain (environment, files, web identity, role)."
    )
    secret_access_key: SecretStr | None = Field(default=None, description="The secret of the access key.")
    session_token: SecretStr | None = Field(default=None, description="The token of temporary credentials.")
    ca_bundle: OptionalPath = Field(default=None, description="A file of certificates to trust instead of the usual.")
    verify_tls: bool = Field(default=True, description="false: trust any certificate. For tests only.")
    proxy: SecretStr | None = Field(
        default=None, description="An HTTP proxy. Default: HTTPS_PROXY, HTTP_PROXY and NO_PROXY."
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60, description="How long a connection may take to open.")
    transport: Literal["auto", "direct", "plain"] = Field(
        default="auto",
        description="How payloads move. direct: signed requests that send and fill the pool's memory; plain: boto3's "
        "calls, which copy; auto: direct, and plain where direct cannot serve.",
    )
    sign_payload: bool = Field(
        default=False,
        description="Put the SHA-256 of each payload into its signature. Costs 0.7 CPU seconds a GB; objects carry a "
        "checksum of their own either way.",
    )
    skip_existing: bool = Field(
        default=True, description="Do not upload an object that the bucket already has under the same key and layout."
    )
    ask_first_bytes: Size = Field(
        default=256 << 10,
        description="Objects of this size and more are asked for before they are uploaded; smaller ones are uploaded "
        "on the condition that they are not there.",
    )
    range_bytes: Size = Field(
        default=8 << 20,
        description="Objects larger than twice this are loaded in ranges of at least this, side by side, when "
        "connections would be idle otherwise. 0: never.",
    )
    server_side_encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = Field(
        default=None, description="Encryption by the server. Default: the bucket's."
    )
    kms_key_id: str | None = Field(default=None, description="The key for aws:kms. Default: the account's.")
    storage_class: str | None = Field(
        default=None, description="STANDARD, INTELLIGENT_TIERING, … Default: the service's."
    )

    @field_validator("prefix")
    @classmethod
    def _clean_prefix(cls, value: str) -> str:
        value = value.strip("/")
        if value and (not _PREFIX.fullmatch(value) or any(part in (".", "..") for part in value.split("/"))):
            raise ValueError(
                f"prefix {value!r} must be letters, digits and !_.*'()- in parts divided by single slashes"
            )
        if len(value) > PREFIX_BYTES_MAX:
            raise ValueError(f"prefix has {len(value)} bytes and may have {PREFIX_BYTES_MAX}")
        return value

    @field_validator("endpoint_url")
    @classmethod
    def _whole_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "@" in value:
            # No value in this message: it contains a secret.
            raise SettingsError("endpoint_url holds a password", cure="use access_key_id and secret_access_key")
        if not is_base_url(value):
            raise ValueError(f"endpoint_url must be http://HOST[:PORT] or https://HOST[:PORT], not {value!r}")
        return value

    @field_validator("bucket")
    @classmethod
    def _bare_name(cls, value: str) -> str:
        if "/" in value:
            raise SettingsError(f"bucket {value!r} must be the bare name", cure="put the rest into `prefix`")
        return value

    @property
    def is_directory_bucket(self) -> bool:
        """S3 Express: listings without an order, and a signature of its own."""
        return self.bucket.endswith("--x-s3")

    @model_validator(mode="after")
    def _bucket_once(self) -> Self:
        parts = urlsplit(self.endpoint_url or "")
        rest = (parts.hostname or "").removeprefix(f"{self.bucket.lower()}.")
        in_host = rest != (parts.hostname or "") and rest.startswith(("s3.", "s3-"))  # as consoles of services show it
        if in_host or parts.path.rstrip("/").endswith(f"/{self.bucket}"):
            cure = f"{parts.scheme}://{rest if in_host else parts.hostname}"
            message = (
                f"endpoint_url contains the bucket's name {self.bucket!r}, which would stand in each request twice"
            )
            raise SettingsError(message, cure=f"write the service alone, as {cure}")
        return self

    @model_validator(mode="after")
    def _whole_credentials(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise SettingsError("access_key_id and secret_access_key go together", cure="give both, or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.profile is not None and self.access_key_id is not None:
            raise ValueError("give a profile or an access key, not both")
        if self.kms_key_id is not None and not (self.server_side_encryption or "").startswith("aws:kms"):
            raise ValueError('kms_key_id needs server_side_encryption = "aws:kms"')
        return self
