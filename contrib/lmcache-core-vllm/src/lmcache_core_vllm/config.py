"""The settings in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lmcache_core.errors import SettingsError


@dataclass(frozen=True)
class ConnectorConfig:
    """Settings of one engine, with their defaults.

    `server`, `runtime_dir`, `address`: which server, as `Client.connect` takes them. `model`, `weights_version`: names
    of the model and of the state of its weights. Needed if the engine's own (its path or repository, and its revision)
    do not distinguish them, or differ between machines that should share. `salt`: a secret; engines with another share
    nothing.

    `load`: "async" (between steps) or "sync" (within the step that needs it). `load_timeout_s`: how long one load may
    take; blocks that are not there by then are computed. `lookup_timeout_s`: how long a request waits for the server to
    say what its tiers have, and to load it. `step_wait_s`: how long one step of the engine waits for the server at
    most, beside synchronous loads. `retry_s`: the longest pause after a call that the server did not answer in time; 50
    ms at first.

    `save_generated`: store blocks of generated tokens, too. `saves_in_flight`: how many steps' saves may wait for the
    server's answer; further ones are dropped, and counted. `store_cpu_share`: cores that a worker's saves may keep busy
    on average; blocks beyond that are dropped, and counted. `verify`: checksums on loads, "never", "first" or "always".
    `copy_threads`: as `Client.connect` takes it. `report_token_ids`: if the server publishes KV events, report the
    tokens of each block beside its hash. Tokens are content. `unproven_ok`: serve engines whose KV lies on a GPU, which
    no test of this package has run with.
    """

    server: str = "default"
    runtime_dir: str | None = None
    address: str | None = None
    model: str = ""
    weights_version: str = ""
    salt: str = ""
    load: str = "async"
    load_timeout_s: float = 5.0
    lookup_timeout_s: float = 1.0
    step_wait_s: float = 0.004
    retry_s: float = 1.0
    save_generated: bool = True
    saves_in_flight: int = 8
    store_cpu_share: float = 0.1
    verify: str = "never"
    copy_threads: int = 0
    report_token_ids: bool = False
    unproven_ok: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ConnectorConfig:
        """Raises `SettingsError` that names the setting and says what to give."""
        kinds = {field.name: field.default for field in fields(cls)}
        for name, value in given.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(kinds)}"
                raise SettingsError(f"kv_connector_extra_config has no setting {name!r}: {hint}")
            _check_kind(name, value, kinds[name])
        made = cls(**given)
        _check_choice("load", made.load, ("async", "sync"))
        _check_choice("verify", made.verify, ("never", "first", "always"))
        for name in (
            "load_timeout_s",
            "lookup_timeout_s",
            "step_wait_s",
            "retry_s",
            "saves_in_flight",
            "store_cpu_share",
        ):
            if getattr(made, name) <= 0:
                raise SettingsError(f"kv_connector_extra_config: {name} must be positive, got {getattr(made, name)}")
        return made


def _check_kind(name: str, value: object, default: object) -> None:
    if isinstance(default, bool):
        good, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int | float):
        good, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    else:
        good, wanted = isinstance(value, str), "a string"
    if not good:
        raise SettingsError(f"kv_connector_extra_config: {name} is {value!r}: give {wanted}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"kv_connector_extra_config: {name} is {value!r}: use {' or '.join(map(repr, choices))}")
