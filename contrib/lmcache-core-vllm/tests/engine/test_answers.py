"""Greedy answers with the cache equal those without it, wherever the KV comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Engine, Server, is_written, prompt

from lmcache_testing.waiting import until

BLOCK = 128


@pytest.fixture(scope="module")
def plain(start: Callable[..., Engine], llama: Path) -> Engine:
    """Without a connector."""
    return start(llama, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def disk(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path_factory.mktemp("disk")))


@pytest.fixture(scope="module", params=["async", "sync"])
def cached(request: pytest.FixtureRequest, start: Callable[..., Engine], llama: Path, disk: Server) -> Engine:
    """With one, and its own prefix cache, which tests empty; prompts are computed in chunks."""
    salt = f"of {request.param}"  # the two share nothing
    return start(llama, disk.settings(load=request.param, salt=salt), max_num_batched_tokens=512)


def asked(plain: Engine, cached: Engine, tokens: list[int], **request: Any) -> int:
    """How many tokens of the prompt came from a cache; the answer is the same as without one."""
    (expected,), (found,) = plain.generate(tokens), cached.generate(tokens, **request)
    assert found["tokens"] == expected["tokens"]
    return int(found["cached"])


def test_a_prompt_is_read_back_but_for_what_must_be_computed(plain: Engine, cached: Engine) -> None:
    tokens = prompt(1, 1500)
    assert asked(plain, cached, tokens) == 0
    cached.saved()
    cached.forget()
    assert asked(plain, cached, tokens) == 11 * BLOCK


def test_one_token_is_left_to_compute(plain: Engine, cached: Engine) -> None:
    tokens = prompt(2, 4 * BLOCK)
    asked(plain, cached, tokens)
    cached.saved()
    cached.forget()
    assert asked(plain, cached, tokens) == 3 * BLOCK


def test_another_prompt_shares_what_it_begins_with(plain: Engine, cached: Engine) -> None:
    tokens = prompt(3, 1000)
    asked(plain, cached, tokens)
    cached.saved()
    cached.forget()
    assert asked(plain, cached, tokens[:600] + prompt(4, 400)) == 4 * BLOCK


def test_what_the_engine_has_itself_is_not_read_again(plain: Engine, cached: Engine) -> None:
    tokens = prompt(5, 1200)
    asked(plain, cached, tokens)
    cached.saved()
    cached.forget()
    asked(plain, cached, tokens[:700])
    cached.figures()
    assert asked(plain, cached, tokens) == 9 * BLOCK
    assert cached.figures()["load_blocks"] == 4


def test_generated_tokens_are_saved_too(plain: Engine, cached: Engine) -> None:
    tokens = prompt(6, 250)
    (answer,) = cached.generate(tokens, count=20)
    cached.saved()
    cached.forget()
    assert asked(plain, cached, tokens + answer["tokens"]) == 2 * BLOCK


def test_many_requests_at_once(plain: Engine, cached: Engine) -> None:
    prompts = [prompt(10 + number, 300 + 150 * number) for number in range(4)]
    expected = [each["tokens"] for each in plain.generate(*prompts)]
    assert [each["tokens"] for each in cached.generate(*prompts)] == expected
    cached.saved()
    cached.forget()
    found = cached.generate(*prompts)
    assert [each["tokens"] for each in found] == expected
    assert [each["cached"] for each in found] == [(len(each) - 1) // BLOCK * BLOCK for each in prompts]


def test_blocks_come_back_from_disk(plain: Engine, cached: Engine, disk: Server) -> None:
    tokens = prompt(20, 1100)
    asked(plain, cached, tokens)
    cached.saved()
    cached.forget()
    with disk.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
        client.clear()  # of the pool
    assert asked(plain, cached, tokens) == 8 * BLOCK


def test_another_salt_of_a_request_hits_nothing(plain: Engine, cached: Engine) -> None:
    tokens = prompt(30, 700)
    asked(plain, cached, tokens, cache_salt="one")
    cached.saved()
    cached.forget()
    assert asked(plain, cached, tokens, cache_salt="two") == 0
    assert asked(plain, cached, tokens) == 0
    cached.forget()
    assert asked(plain, cached, tokens, cache_salt="one") == 5 * BLOCK


ZEROED = """
began = worker.start_loads
def zeroed(step):
    began(step)
    for loading in [*worker.loading.values(), *filter(None, [worker.step_load])]:
        loading.job.wait()
        for blocks in loading.load.blocks:
            for layer in worker.memory[blocks.group]:
                for block in blocks.block_ids:
                    layer.regions[0].buffer[block] = 0
worker.start_loads = zeroed
"""


def test_zeroed_kv_changes_the_answer(plain: Engine, cached: Engine) -> None:
    """So the answers above do depend on what was read."""
    tokens = prompt(40, 900)
    asked(plain, cached, tokens)
    cached.saved()
    cached.forget()
    cached.run(ZEROED)
    (wrong,) = cached.generate(tokens)
    cached.run("worker.start_loads = began")
    assert wrong["cached"] == 7 * BLOCK
    assert wrong["tokens"] != plain.generate(tokens)[0]["tokens"]
