"""Hints in vLLM's own envelope, attached to a request of a real engine, and executed by a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Engine, Server, is_written, prompt

from lmcache_testing.waiting import until

BLOCK = 128

HINTED = """
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
hints = KvHintsEnvelope('0.1', {message_id!r}, [KvHintAction('it', {kind!r}, '1.0', {payload!r})])
sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
engine = llm.llm_engine
engine.add_request({message_id!r}, {{'prompt_token_ids': {tokens!r}}}, sampling, kv_hints=hints)
said = []
while engine.has_unfinished_requests():
    for each in engine.step():
        if each.finished: said = list(each.outputs[0].token_ids)
"""


def hinted(engine: Engine, tokens: list[int], kind: str, message_id: str, **payload: Any) -> Any:
    return engine.run(HINTED.format(message_id=message_id, kind=kind, payload=payload, tokens=tokens))


def hints_of(server: Server) -> dict[str, Any]:
    with server.client() as client:
        found: dict[str, Any] = client.status()["operations"]["hints"]
    return found


def test_a_hint_without_objects_means_the_prompt_that_it_came_with(
    start: Callable[..., Engine], serve: Callable[..., Server], llama: Path, tmp_path: Path
) -> None:
    server = serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path))
    engine, tokens = start(llama, server.settings()), prompt(1, 900)
    (expected,) = engine.generate(tokens)
    engine.saved()
    engine.forget()
    assert hinted(engine, tokens, "kv.retain", "retain", session="s") == expected["tokens"]
    until(lambda: hints_of(server)["retained_objects"] == 7, "seven whole blocks")
    assert hinted(engine, prompt(2, 200), "kv.release", "release", session="s")
    until(lambda: hints_of(server)["retained_objects"] == 0, "the release")
    with server.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]), "the disk")
    engine.forget()
    assert hinted(engine, tokens, "kv.demote", "demote") == expected["tokens"]
    until(lambda: hints_of(server)["counts"]["accepted"] == 3, "the demotion")
    assert engine.figures()["hints_sent"] == 3


@pytest.mark.slow
def test_an_engine_whose_server_executes_no_hints_answers_as_ever(
    start: Callable[..., Engine], serve: Callable[..., Server], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CORE_PLUGINS", "")
    server = serve()
    engine, tokens = start(llama, server.settings()), prompt(3, 400)
    (expected,) = engine.generate(tokens)
    assert hinted(engine, tokens, "kv.pin", "pin") == expected["tokens"]
    until(lambda: engine.figures().get("hints_sent"), "the engine's count")
