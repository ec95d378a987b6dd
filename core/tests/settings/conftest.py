"""A stranger's plugin with settings of every sort, held in the hand rather than installed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.sizes import Size


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Region(StrEnum):
    NORTH = "north"
    SOUTH = "south"


class Retry(Frozen):
    attempts: int = 3
    pause_s: float = 0.5


class AcmeSettings(Frozen):
    bucket: str = Field(description="where objects go")
    token: SecretStr | None = Field(None, description="who we are")
    region: Region = Region.NORTH
    hosts: tuple[str, ...] = ()
    part_bytes: Size = 8 << 20
    verify: bool = True
    retry: Retry = Retry()

    @field_validator("token")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < 4:
            raise ValueError(f"{value.get_secret_value()} is too short")  # a plugin that talks too much
        return value


class GhostlySettings(Frozen):
    ghost: int = 3
    tenants: dict[str, int] = {}


class SqueezeSettings(Frozen):
    level: int = 1
    secret: SecretStr | None = None


class FollowSettings(Frozen):
    headers: Mapping[str, SecretStr] = {}


class AcmePlugin:
    @hookimpl
    def lmcache_components(self) -> Sequence[ComponentSpec]:
        return [
            ComponentSpec(Kind.L2_ADAPTER, "acme", "builtins:dict", "acme_models:AcmeSettings", "objects on Acme"),
            ComponentSpec(Kind.L2_ADAPTER, "plain", "builtins:dict"),
            ComponentSpec(Kind.EVICTION_POLICY, "ghostly", "builtins:dict", "acme_models:GhostlySettings"),
            ComponentSpec(Kind.EVICTION_POLICY, "spooky", "builtins:dict", "acme_models:GhostlySettings"),
            ComponentSpec(Kind.TRACER, "follow", "builtins:dict", "acme_models:FollowSettings"),
            ComponentSpec(Kind.SERDE, "squeeze", "builtins:dict", "acme_models:SqueezeSettings"),
        ]


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    models = types.ModuleType("acme_models")
    for model in (AcmeSettings, FollowSettings, GhostlySettings, SqueezeSettings):
        setattr(models, model.__name__, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "acme_models", models)
        found = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
        found.register(AcmePlugin(), "acme", distribution="lmcache-acme", version="1.5")
        yield found


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    """Write a settings file; its path."""

    def write(text: str) -> Path:
        path = tmp_path / "lmcache.toml"
        path.write_text(text)
        return path

    return write
