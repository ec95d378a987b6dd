"""Blocks that the server's copier copies: the same tokens as without a cache, whoever is killed, and when."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, prompt

from lmcache_testing.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lmcache_copier") is None, reason="lmcache-copier is not installed here"),
]
BLOCK, TOKENS = 128, 1100  # eight blocks, and a rest that is always computed
PROMPTS, ROUNDS = 3, 12


def copier(server: Server) -> int:
    """Its process, once it answers."""
    with server.client() as client:
        until(lambda: client.status()["operations"]["copier"]["copier"], "the copier's figures")
        until(lambda: client.status()["helpers"]["copier"]["pid"] is not None, "the copier")
        return int(client.status()["helpers"]["copier"]["pid"])


def hits(engine: Engine, expected: list[int], tokens: list[int]) -> int:
    (found,) = engine.generate(tokens)
    assert found["tokens"] == expected
    return int(found["cached"])


@pytest.mark.parametrize("load", ["async", "sync"])
def test_an_engine_that_copies_nothing_itself_generates_the_same(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server], load: str
) -> None:
    plain, server = start(llama, enable_prefix_caching=False), serve("--copier.threads", "1")
    copier(server)
    cached = start(llama, server.settings(transfer="server", load=load))
    tokens = prompt(1, TOKENS)
    (expected,) = plain.generate(tokens)
    assert hits(cached, expected["tokens"], tokens) == 0
    cached.saved()
    cached.forget()
    cached.figures()
    assert hits(cached, expected["tokens"], tokens) == 8 * BLOCK
    assert cached.figures()["load_blocks"] == 8
    with server.client() as client:
        assert until(lambda: client.status()["operations"]["copier"]["copier"].get("jobs", 0) >= 2, "jobs of it")
    for each in (plain, cached):
        each.end()


def test_kills_of_engine_copier_and_server_at_random_change_no_answer(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server]
) -> None:
    chooser = random.Random(35)
    plain, server = start(llama, enable_prefix_caching=False), serve("--copier.threads", "1")
    copier(server)
    settings = server.settings(transfer="server", load_timeout_s=5)
    engine = start(llama, settings)
    prompts = [prompt(at, TOKENS) for at in range(PROMPTS)]
    expected = [each["tokens"] for each in plain.generate(*prompts)]
    victims = ["copier", "stopped copier", "server", "engine"] * (ROUNDS // 4)
    chooser.shuffle(victims)
    found = 0
    for victim in victims:
        which = chooser.randrange(PROMPTS)
        engine.tell(f"said = generate([{prompts[which]!r}], 12)")
        if "copier" in victim:
            os.kill(copier(server), signal.SIGSTOP if victim.startswith("stopped") else signal.SIGKILL)
        elif victim == "server":
            server.end()
            server.start()
        else:
            engine.end()
            engine = start(llama, settings)
            engine.tell(f"said = generate([{prompts[which]!r}], 12)")
        (answer,) = engine.hear()
        assert answer["tokens"] == expected[which], victim
        engine.forget()
        found += hits(engine, expected[which], prompts[which])
        engine.forget()
    copier(server)
    tokens = prompts[0]

    def served() -> bool:
        engine.forget()
        return hits(engine, expected[0], tokens) == 8 * BLOCK

    until(served, "the cache serves again")
    assert found > 0
