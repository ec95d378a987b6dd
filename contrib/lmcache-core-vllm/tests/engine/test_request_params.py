"""What a request says in its `kv_transfer_params` about loads and stores is done, and refused where it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Engine, Server, is_written, prompt

from lmcache_testing.waiting import until

BLOCK = 128


@pytest.fixture(scope="module")
def disk(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path_factory.mktemp("disk")))


@pytest.fixture(scope="module", params=["async", pytest.param("sync", marks=pytest.mark.slow)])
def cached(request: pytest.FixtureRequest, start: Callable[..., Engine], llama: Path, disk: Server) -> Engine:
    return start(llama, disk.settings(load=request.param, salt=request.param), max_num_batched_tokens=512)


def answered(engine: Engine, tokens: list[int], **sampling: Any) -> tuple[list[int], int]:
    """The answer, and the tokens of the prompt that came from a cache; the engine's own is empty before and after."""
    engine.forget()
    (found,) = engine.generate(tokens, sampling=sampling)
    engine.saved()
    engine.forget()
    return found["tokens"], found["cached"]


def limited(engine: Engine, tokens: list[int], **params: Any) -> tuple[list[int], int]:
    return answered(engine, tokens, extra_args={"kv_transfer_params": params})


def test_no_more_tokens_are_stored_than_the_request_allows(cached: Engine) -> None:
    tokens = prompt(1, 1000)
    answer, _ = limited(cached, tokens, max_offload_tokens=3 * BLOCK + 5)
    assert answered(cached, tokens) == (answer, 3 * BLOCK)


def test_no_more_tokens_are_loaded_than_the_request_allows(cached: Engine) -> None:
    tokens = prompt(2, 1000)
    answer, _ = answered(cached, tokens)
    cached.figures()
    assert limited(cached, tokens, max_load_tokens=2 * BLOCK + 5) == (answer, 2 * BLOCK)
    assert cached.figures()["load_blocks"] == 2
    cached.generate(tokens[: 3 * BLOCK])  # what the engine has itself is not counted against the limit
    params = {"extra_args": {"kv_transfer_params": {"max_load_tokens": 2 * BLOCK}}}
    (found,) = cached.generate(tokens, sampling=params)
    assert found == {"tokens": answer, "cached": 5 * BLOCK}


def test_a_request_can_neither_read_nor_write(cached: Engine) -> None:
    tokens = prompt(3, 1000)
    answer, found = limited(cached, tokens, max_offload_tokens=0)
    assert found == 0
    assert limited(cached, tokens) == (answer, 0)  # so nothing was written; but this time it was
    assert limited(cached, tokens, max_load_tokens=0) == (answer, 0)
    assert answered(cached, tokens, skip_reading_prefix_cache=True) == (answer, 0)
    assert limited(cached, tokens) == (answer, 7 * BLOCK)


def test_only_the_tiers_that_a_request_names_are_read(cached: Engine, disk: Server) -> None:
    tokens = prompt(4, 1000)
    answer, _ = answered(cached, tokens)
    with disk.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
        client.clear()  # of the pool
    for nothing in ([], [{"medium": "CPU"}]):
        assert limited(cached, tokens, kv_load_tiers=nothing, max_offload_tokens=0) == (answer, 0)
    assert limited(cached, tokens, kv_load_tiers=[{"tier": "disk"}]) == (answer, 7 * BLOCK)
    assert limited(cached, tokens, kv_load_tiers=[]) == (answer, 7 * BLOCK)  # of the pool, which has it again


REFUSED = """
sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True,
                          extra_args={{'kv_transfer_params': {params!r}}})
(output,) = llm.generate([{{'prompt_token_ids': {tokens!r}}}], sampling, use_tqdm=False)
said = [list(output.outputs[0].token_ids), output.num_cached_tokens, output.kv_transfer_params]
"""


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"max_offload_tokens": "many"}, "max_offload_tokens is 'many': give a number of tokens, 0 or more"),
        ({"kv_load_tiers": [{"tier": "attic"}]}, "attic"),
    ],
)
def test_a_refused_request_is_computed_and_says_why_and_the_engine_goes_on(
    cached: Engine, params: dict[str, Any], why: str
) -> None:
    tokens = prompt(len(why), 1000)
    answer, _ = answered(cached, tokens[:500])
    longer, found, told = cached.run(REFUSED.format(params=params, tokens=tokens))
    assert found == 0
    assert why in told["lmcache_core_refused"]
    assert cached.figures()["params_refused_requests"] == 1
    cached.saved()
    again, found = answered(cached, tokens)
    assert again == longer
    assert found == 3 * BLOCK  # of the first 500, and nothing of what was refused
    assert answered(cached, tokens[:500]) == (answer, 3 * BLOCK)


def test_a_refused_request_takes_no_hits_from_those_beside_it(cached: Engine) -> None:
    tokens = [prompt(6, 700), prompt(7, 700)]
    cached.forget()
    expected = [each["tokens"] for each in cached.generate(*tokens)]
    cached.saved()
    cached.forget()
    cached.run(
        "common = {'temperature': 0, 'max_tokens': 12, 'detokenize': False, 'ignore_eos': True}\n"
        "bad = {'kv_transfer_params': {'kv_load_tiers': [{'tier': 'attic'}]}}\n"
        "sampling = [SamplingParams(**common, extra_args=bad), SamplingParams(**common)]"
    )
    source = f"llm.generate([{{'prompt_token_ids': each}} for each in {tokens!r}], sampling, use_tqdm=False)"
    found = cached.run(f"said = [[list(each.outputs[0].token_ids), each.num_cached_tokens] for each in {source}]")
    assert [answer for answer, _ in found] == expected
    assert found[1][1] == 5 * BLOCK
