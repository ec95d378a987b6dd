"""Keys hold whatever KV depends on: over vLLM's own configuration and requests, a change of any one changes keys."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import ROPE, prompt, save_model

from lmcache_testing.embedded import Json

BLOCK = 16


class Setup:
    """An engine's configuration in vLLM's own classes, with one rank and one request, and the keys that come of it."""

    def __init__(self, model: Path) -> None:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, VllmConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        made = ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True)
        cache = CacheConfig(block_size=BLOCK, cache_dtype="auto")
        device = DeviceConfig(device="cpu")
        self.config = VllmConfig(
            model_config=made, cache_config=cache, parallel_config=ParallelConfig(), device_config=device
        )
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
        self.kv = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer.0"], spec)], kv_cache_layout="LBHNC")
        self.kv.hash_block_size = BLOCK
        self.layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="vec")
        self.config.compilation_config.static_forward_context["layer.0"] = self.layer
        self.settings: Json = {}
        self.load_format = "auto"
        self.shard, self.capability, self.seed = (0, 1), "AVX512", "0"
        self.request: Json = {}

    def keys(self, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
        import torch
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        from lmcache_core_vllm import facts
        from lmcache_core_vllm.config import ConnectorConfig
        from lmcache_core_vllm.namespaces import GroupFacts, RankFacts, namespaces_of
        from lmcache_core_vllm.weights import weights_of

        settings = ConnectorConfig.parse(self.settings)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: self.capability)
        monkeypatch.setenv("PYTHONHASHSEED", self.seed)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_fn)
        common = facts.engine_facts(self.config, self.kv)
        own = facts.group_facts(self.config, self.kv.kv_cache_groups[0], ["layer.0"])
        groups = (GroupFacts(tuple((common | own).items()), 4096),)
        weights = weights_of(self.config.model_config, self.load_format, settings)
        rank = RankFacts("", "", self.shard, True, groups).computing_with(weights)
        (namespace,) = namespaces_of(rank, settings.salt)
        request = self.made_request(kv_cache_utils.get_request_block_hasher(self.kv.hash_block_size, hash_fn))
        return facts.hashing_of(self.config).keys(request.block_hashes, namespace)

    def made_request(self, hasher: Any) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id="a",
            prompt_token_ids=prompt(1, 3 * BLOCK),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=hasher,
            **self.request,
        )


def image(identifier: str) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=0, length=8)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


def lora(name: str, path: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


def spec(setup: Setup, **changes: Any) -> None:
    group = setup.kv.kv_cache_groups[0]
    group.kv_cache_spec = replace(group.kv_cache_spec, **changes)


def blocks_of(setup: Setup, tokens: int) -> None:
    setup.config.cache_config.block_size = tokens
    spec(setup, block_size=tokens)


def dtype_of(setup: Setup) -> None:
    import torch

    setup.config.model_config.dtype = torch.bfloat16


def architecture(setup: Setup, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(setup.config.model_config.hf_config, name, value)


CHANGES: dict[str, Callable[[Setup], object]] = {
    "model": lambda setup: setattr(setup.config.model_config, "model", "another"),
    "model by setting": lambda setup: setup.settings.update(model="another"),
    "weights that are made up": lambda setup: setattr(setup, "load_format", "dummy"),
    "weights as a whole": lambda setup: setup.settings.update(weights_fingerprint="whole"),
    "weights by setting": lambda setup: setup.settings.update(weights_version="2"),
    "positions": lambda setup: architecture(setup, rope_parameters={"rope_type": "linear", "factor": 2.0}),
    "dtype": dtype_of,
    "quantization": lambda setup: setattr(setup.config.model_config, "quantization", "fp8"),
    "cache dtype": lambda setup: setattr(setup.config.cache_config, "cache_dtype", "fp8"),
    "block size": lambda setup: blocks_of(setup, 2 * BLOCK),
    "KV heads": lambda setup: spec(setup, num_kv_heads=4),
    "layout": lambda setup: setattr(setup.kv, "kv_cache_layout", "LBNHC"),
    "backend": lambda setup: setattr(
        setup.layer, "get_attn_backend", lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    ),
    "backend's variant": lambda setup: setattr(setup.layer, "isa", "amx"),
    "instruction set": lambda setup: setattr(setup, "capability", "AVX2"),
    "rank": lambda setup: setattr(setup, "shard", (1, 2)),
    "tensor parallel": lambda setup: setattr(setup.config.parallel_config, "tensor_parallel_size", 2),
    "pipeline parallel": lambda setup: setattr(setup.config.parallel_config, "pipeline_parallel_size", 2),
    "salt of the engine": lambda setup: setup.settings.update(salt="s"),
    "hash algorithm": lambda setup: setattr(setup.config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "hash seed": lambda setup: setattr(setup, "seed", "1"),
    "hash block": lambda setup: setattr(setup.kv, "hash_block_size", BLOCK // 2),
    "salt of the request": lambda setup: setup.request.update(cache_salt="s"),
    "LoRA": lambda setup: setup.request.update(lora_request=lora("a", "/a")),
    "multimodal": lambda setup: setup.request.update(mm_features=[image("one")]),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_keys_hold(name: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, changed = Setup(llama), Setup(llama)
    CHANGES[name](changed)
    assert not set(before.keys(monkeypatch)) & set(changed.keys(monkeypatch))


def test_a_repository_is_known_by_its_commit(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import ResolvedRevision

    found = []
    for commit in ("a" * 40, "b" * 40):
        setup = Setup(llama)
        setup.config.model_config.model = "organisation/model"
        setup.config.model_config.revision = ResolvedRevision(commit, repo_id="organisation/model", repo_type="model")
        found.append(set(setup.keys(monkeypatch)))
    assert not found[0] & found[1]


def test_a_copy_of_the_model_elsewhere_has_equal_keys(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(llama, tmp_path / "copy")
    assert Setup(llama).keys(monkeypatch) == Setup(copied).keys(monkeypatch)
    save_model(copied, "Llama", seed=2, rope_parameters=ROPE)
    assert not set(Setup(llama).keys(monkeypatch)) & set(Setup(copied).keys(monkeypatch))


def test_equal_engines_have_equal_keys(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Setup(llama).keys(monkeypatch) == Setup(llama).keys(monkeypatch)
    assert len(set(Setup(llama).keys(monkeypatch))) == 3


@pytest.mark.parametrize(
    "made", [lambda each: {"lora_request": lora(each, "/a")}, lambda each: {"mm_features": [image(each)]}]
)
def test_two_adapters_or_images_share_nothing(
    made: Callable[[str], Json], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Setup(llama), Setup(llama)
    one.request, two.request = made("one"), made("two")
    assert not set(one.keys(monkeypatch)) & set(two.keys(monkeypatch))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash"])
def test_every_algorithm_of_vllm_gives_keys(algorithm: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if algorithm == "xxhash":
        pytest.importorskip("xxhash")
    setup = Setup(llama)
    setup.config.cache_config.prefix_caching_hash_algo = algorithm
    assert {len(key) for key in setup.keys(monkeypatch)} == {32}
