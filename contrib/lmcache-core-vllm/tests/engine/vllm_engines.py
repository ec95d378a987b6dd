"""Engines and models for the tests: real vLLM on the CPU, random weights."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from lmcache_core.client.client import Client
from lmcache_core.pool.backing import segment_path
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

DRIVER = Path(__file__).with_name("driver.py")
VOCABULARY = 1024
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


class EngineError(AssertionError):
    """What the engine said went wrong."""


class Engine:
    """A process with an engine. It is up when this returns, or says why not."""

    def __init__(self, model: Path, connector: Json | None, *, processes: bool = False, **options: Any):
        threads = {"VLLM_CPU_OMP_THREADS_BIND": options.pop("bind", "0-1")} if (os.cpu_count() or 1) > 1 else {}
        env = {**os.environ, **threads, **options.pop("env", {})}
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes else "0"
        self._log = Path(options.pop("log"))
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, str(DRIVER), json.dumps({"model": str(model), "connector": connector, **options})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
                start_new_session=True,
            )
        try:
            assert self._line() == "ready"
        except BaseException:
            self.end()
            raise

    def _line(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise EngineError(f"the engine ended:\n{self.log[-4000:]}")
        return json.loads(line)

    @property
    def log(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text(errors="replace")

    def tell(self, source: str) -> None:
        """Have it run something, and do not wait for it: `hear` does."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"run": source}) + "\n")
        self.popen.stdin.flush()

    def hear(self) -> Any:
        """What came of it."""
        answer = self._line()
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["said"]

    def run(self, source: str) -> Any:
        """Run source in the engine's process; what it left in `said`."""
        self.tell(source)
        return self.hear()

    def generate(self, *prompts: list[int], count: int = 12, **request: Any) -> list[Json]:
        """Greedy tokens, and how many of the prompt's were not computed."""
        return self.run(f"said = generate({list(prompts)!r}, {count}, **{request!r})")  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Empty the engine's own prefix cache, which would hide ours."""
        self.run("assert llm.reset_prefix_cache()")

    def figures(self) -> dict[str, Any]:
        """What both sides of the connector have counted since they were asked."""
        source = "scheduler.counters.take(); worker.counters.take(); said = dict(figures); figures.clear()"
        return self.run(source)  # type: ignore[no-any-return]

    def saved(self) -> None:
        """Wait until the server has answered for all that was saved."""
        self.run("for each in worker.saving: each.job.wait(20)\nworker.hear_saves()")

    def end(self) -> None:
        """Kill it, and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, 9)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens, always the same ones."""
    chooser = random.Random(seed)
    return [chooser.randrange(1, VOCABULARY) for _ in range(tokens)]


def save_model(folder: Path, kind: str, *, seed: int = 1, **changes: Any) -> Path:
    """A small model with random weights. They are spread widely, so that what it generates depends on its KV."""
    import torch
    import transformers

    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "dtype": "float32",
        **changes,
    }
    torch.manual_seed(seed)
    made = getattr(transformers, f"{config.pop('config', kind)}Config")(**config)
    getattr(transformers, f"{kind}ForCausalLM")(made).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int) -> str:
    """A random adapter of the queries and values of `save_model`'s Llama."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    weights = {}
    for layer in range(4):
        for name, out in (("q_proj", 256), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 256)
            weights[f"{at}.lora_B.weight"] = torch.randn(out, 8)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return str(folder)


class Server:
    """`lmcache-core serve` under a name of its own, to be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.name = f"v{uuid4().hex[:10]}"
        self.runtime_dir = folder / "run"
        self._command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--log-level", "error"]
        self._command += ["--name", self.name, "--runtime_dir", str(self.runtime_dir)]
        self._command += ["--state_dir", str(folder / "state"), "--l1.size_bytes", "192MiB", *options]
        self._popen: subprocess.Popen[str] | None = None

    def start(self) -> Server:
        """Until it serves, and its pool is populated."""
        self._popen = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline(), "the server did not start"
        with self.client() as client:
            until(lambda: client.status()["pool"]["populated_bytes"] >= client.status()["l1"]["pool_bytes"])
        return self

    def client(self) -> Client:
        return Client.connect(self.name, runtime_dir=self.runtime_dir, maps_pool=False)

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def signal(self, number: int) -> None:
        assert self._popen is not None
        self._popen.send_signal(number)

    def end(self) -> None:
        """Kill it."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            assert self._popen.stdout is not None
            self._popen.stdout.close()
            self._popen = None

    def remove(self) -> None:
        """Kill it, and remove what it leaves in shared memory."""
        self.end()
        segment_path(self.name).unlink(missing_ok=True)

    def settings(self, **more: Any) -> Json:
        """What a connector is told to find it. It may wait: tests do not ask how busy the machine is."""
        patient = {"step_wait_s": 10, "lookup_timeout_s": 30, "load_timeout_s": 30}
        return {"server": self.name, "runtime_dir": str(self.runtime_dir), **patient, **more}


def is_written(stores: Json) -> bool:
    """Whether the tiers have all, by the server's status."""
    return not stores["arrived"] and not any(stores["dirty"].values()) and not stores["in_flight_bytes"]
