"""Conversations that several engines are asked in turns, with engines that only remember."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_bench.engine import turns
from lmcache_bench.engine.turns import ALONE, ANSWER_TOKENS, DICT, KINDS, OURS, Talk
from lmcache_core.cli.bench.harness import Bench

TALK = Talk(3, 4, 10)


class Memory:
    """Has every token of every prompt that it was asked before; each new one takes a second."""

    def __init__(self, word: int, keeps: bool) -> None:
        self.asked: list[list[int]] = []
        self._word = word
        self._keeps = keeps

    def ask(self, do: str, prompt: list[int], count: int) -> dict[str, Any]:
        assert do == "answer"
        known = [len(each) for each in self.asked if each == prompt[: len(each)]] if self._keeps else []
        cached = max(known, default=0)
        answer = [self._word] * count
        self.asked.append([*prompt, *answer] if self._keeps else prompt)
        return {"first_s": float(len(prompt) - cached), "cached_tokens": cached, "tokens": answer}


def test_every_engine_gets_the_same_text_and_the_first_ones_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "REST_S", 0.0)
    engines: dict[str, Any] = {kind: Memory(7, kind != ALONE) for kind in KINDS}
    engines[DICT]._word = 8  # answers otherwise, and finds only what it was asked itself
    bench = Bench("engine", quick=True)
    turns._Turns(engines, TALK).record(bench, "x")
    values = {each.name: each.value for each in bench.results}
    for kind in (OURS, DICT):
        assert [each[: len(other)] for each, other in zip(engines[kind].asked, engines[ALONE].asked, strict=True)][
            1:
        ] == engines[ALONE].asked[1:]
    step = TALK.question_tokens + ANSWER_TOKENS
    assert values["x: turn 1, ours: of the prompts' tokens reused"] == 0
    assert values["x: turn 4, ours: first token, median"] == TALK.question_tokens
    assert values["x: turn 4, ours: of the prompts' tokens reused"] == 3 * step / (3 * step + TALK.question_tokens)
    assert values["x: turn 4, no connector: of the prompts' tokens reused"] == 0
    assert values["x: answers of a dict that differ from no connector's"] == TALK.conversations * TALK.turns
    assert values["x: answers of ours that differ from no connector's"] == 0
    assert values[f"x: turns from the second on, ours ÷ {ALONE}, median"] < 1
