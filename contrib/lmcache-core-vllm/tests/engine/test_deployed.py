"""Prefill here and decode there as the page says it: two API servers, and the router of the examples."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import VOCABULARY, Server, prompt

from lmcache_testing.waiting import until

ROUTER = Path(__file__).parents[4] / "examples/prefill_decode_router.py"
START_S = 300.0  # two engines at once, on a busy machine
ANSWER_S = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def add_tokenizer(model: Path) -> None:
    """A word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(model)


class ApiServer:
    """`vllm serve`, with the processes that it starts."""

    def __init__(self, model: Path, role: str, settings: dict[str, Any], log: Path) -> None:
        self.port = free_port()
        transfer = {
            "kv_connector": "LMCacheCoreConnector",
            "kv_connector_module_path": "lmcache_core_vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port"]
        command += [str(self.port), "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"]
        command += ["--served-model-name", "m", "--max-model-len", "2048", "--max-num-batched-tokens", "256"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), "--kv-transfer-config", json.dumps(transfer)]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        self._log = log
        with log.open("wb") as file:
            self._popen = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_up(self) -> bool:
        assert self._popen.poll() is None, self._log.read_text(errors="replace")[-4000:]
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def figure(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as answer:
            found = re.findall(rf"^vllm:lmcache_core_{name}_total\{{.*\}} (.*)$", answer.read().decode(), re.M)
        return sum(map(float, found))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


@pytest.fixture
def deployed(serve: Callable[..., Server], llama: Path, tmp_path: Path) -> Iterator[tuple[ApiServer, ApiServer, str]]:
    """The engine that computes, the one that decodes, and the router's address."""
    add_tokenizer(llama)
    settings = serve().settings(prefill_timeout_s=60)
    with ExitStack() as stack:
        engines = [ApiServer(llama, role, settings, tmp_path / role) for role in ("kv_producer", "kv_consumer")]
        for engine in engines:
            stack.callback(engine.kill)
        for engine in engines:
            until(engine.is_up, f"an engine: {tmp_path}", START_S)
        command = [sys.executable, str(ROUTER), "--port", "0", "--prefill", engines[0].url, "--decode", engines[1].url]
        router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        stack.callback(router.wait)
        stack.callback(router.kill)
        assert router.stdout is not None
        stack.callback(router.stdout.close)
        yield engines[0], engines[1], f"http://{router.stdout.readline().split()[-1]}"


def ask(url: str, tokens: list[int], *, stream: bool = False) -> str:
    """Twelve words."""
    body = {"model": "m", "prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        if not stream:
            return str(json.load(answer)["choices"][0]["text"])
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["text"] for each in events)


def test_requests_to_the_router_are_answered_as_by_one_engine_also_after_a_kill(
    deployed: tuple[ApiServer, ApiServer, str],
) -> None:
    prefill, decode, router = deployed
    for number, stream in enumerate((False, True)):
        tokens = prompt(number, 900)
        assert ask(router, tokens, stream=stream) == ask(prefill.url, tokens)
    # As they come, or at once where the other engine was faster than this one's first look.
    until(lambda: decode.figure("load_blocks") == 14, "the engine's figures")
    assert decode.figure("prefill_late_blocks") == 0
    tokens = prompt(3, 900)
    prefill.kill()
    assert ask(router, tokens) == ask(decode.url, tokens)
