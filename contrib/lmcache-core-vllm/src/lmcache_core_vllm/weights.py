"""Which weights an engine computes with: its model's, and those of the adapters that requests name.

A path does not say it. Where the engine knows a commit of a repository, that does; else the content of the files is
looked at. So weights saved over others are other weights, and equal ones at two paths are the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.errors import UsageError
from lmcache_core.tokens import weights_fingerprint
from lmcache_core_vllm.config import ConnectorConfig

log = logging.getLogger("vllm.lmcache_core")

_UNKNOWN = "?"  # equal to no fingerprint
WITHOUT_FILES = ("dummy",)  # load formats of weights that are made up


@dataclass(frozen=True)
class Weights:
    """`model` and `version` go into the namespace; `name` is what people see; `path` is what the engine calls the
    model."""

    model: str
    version: str
    name: str
    path: str


def weights_of(model_config: Any, load_format: str, config: ConnectorConfig) -> Weights:
    """By vLLM's configuration of the model: what the operator says, or the commit, or the content of the files; else
    the name alone, with a warning."""
    path, revision = str(model_config.model), model_config.revision
    name = config.model or path
    if config.weights_version:
        return Weights(name, config.weights_version, name, path)
    commit = getattr(revision, "resolved", None)  # of a repository; a folder has none
    if commit and not Path(path).exists():
        return Weights(name, str(commit), name, path)
    by_name = Weights(name, str(revision or ""), name, path)
    if config.weights_fingerprint == "off" or load_format in WITHOUT_FILES:
        return by_name
    try:
        if getattr(model_config, "model_weights", ""):  # in an object store: the folder has no more than configurations
            raise UsageError(f"the weights at {model_config.model_weights} cannot be looked at")
        version = weights_fingerprint(path, whole=config.weights_fingerprint == "whole")
    except UsageError as error:
        log.warning(
            "%s: new weights under the name %s would find the KV of old ones, unless you give each a weights_version "
            "in kv_connector_extra_config",
            error,
            name,
        )
        return by_name
    kind = ", ".join(getattr(model_config.hf_config, "architectures", None) or [type(model_config.hf_config).__name__])
    return Weights(config.model or kind, version, name, path)


class Adapters:
    """The content of LoRA adapters, as the engine has loaded them. Its block hashes have their names and paths."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._mode = config.weights_fingerprint
        self._loaded: dict[int, str] = {}  # by the engine's number for it

    def version_of(self, request: Any) -> str | None:
        """Of a `LoRARequest`, or of None for a request without an adapter: "" where nothing but its name is known. None
        if the engine may compute with other weights than those that its files have now: nothing of it may be cached."""
        if request is None or self._mode == "off":
            return ""
        path = Path(request.path).expanduser()
        if not path.is_absolute() and not path.exists():
            return ""  # a repository
        loaded, why = self._loaded.get(request.adapter_id), "its files have changed since the engine loaded it"
        try:
            now = weights_fingerprint(path, whole=self._mode == "whole")
        except UsageError as error:
            now, why = "", str(error)
        if now and (loaded is None or request.load_inplace):
            loaded = self._loaded[request.adapter_id] = now
        if now and now == loaded:
            return now
        if loaded != _UNKNOWN:
            log.warning(
                "nothing of the adapter %s is cached: %s; load it with load_inplace, or under another name",
                request.name,
                why,
            )
        self._loaded[request.adapter_id] = _UNKNOWN
        return None
