"""Formats of blocks: another dtype, other block sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, prompt

BLOCK = 128


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.mark.slow
def test_bfloat16_blocks_answer_as_the_engines_own(start: Callable[..., Engine], llama: Path, server: Server) -> None:
    """Near ties of two tokens fall as the steps of a prompt do, so both answers go on from the same boundary: once from
    the engine's own prefix cache, and once from ours."""
    cached = start(llama, server.settings(salt="bfloat16"), dtype="bfloat16")
    tokens = prompt(1, 1000)
    cached.generate(tokens)
    cached.saved()
    (own,) = cached.generate(tokens)
    assert own["cached"] == 7 * BLOCK
    cached.forget()
    cached.figures()
    assert cached.generate(tokens) == [own]
    figures = cached.figures()
    assert figures["load_blocks"] == 7
    assert figures["load_bytes"] == 7 * BLOCK * 4 * 2 * 2 * 64 * 2  # layers, K and V, heads, head size, bytes
    cached.end()


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_smaller_blocks_are_found_to_the_last_whole_one(
    start: Callable[..., Engine], llama: Path, server: Server, size: int
) -> None:
    cached = start(llama, server.settings(), block_size=size)  # without a salt: sizes share nothing by themselves
    tokens = prompt(2, 1000)
    (expected,) = cached.generate(tokens)
    assert expected["cached"] == 0
    cached.saved()
    cached.forget()
    (found,) = cached.generate(tokens)
    assert found == {"tokens": expected["tokens"], "cached": 999 // size * size}
    cached.end()
