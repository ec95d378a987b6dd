from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_core import Client, Server
from lmcache_core.errors import DisconnectedError

if TYPE_CHECKING:
    import transformers

sys.path.insert(0, str(Path(__file__).parent))  # for `tiny_models` and `proving`


def tiny_llama(**changes: object) -> transformers.PreTrainedModel:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "initializer_range": 0.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
        | changes
    )
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def model() -> transformers.PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., transformers.PreTrainedModel]:
    return tiny_llama


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are slower with several threads, and very much so on a busy machine."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[int]]:
    """The tokens that a model goes on with, after what `cache` holds and then `tokens`."""
    torch = pytest.importorskip("torch")
    from lmcache_transformers import cache_argument

    def run(model: transformers.PreTrainedModel, cache: Any, tokens: list[int], count: int = 12) -> list[int]:
        out: list[int] = []
        with torch.inference_mode():
            while len(out) < count:
                logits = model(input_ids=torch.tensor([tokens]), use_cache=True, **cache_argument(model, cache)).logits
                out.append(int(logits[0, -1].argmax()))
                tokens = out[-1:]
        return out

    return run


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(l1={"size_bytes": 64 << 20, "backing": "memfd"})


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Any]:
    """A server that can be killed, and a client of it."""
    command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", f"--name=k{os.getpid()}"]
    flags = {"runtime_dir": tmp_path / "run", "state_dir": tmp_path / "state", "l1.size_bytes": 64 << 20}
    command += [f"--{name}={value}" for name, value in flags.items()] + ["--l1.backing=memfd"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
        Client.connect(f"k{os.getpid()}", runtime_dir=tmp_path / "run") as client,
    ):
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    client.noop()
                    break
                except DisconnectedError:
                    assert time.monotonic() < until, (tmp_path / "log").read_text()
                    time.sleep(0.02)
            yield server, client
        finally:
            server.kill()
