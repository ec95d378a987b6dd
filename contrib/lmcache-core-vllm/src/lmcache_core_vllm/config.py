"""The settings in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lmcache_core.errors import SettingsError


@dataclass(frozen=True)
class ConnectorConfig:
    """Settings of one engine, with their defaults.

    `server`, `runtime_dir`, `address`: which server, as `Client.connect` takes them. `model`, `weights_version`: names
    of the model and of the state of its weights, instead of what the connector finds: a repository and its commit, or
    the content of the files. `weights_fingerprint`: how it tells files apart, those of LoRA adapters too: by "samples"
    of each tensor, by the "whole" content, or not at all, "off". `salt`: a secret; engines with another share nothing.

    `kv_shards`: store KV in so many shards of heads, whatever the tensor-parallel size; 0: as the ranks have it.

    `load`: "async" (between steps) or "sync" (within the step that needs it). `load_timeout_s`: how long one load may
    take; blocks that are not there by then are computed. `lookup_timeout_s`: how long a request waits for the server to
    say what its tiers have, and to load it. `step_wait_s`: how long one step of the engine waits for the server at
    most, beside synchronous loads. `retry_s`: the longest pause after a call that the server did not answer in time; 50
    ms at first.

    `prefill_timeout_s`: if another engine computes a request's prompt (`kv_transfer_params`), how long to wait for its
    next block; what has not come by then is computed.

    `save_generated`: store blocks of generated tokens, too. `saves_in_flight`: how many steps' saves may wait for the
    server's answer; further ones are dropped, and counted. `store_cpu_share`: cores that a worker's saves may keep busy
    on average; blocks beyond that are dropped, and counted. `verify`: checksums on loads, "never", "first" or "always".
    `copy_threads`: as `Client.connect` takes it. `report_token_ids`: if the server publishes KV events, report the
    tokens of each block beside its hash. Tokens are content. `transfer`: who copies blocks: this "engine", the copier
    of the "server" (lmcache-copier, for engines on the CPU), or whichever proves better, "auto". `description`: a file
    in which the engine says what its prefixes are called. `chunks`: a file in which whoever blends says what its chunks
    are called, for documents that are stored as such. `unproven_ok`: serve engines whose KV lies on a GPU, and versions
    of vLLM, which no test of this package has run with.
    """

    server: str = ""
    runtime_dir: str | None = None
    address: str | None = None
    model: str = ""
    weights_version: str = ""
    weights_fingerprint: str = "samples"
    salt: str = ""
    kv_shards: int = 0
    load: str = "async"
    load_timeout_s: float = 5.0
    lookup_timeout_s: float = 1.0
    step_wait_s: float = 0.004
    retry_s: float = 1.0
    prefill_timeout_s: float = 10.0
    save_generated: bool = True
    saves_in_flight: int = 8
    store_cpu_share: float = 0.1
    verify: str = "never"
    copy_threads: int = 0
    transfer: str = "engine"
    report_token_ids: bool = True
    description: str = ""
    chunks: str = ""
    unproven_ok: bool = False

    @classmethod
    def parse(
        cls, given: Mapping[str, Any], where: str = "kv_connector_extra_config", known: Sequence[str] = ()
    ) -> ConnectorConfig:
        """`where`: the name of the dictionary; `known`: the settings that it may have, empty for all. Raises
        `SettingsError` that names the setting and says what to give."""
        kinds = {field.name: field.default for field in fields(cls) if not known or field.name in known}
        for name, value in given.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(kinds)}"
                raise SettingsError(f"{where} has no setting {name!r}: {hint}")
            _check_kind(f"{where}: {name}", value, kinds[name])
        made = cls(**given)
        _check_choice(f"{where}: load", made.load, ("async", "sync"))
        _check_choice(f"{where}: weights_fingerprint", made.weights_fingerprint, ("samples", "whole", "off"))
        _check_choice(f"{where}: transfer", made.transfer, ("engine", "server", "auto"))
        _check_choice(f"{where}: verify", made.verify, ("never", "first", "always"))
        if type(made.kv_shards) is not int or made.kv_shards < 0:
            raise SettingsError(f"{where}: kv_shards is {made.kv_shards!r}: give a number of shards, or 0 for none")
        for name in (
            "load_timeout_s",
            "lookup_timeout_s",
            "step_wait_s",
            "retry_s",
            "prefill_timeout_s",
            "saves_in_flight",
            "store_cpu_share",
        ):
            if getattr(made, name) <= 0:
                raise SettingsError(f"{where}: {name} must be positive, got {getattr(made, name)}")
        return made


def _check_kind(name: str, value: object, default: object) -> None:
    if isinstance(default, bool):
        good, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int | float):
        good, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    else:
        good, wanted = isinstance(value, str), "a string"
    if not good:
        raise SettingsError(f"{name} is {value!r}: give {wanted}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{name} is {value!r}: use {' or '.join(map(repr, choices))}")
