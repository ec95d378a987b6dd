"""Settings of the serde `aesgcm`: where its keys are."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from lmcache_core.settings.paths import OptionalPath


class AesGcmSettings(BaseModel):
    """One source of keys. The first key of it encrypts; all of them decrypt."""

    # A mistyped value may be half a key: errors do not repeat it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key_file: OptionalPath = Field(
        default=None, description="File with one key a line, the current one first; # starts a comment."
    )
    key_env: str | None = Field(
        default=None,
        min_length=1,
        description="Name of an environment variable with one or more keys, the current one first.",
    )
    keys: SecretStr | None = Field(
        default=None, description="The keys themselves, the current one first, with white space or commas between."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.key_file, self.key_env, self.keys)) != 1:
            raise ValueError("give one of key_file, key_env and keys")
        return self
