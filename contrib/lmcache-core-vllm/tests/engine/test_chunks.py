"""Documents that vLLM stores as chunks, found and blended by transformers, with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_request_params import REFUSED
from vllm_engines import Engine, Server, prompt

from lmcache_core import Client

pytest.importorskip("lmcache_blend._native", reason="built without C")
bridge = pytest.importorskip("lmcache_transformers", reason="lmcache-transformers is not installed here")

HEAD = prompt(99, 5)
DOCUMENTS = [prompt(seed, tokens) for seed, tokens in ((1, 160), (2, 130), (3, 100))]
QUESTION = prompt(4, 8)
STEPS = 6  # of the dtype, for each: rounded in every layer, and not in the same order


@contextmanager
def blending(folder: Path, server: Server, dtype: str, tmp_path: Path) -> Iterator[Any]:
    """A model of transformers, a client, and a generator that blends; its certificate is not the point here."""
    import torch
    import transformers

    from lmcache_transformers.blend.conditions import Conditions
    from lmcache_transformers.weights import names_of

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    name, weights = names_of(model, "", "")
    row = {
        "lossy": Conditions(0.25, 64, 1024, len(HEAD)).lossy(),
        "divergence": {"mean": 0.01, "deviation": 0.0},
        "agreement": {"mean": 1.0, "deviation": 0.0},
        "steps": [{"deviation": 100.0, "divergence": 0.01}],
    }
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps({"format": 1, "model": name, "weights": weights, "dtype": dtype, "chains": [row]}))
    how = bridge.Blending(0.25, tuple(HEAD))
    with Client.connect(server.name, runtime_dir=server.runtime_dir) as client:
        options: dict[str, Any] = {"reuse": "blend", "blending": how, "certificate": file}
        yield model, client, bridge.CachedGenerator(model, None, client, **options)


def stored(engine: Engine, *documents: list[int]) -> dict[str, Any]:
    params = {"extra_args": {"kv_transfer_params": {"store_chunk": True}}}
    engine.generate(*([*HEAD, *each] for each in documents), count=1, sampling=params)
    engine.run("assert worker.chunks.wait(20); worker.chunks.hear()")
    return {name: count for name, count in engine.figures().items() if "chunk" in name}


def check(
    folder: Path, server: Server, start: Callable[..., Engine], dtype: str, tmp_path: Path, **more: Any
) -> Engine:
    """What vLLM stores is what transformers would have computed, within the dtype's step, and is blended."""
    import torch

    from lmcache_blend.described import DescribedChunks, chunks_of
    from lmcache_transformers.blend.forward import compute, compute_chunk
    from lmcache_transformers.geometry import geometry_of
    from lmcache_transformers.room import cache_with_room

    path, step = tmp_path / "chunks.json", torch.finfo(getattr(torch, dtype)).eps
    with blending(folder, server, dtype, tmp_path) as (model, client, generator):
        generator.describe_chunks(path)
        engine = start(folder, server.settings(chunks=str(path)), dtype=dtype, max_num_batched_tokens=128, **more)
        assert stored(engine, *DOCUMENTS) == {"save_chunks": 3}
        about, geometry = DescribedChunks.read(path), geometry_of(model)
        chunks, head = chunks_of(client, about.space), cache_with_room(geometry, len(HEAD))
        compute(model, head, HEAD)
        for document in DOCUMENTS:
            mark = (len(HEAD), len(HEAD) + len(document))
            (match,) = chunks.find([*HEAD, *document], [mark], extra=bytes.fromhex(about.extra)).matches
            wanted = compute_chunk(model, geometry, head, document)
            got = [[torch.empty_like(each) for each in layer] for layer in wanted]
            assert (match.tokens, chunks.read([match], [got])) == (len(document), [True])
            for layer, right in zip(got, wanted, strict=True):
                for one, other in zip(layer, right, strict=True):
                    error = (one.float() - other.float()).square().mean() / other.float().square().mean()
                    assert float(error.sqrt()) < STEPS * max(step, 1e-6)
        moved = generator.prompt(HEAD, [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]], QUESTION)
        (what,) = generator.generate(moved, max_new_tokens=2, do_sample=False).blended
        assert (what.why, what.reused_exact + what.reused_blended + what.recomputed) == ("", 390)
        assert what.reused_exact == 100
        assert generator.store_documents(DOCUMENTS) == 0
    return engine


def test_a_marked_request_is_a_chunk_that_transformers_finds_and_blends(
    start: Callable[..., Engine], serve: Callable[..., Server], llama: Path, tmp_path: Path
) -> None:
    engine = check(llama, serve(), start, "float32", tmp_path)
    assert stored(engine, DOCUMENTS[0]) == {"save_existing_chunks": 1}  # of which the engine has the KV itself
    params: dict[str, Any] = {"store_chunk": True}
    told = engine.run(REFUSED.format(params=params, tokens=[*HEAD[1:], *DOCUMENTS[0]]))[2]
    assert "does not begin with the 5 prefix tokens" in told["lmcache_core_chunk_refused"]
    file = tmp_path / "chunks.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"weights": "others"}))
    told = engine.run(REFUSED.format(params=params, tokens=[*HEAD, *DOCUMENTS[0]]))[2]
    assert "is of another engine than this one" in told["lmcache_core_chunk_refused"]
    assert engine.figures()["save_dropped_chunks"] == 2


def test_blocks_in_half_precision_which_lie_otherwise_are_chunks_too(
    start: Callable[..., Engine], serve: Callable[..., Server], llama: Path, tmp_path: Path
) -> None:
    check(llama, serve(), start, "bfloat16", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_models_documents_are_chunks(
    start: Callable[..., Engine], serve: Callable[..., Server], tmp_path: Path, dtype: str
) -> None:
    from lmcache_transformers import smollm2

    check(smollm2.folder(), serve(), start, dtype, tmp_path, kv_bytes=256 << 20)
