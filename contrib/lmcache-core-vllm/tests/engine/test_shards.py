"""KV that one tensor-parallel size stored, another one finds: greedy answers are the same both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_prefill import computing, decoding, heard
from vllm_engines import ROPE, Engine, EngineError, Server, prompt, save_model

from lmcache_testing.waiting import until

BLOCK = 128
HERE, THERE = prompt(31, 1000), prompt(32, 900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four_heads")
    return save_model(folder, "Llama", rope_parameters=ROPE, num_key_value_heads=4)


def of_ranks(start: Callable[..., Engine], model: Path, settings: Any, ranks: int, **options: Any) -> Engine:
    bind = "|".join(str(rank % 2) for rank in range(ranks))
    options |= {"tensor_parallel_size": ranks, "bind": bind} if ranks > 1 else {}
    return start(model, settings, processes=True, **options)


def found_again(engine: Engine, tokens: list[int]) -> list[int]:
    """The answer, once all whole blocks of the prompt come from the cache: the last answer to a save may be on its
    way."""
    found: list[Any] = []

    def again() -> bool:
        engine.forget()
        found[:] = engine.generate(tokens)
        return bool(found[0]["cached"] == (len(tokens) - 1) // BLOCK * BLOCK)

    until(again)
    return list(found[0]["tokens"])


@pytest.mark.slow
def test_ranks_of_any_number_find_what_others_stored(
    start: Callable[..., Engine], model: Path, serve: Callable[..., Server]
) -> None:
    settings = serve().settings(kv_shards=4, store_cpu_share=4)
    two = of_ranks(start, model, settings, 2)
    here = two.generate(HERE)[0]["tokens"]
    assert found_again(two, HERE) == here

    one = of_ranks(start, model, settings, 1)
    (first,) = one.generate(HERE)
    assert first == {"tokens": here, "cached": 7 * BLOCK}  # without having computed it
    there = one.generate(THERE)[0]
    assert there["cached"] == 0
    assert found_again(one, THERE) == there["tokens"]
    one.end()

    two.forget()
    assert two.generate(THERE) == [{"tokens": there["tokens"], "cached": 7 * BLOCK}]
    two.end()

    plain = of_ranks(start, model, None, 1)
    assert [each["tokens"] for each in plain.generate(HERE, THERE)] == [here, there["tokens"]]
    plain.end()

    four = of_ranks(start, model, settings, 4)
    assert four.generate(HERE) == [{"tokens": here, "cached": 7 * BLOCK}]
    four.forget()
    assert four.generate(THERE) == [{"tokens": there["tokens"], "cached": 7 * BLOCK}]
    four.end()


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "ranks"), [(0, 2), (4, 1)], ids=["two and two", "two and one"])
def test_an_engine_goes_on_with_what_two_ranks_compute(
    start: Callable[..., Engine], model: Path, serve: Callable[..., Server], shards: int, ranks: int
) -> None:
    """Each rank stores what it has of a block, and a block is there once all of them have. With shards the engine that
    decodes may have another number of ranks."""
    server = serve()
    settings = server.settings(kv_shards=shards, prefill_timeout_s=120)
    prefill = of_ranks(start, model, settings, 2, role="kv_producer", max_num_batched_tokens=2 * BLOCK)
    decode = of_ranks(start, model, settings, ranks, role="kv_consumer")
    decoding(decode, HERE, transfer_id="1")
    computing(prefill, HERE, transfer_id="1")
    params, found = heard(prefill)["params"], heard(decode)
    assert params["remote_num_tokens"] == 7 * BLOCK
    assert found["cached"] == 7 * BLOCK
    computing(prefill, THERE, transfer_id="2")  # and one after the other, as other routers have it
    decoding(decode, THERE, params=heard(prefill)["params"])
    there = heard(decode)  # of which vLLM says how many tokens the first engine had cached
    with server.client() as client:
        assert client.status()["traffic"]["retrieves"]["hits"] == 2 * 7 * (shards or ranks)
    prefill.end()
    decode.end()
    plain = of_ranks(start, model, None, 1)
    assert [each["tokens"] for each in plain.generate(HERE, THERE)] == [found["tokens"], there["tokens"]]
    plain.end()


@pytest.mark.slow
def test_zeroed_shards_change_the_answer(
    start: Callable[..., Engine], model: Path, serve: Callable[..., Server]
) -> None:
    """So what was read for the last shard does answer. Loads within the step have all shards of a layer in time."""
    engine = start(model, serve().settings(kv_shards=4, store_cpu_share=4, load="sync"))
    (expected,) = engine.generate(HERE)
    engine.saved()
    engine.forget()
    assert engine.generate(HERE) == [{**expected, "cached": 7 * BLOCK}]
    engine.forget()
    engine.run(
        "begin = worker.start_loads\n"
        "def zeroing(step):\n"
        "    begin(step)\n"
        "    if worker.step_load is None: return\n"
        "    worker.step_load.job.wait()\n"
        "    for blocks in worker.step_load.load.blocks:\n"
        "        for layer in worker.memory[0]:\n"
        "            layer.regions[0].buffer[blocks.block_ids, 3] = 0\n"
        "worker.start_loads = zeroing"
    )
    (wrong,) = engine.generate(HERE)
    assert wrong["cached"] == 7 * BLOCK
    assert wrong["tokens"] != expected["tokens"]
    engine.end()


@pytest.mark.slow
def test_an_engine_whose_kv_is_not_made_of_so_many_heads_does_not_start(
    start: Callable[..., Engine], model: Path, serve: Callable[..., Server]
) -> None:
    with pytest.raises(EngineError, match="kv_shards is 3: it has to divide the model's 4 KV heads"):
        start(model, serve().settings(kv_shards=3))
