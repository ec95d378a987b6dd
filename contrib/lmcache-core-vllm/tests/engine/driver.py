"""One vLLM engine in a process of its own, told over stdin what to do, line by line. See `vllm_engines.Engine`.

    python driver.py '{"model": "…", "connector": {…} or null, …}'

Each line is a JSON object with Python source under "run"; what it leaves in `said` comes back as one line. The source
sees `llm`, `generate`, and both sides of the connector as `scheduler` and `worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from typing import Any

from lmcache_testing.embedded import Json

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints is no answer


def say(value: object) -> None:
    _out.write(json.dumps(value) + "\n")
    _out.flush()


def keep_figures(*counters: Any) -> dict[str, float]:
    """What vLLM takes of them in each step, kept for the test that asks."""
    kept: dict[str, Any] = {}

    def keeping(take: Any) -> Any:
        def taken() -> dict[str, Any]:
            found = take()
            for name, value in found.items():
                kept[name] = kept.get(name, type(value)()) + value
            return found  # type: ignore[no-any-return]

        return taken

    for each in counters:
        each.take = keeping(each.take)
    return kept


def main() -> None:
    asked = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    options = {
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": asked.pop("kv_bytes", 64 << 20),
        "dtype": "float32",  # "auto" halves it, and a near tie of two tokens falls as the chunks of the prompt do
        "max_model_len": 2048,
        "disable_log_stats": True,
        "seed": 0,
    }
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        options["distributed_executor_backend"] = "uni"
    settings, role = asked.pop("connector"), asked.pop("role", "kv_both")
    name, module = asked.pop("kv_connector", ("LMCacheCoreConnector", "lmcache_core_vllm"))
    if settings is not None:
        options["kv_transfer_config"] = {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
    llm = LLM(**(options | asked))

    def generate(prompts: list[list[int]], count: int = 12, **request: Any) -> list[Json]:
        lora, own = request.pop("lora", None), request.pop("sampling", {})
        sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True, **own)
        inputs = [{"prompt_token_ids": prompt, **request} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        return [{"tokens": list(each.outputs[0].token_ids), "cached": each.num_cached_tokens} for each in outputs]

    known: Json = {"llm": llm, "generate": generate, "SamplingParams": SamplingParams, "time": time}
    ours = settings is not None and module == "lmcache_core_vllm"
    if ours and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        known["core"] = llm.llm_engine.engine_core.engine_core
        known["scheduler"] = known["core"].scheduler.connector.scheduler
        known["worker"] = get_kv_transfer_group().worker
        known["figures"] = keep_figures(known["scheduler"].counters, known["worker"].counters)
    say("ready")
    for line in sys.stdin:
        known["said"] = None
        try:
            exec(json.loads(line)["run"], known)  # what our own tests wrote
            say({"said": known["said"]})
        except Exception:  # noqa: BLE001  # told to whoever asked
            say({"error": traceback.format_exc()})
    with contextlib.suppress(Exception):
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
