"""A tier that rounds values, under real engines: KV goes through it, and states are refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_models import MODELS
from vllm_engines import Engine, Server, is_written, prompt, save_model

from lmcache_core.cli.main import main
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_fp8")
pytest.importorskip("lmcache_fs")
BLOCK = 128
EMPTY = "for each in worker.memory[0]: each.regions[0].buffer.zero_()"
KEEP = "before = [[one.clone() for one in each.regions[0].buffer if one.any()] for each in worker.memory[0]]"
# Of each layer, how many blocks are within the bound of some block that was there before, and are not equal to it.
COMPARE = """
said = []
for was, each in zip(before, worker.memory[0], strict=True):
    near = 0
    for block in (one for one in each.regions[0].buffer if one.any()):
        for other in was:
            a, b = other.reshape(-1, 128), block.reshape(-1, 128)
            bound = (2**-4 + 2**-20) * a.abs() + 2.2e-6 * a.abs().amax(dim=1, keepdim=True)
            near += bool(((b - a).abs() <= bound).all() and not (a == b).all())
    said.append(near)
"""


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("kv")
    return serve("--l2.disk.type", "fs", "--l2.disk.path", str(folder), "--l2.disk.serde", '["fp8"]')


def test_blocks_go_through_fp8_and_come_back_within_its_bound(
    start: Callable[..., Engine], llama: Path, server: Server
) -> None:
    cached = start(llama, server.settings())
    tokens = prompt(1, 1000)
    cached.run(EMPTY)
    cached.generate(tokens)
    cached.saved()
    with server.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
        status = client.status()
        (tier,) = status["tiers"]["tiers"]
        assert tier["objects"] == 7
        assert tier["bytes_used"] < 0.27 * 7 * BLOCK * 4 * 2 * 2 * 64 * 4  # of float32: a quarter, and scales
        client.clear(None)  # the L1 alone
    cached.forget()
    cached.run(f"{KEEP}\n{EMPTY}")
    cached.figures()
    (found,) = cached.generate(tokens)
    assert found["cached"] == 7 * BLOCK
    assert cached.figures()["load_blocks"] == 7
    assert all(near >= 7 for near in cached.run(COMPARE))
    cached.end()


def test_states_are_refused_in_words_and_the_engine_computes(
    start: Callable[..., Engine], tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, changes, options, _ = MODELS["granite"]
    model = save_model(tmp_path / "granite", kind, **changes)
    cached = start(model, server.settings(), **options)
    tokens = prompt(2, 700)
    first, second = cached.generate(tokens), cached.generate(prompt(3, 700))
    assert first[0]["cached"] == second[0]["cached"] == 0
    assert "nothing of" in cached.log
    assert "fp8 takes bfloat16, float16, float32" in cached.log
    assert "Traceback" not in cached.log
    cached.end()
    flags = ["--name", server.name, "--runtime_dir", str(server.runtime_dir)]
    assert main(["check", "--engine", "vllm", "--json", *flags]) == 1
    (bad,) = [each for each in json.loads(capsys.readouterr().out)["findings"] if not each["ok"]]
    assert "cannot store objects of uint8" in bad["message"]
    assert bad["cure"].startswith("change l2.disk.serde")
