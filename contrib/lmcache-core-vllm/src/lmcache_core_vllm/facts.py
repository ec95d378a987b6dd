"""What vLLM's configuration says about groups and ranks, and everything that the bytes of a block depend on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpecKind, get_kv_cache_spec_kind, iter_layer_specs

from lmcache_core.errors import SettingsError
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import Hashing

KINDS = {
    KVCacheSpecKind.FULL_ATTENTION: Kind.FULL,
    KVCacheSpecKind.MLA_ATTENTION: Kind.FULL,
    KVCacheSpecKind.SLIDING_WINDOW: Kind.WINDOW,
    KVCacheSpecKind.MAMBA: Kind.STATE,
}


def groups_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[Group]:
    """The engine's KV groups. Raises `SettingsError` for kinds that cannot serve every prefix again."""
    given = kv_cache_config.kv_cache_groups
    if tuple(kv_cache_config.prefix_cacheable_group_ids) != tuple(range(len(given))):
        raise SettingsError("some KV groups of this model cannot be cached by prefix: use it without this connector")
    hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
    made = []
    for number, group in enumerate(given):
        spec = group.kv_cache_spec
        found = get_kv_cache_spec_kind(spec)
        if found not in KINDS:
            raise SettingsError(
                f"KV group {number} is of the kind {found.value!r}, and lmcache-core-vllm knows "
                f"{', '.join(each.value for each in KINDS)}: use this model without the connector"
            )
        if KINDS[found] is Kind.STATE and any(each.mamba_cache_mode != "align" for each in iter_layer_specs(spec)):
            raise SettingsError(
                "states are kept for the whole request only: start vLLM with --enable-prefix-caching and "
                "--mamba-cache-mode align, or without this connector"
            )
        window = _window(iter_layer_specs(spec)) if KINDS[found] is Kind.WINDOW else 0
        made.append(Group(number, KINDS[found], spec.block_size, spec.block_size // hash_tokens, window))
    return made


def _window(specs: Iterable[Any]) -> int:
    return max(int(spec.sliding_window) for spec in specs)


def check_supported(vllm_config: VllmConfig) -> None:
    """Raises `SettingsError` for settings that would give wrong results, or crash the engine later."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise SettingsError(
            'kv_load_failure_policy is "fail": a block that is evicted before it is read would fail its request; set '
            '"kv_load_failure_policy": "recompute" in the kv_transfer_config'
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        raise SettingsError(
            f"speculative decoding by {speculative.method!r} keeps KV of a second model: use it without this connector"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise SettingsError(f"{name} splits the tokens of a block over ranks: use it without this connector")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise SettingsError("calculate_kv_scales makes scales of the first prompt: KV of two engines would not agree")


def hashing_of(vllm_config: VllmConfig) -> Hashing:
    """How vLLM makes block hashes. Call it after vLLM has chosen its seed: in the scheduler's process, at the first
    request."""
    return Hashing(vllm_config.cache_config.prefix_caching_hash_algo, get_none_hash_seed())


def model_name(vllm_config: VllmConfig, config: ConnectorConfig) -> str:
    """The operator's name of the model."""
    return config.model or str(vllm_config.model_config.model)


def weights_version(vllm_config: VllmConfig, config: ConnectorConfig) -> str:
    """The state of its weights."""
    return config.weights_version or str(vllm_config.model_config.revision or "")


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """What the KV of all layers depends on, in addition to the names of the model and its weights."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "vllm": vllm.__version__,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "architecture": json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        "max_model_len": str(model.max_model_len) if _stretches(model.hf_config) else "",
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "hash_block_tokens": str(kv_cache_config.hash_block_size),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def _stretches(hf_config: Any) -> bool:
    """Whether positions depend on the longest prompt that is allowed."""
    return any(kind in json.dumps(hf_config.to_dict(), default=str) for kind in ('"dynamic"', '"longrope"'))


def group_facts(vllm_config: VllmConfig, group: Any, layers: Sequence[str]) -> dict[str, str]:
    """What the blocks of one group contain, and which backends write them."""
    modules = vllm_config.compilation_config.static_forward_context
    specs = sorted({repr(spec) for spec in iter_layer_specs(group.kv_cache_spec)})
    return {
        "block_tokens": str(group.kv_cache_spec.block_size),
        "spec": "\n".join(specs),
        "layers": "\n".join(layers),
        "backend": "\n".join(sorted({backend_of(modules.get(name)) for name in layers})),
    }


def backend_of(module: Any) -> str:
    """The attention backend of a layer, with the variant for this processor that decides how K lies in a block."""
    if module is None:
        return ""
    backend = getattr(module, "get_attn_backend", None)
    name = backend().get_name() if backend is not None else type(module).__name__
    return f"{name}/{getattr(module, 'isa', '')}"
