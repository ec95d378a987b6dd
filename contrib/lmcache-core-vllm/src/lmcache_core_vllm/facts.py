"""What vLLM's configuration says about groups and ranks, and everything that the bytes of a block depend on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpecKind, get_kv_cache_spec_kind, iter_layer_specs

from lmcache_core.errors import SettingsError
from lmcache_core_vllm.chunks import ChunkOffers, Shape, Write
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import Hashing
from lmcache_core_vllm.shards import check_shards, shard_spec
from lmcache_core_vllm.versions import refusal
from lmcache_core_vllm.weights import weights_of

log = logging.getLogger("vllm.lmcache_core")

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


def check_version(version: str, *, unproven_ok: bool) -> None:
    """Raises `SettingsError` for a version of vLLM that the connector does not know."""
    why = refusal(version)
    if why and not unproven_ok:
        raise SettingsError(
            f'{why}. To try it all the same, set "unproven_ok": true in kv_connector_extra_config, and compare answers '
            "with those without it"
        )
    if why:
        log.warning("%s. It goes on, because unproven_ok is set", why)


def check_speculation(speculative: Any) -> None:
    """Raises `SettingsError` for draft tokens whose making keeps KV that a block's hash does not describe."""
    if speculative is None or speculative.method in ("ngram", "suffix", "draft_model"):
        return
    why = "has not been tried with this connector"
    if speculative.use_eagle():
        why = "keeps KV of which each token's depends on the token after it, which a block's hash does not have"
    raise SettingsError(
        f"speculative decoding by {speculative.method!r} {why}: use ngram, suffix or draft_model, or no connector"
    )


def check_supported(vllm_config: VllmConfig) -> None:
    """Raises `SettingsError` for settings that would give wrong results, or crash the engine later."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise SettingsError(
            'kv_load_failure_policy is "fail": a block that is evicted before it is read would fail its request; set '
            '"kv_load_failure_policy": "recompute" in the kv_transfer_config'
        )
    check_speculation(vllm_config.speculative_config)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise SettingsError(f"{name} splits the tokens of a block over ranks: use it without this connector")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise SettingsError("calculate_kv_scales makes scales of the first prompt: KV of two engines would not agree")


def hashing_of(vllm_config: VllmConfig) -> Hashing:
    """How vLLM makes block hashes. Call it after vLLM has chosen its seed: in the scheduler's process, at the first
    request."""
    return Hashing(vllm_config.cache_config.prefix_caching_hash_algo, get_none_hash_seed())


def check_shards_of(shards: int, vllm_config: VllmConfig, kv_config: KVCacheConfig, groups: Sequence[Group]) -> None:
    """Raises `SettingsError` if this engine's KV cannot be stored in so many shards of heads."""
    specs = [spec for group in kv_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    heads, ranks = vllm_config.model_config.get_total_num_kv_heads(), vllm_config.parallel_config.tensor_parallel_size
    check_shards(shards, heads, ranks, groups, specs)


def chunk_offers(path: str, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ChunkOffers:
    """Of an engine that is told where chunks are described."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    layers = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    sizes = {(getattr(spec, "num_kv_heads", 0), getattr(spec, "head_size", 0)) for spec in specs}
    shape = Shape(layers, *sizes.pop()) if len(sizes) == 1 else None
    return ChunkOffers(path, vllm_config.model_config.hf_config.to_dict(), shape)


def chunk_layers(vllm_config: VllmConfig, kv_caches: Mapping[str, Any]) -> list[tuple[Any, Write]]:
    """The tensors of a worker's layers, in the model's order, with what writes to one of their form."""
    modules = vllm_config.compilation_config.static_forward_context

    def writer(module: Any) -> Write:
        return lambda *given: module.impl.do_kv_cache_update(module, *given)

    names = sorted(kv_caches, key=lambda name: [int(number) for number in re.findall(r"[0-9]+", name)])
    return [(kv_caches[name], writer(modules.get(name))) for name in names]


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, shards: int = 0) -> dict[str, str]:
    """What the KV of all layers depends on, in addition to the names of the model and its weights. `shards`: of heads,
    if they do not go by ranks."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "vllm": vllm.__version__,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "architecture": json.dumps(_without_path(model.hf_config.to_dict()), sort_keys=True, default=str),
        "max_model_len": str(model.max_model_len) if _stretches(model.hf_config) else "",
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(kv_cache_config.kv_cache_layout),
        "hash_block_tokens": str(kv_cache_config.hash_block_size),
        "tensor_parallel": f"any, in {shards} shards" if shards else str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def encoder_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """What the outputs of a multimodal encoder depend on, in addition to the names of the model and its weights, and to
    what is encoded and how it was processed, which vLLM's identifiers have."""
    model = vllm_config.model_config
    return {
        "vllm": vllm.__version__,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "architecture": json.dumps(_without_path(model.hf_config.to_dict()), sort_keys=True, default=str),
    }


def draft_facts(vllm_config: VllmConfig, settings: ConnectorConfig) -> dict[str, str]:
    """What the KV of a draft model's layers depends on; empty without one. They lie in the blocks of the model's."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "draft_model":
        return {}
    draft = speculative.draft_model_config
    own = replace(settings, model="", weights_version="")
    weights = weights_of(draft, str(vllm_config.load_config.load_format), own)
    return {
        "draft": f"{weights.model} {weights.version}",
        "draft dtype": f"{draft.dtype} {draft.quantization}",
        "draft architecture": json.dumps(_without_path(draft.hf_config.to_dict()), sort_keys=True, default=str),
        "draft tensor_parallel": str(speculative.draft_tensor_parallel_size),
    }


def _without_path(value: Any) -> Any:
    """A configuration without the path that it was read from, at any depth."""
    if isinstance(value, dict):
        return {name: _without_path(each) for name, each in value.items() if name != "_name_or_path"}
    return value


def _stretches(hf_config: Any) -> bool:
    """Whether positions depend on the longest prompt that is allowed."""
    return any(kind in json.dumps(hf_config.to_dict(), default=str) for kind in ('"dynamic"', '"longrope"'))


def group_facts(vllm_config: VllmConfig, group: Any, layers: Sequence[str], shards: int = 0) -> dict[str, str]:
    """What the blocks of one group contain, and which backends write them. `shards`: as above."""
    modules = vllm_config.compilation_config.static_forward_context
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if shards:
        heads = vllm_config.model_config.get_total_num_kv_heads() // shards
        specs = [shard_spec(spec, heads) for spec in specs]
    specs = sorted({repr(spec) for spec in specs})
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
