"""A vLLM engine with one connector; reads the prompts to run from stdin. Run as a file, by either side's Python.

    python beside_driver.py '{"model": "…", "connector": {…}, "max_tokens": …, "kv_bytes": …, "threads": …}'

Each line is a JSON object, `{"do": "run", "prompt": [ids]}`, or `"answer"` with a `count` of tokens to generate, and
gets one line in reply. `"connector": null` is an engine without one. All sides run this file with the same options
except the connector; nothing else of lmcache-bench is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from typing import Any


class Engine:
    """One process; if it has no prefix cache of its own, reused tokens came through the connector."""

    def __init__(
        self,
        model: str,
        connector: dict[str, Any] | None,
        max_tokens: int,
        kv_bytes: int,
        threads: int,
        prefix_caching: bool = False,
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))[: threads or None]
        os.environ.update(
            HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        )  # fmt: skip
        transfer: dict[str, Any] | None = None
        if connector is not None:
            transfer = {**connector, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            if connector["kv_connector_module_path"].startswith("lmcache."):
                _hide_llvm()
        from vllm import LLM, SamplingParams

        self._llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=max_tokens + 128,
            kv_cache_memory_bytes=kv_bytes,
            enable_prefix_caching=prefix_caching,
            disable_log_stats=True,
            distributed_executor_backend="uni",
            seed=0,
            kv_transfer_config=transfer,
        )
        self._requests = count(1)
        self._sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)

    def run(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds to the first token, the number of reused tokens, and the token."""
        inputs: Any = [{"prompt_token_ids": prompt}]
        began_s = time.perf_counter()
        (output,) = self._llm.generate(inputs, self._sampling, use_tqdm=False)
        took_s = time.perf_counter() - began_s
        return {
            "wall_s": took_s,
            "cached_tokens": output.num_cached_tokens or 0,
            "token": int(output.outputs[0].token_ids[0]),
        }

    def answer(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Seconds to the first token, the number of reused tokens, and this many tokens."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
        inputs: Any = {"prompt_token_ids": prompt}
        began_s = time.perf_counter()
        engine.add_request(f"answer-{next(self._requests)}", inputs, sampling)
        first_s, outputs = 0.0, []
        while engine.has_unfinished_requests():
            outputs += engine.step()
            first_s = first_s or (time.perf_counter() - began_s if outputs else 0.0)
        output: Any = outputs[-1]
        return {
            "first_s": first_s,
            "cached_tokens": output.num_cached_tokens or 0,
            "tokens": [int(token) for token in output.outputs[0].token_ids],
        }


def _hide_llvm() -> None:
    """vLLM 0.32 reads the `__dict__` of every object in every module. LMCache loads llvmlite, whose library returns a
    function for any name, and that breaks vLLM."""
    from llvmlite.binding import ffi

    answer = ffi._lib_wrapper.__getattr__

    def answered(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    ffi._lib_wrapper.__getattr__ = answered


def main() -> None:
    """Answer line by line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output is not an answer

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    engine = Engine(**json.loads(sys.argv[1]))
    say({"said": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say({"said": getattr(engine, request.pop("do"))(**request)})
        except Exception as error:  # noqa: BLE001  # reported to the caller
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
