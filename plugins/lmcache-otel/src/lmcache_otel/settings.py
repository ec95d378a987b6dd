"""Where spans go, and which requests have some."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from lmcache_core.protocol.hostport import is_base_url
from lmcache_otel.limits import TIMEOUT_S_MAX


class OtelSettings(BaseModel):
    """Spans for OpenTelemetry, sent to a collector over OTLP (http/protobuf): the table `[otel]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    endpoint: str | None = Field(
        default=None, description="base URL of the collector, for example http://127.0.0.1:4318; none: no export"
    )
    headers: Mapping[str, SecretStr] = Field(default={}, description="headers of each request, such as a token")
    service_name: str = Field(default="lmcache-core", min_length=1, description="service.name of the spans")
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="fraction of requests that start a trace, among those that come without one",
    )
    timeout_s: float = Field(
        default=2.0,
        gt=0,
        le=TIMEOUT_S_MAX,
        allow_inf_nan=False,
        description="time limit for sending a batch to the collector",
    )

    @field_validator("endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not is_base_url(value):
            raise ValueError("write a base URL without credentials, as http://127.0.0.1:4318; secrets go into headers")
        return value

    @property
    def traces_url(self) -> str:
        """Where spans are sent: the standard's path below the base URL."""
        base = (self.endpoint or "").rstrip("/")
        return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
