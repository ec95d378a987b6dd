"""What an engine finds depends on the content of its weights, and on no path: restarted, reloaded, with an adapter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import ROPE, Engine, Server, prompt, save_adapter, save_model

BLOCK = 128
TOKENS = prompt(11, 1000)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def answered(engine: Engine, source: str = "None") -> Any:
    """The answer and the cached tokens; what is stored is stored when this returns."""
    (found,) = engine.run(f"said = generate([{TOKENS!r}], 12, lora={source})")
    engine.saved()
    return found


def test_weights_saved_over_the_folder_find_nothing_and_a_copy_elsewhere_finds_all(
    start: Callable[..., Engine], tmp_path: Path, server: Server
) -> None:
    model = save_model(tmp_path / "model", "Llama", rope_parameters=ROPE)
    first = start(model, server.settings())
    before = answered(first)
    assert before["cached"] == 0
    first.end()

    copied = start(Path(shutil.copytree(model, tmp_path / "copy")), server.settings())
    assert answered(copied) == {**before, "cached": 7 * BLOCK}

    save_model(model, "Llama", seed=2, rope_parameters=ROPE)
    plain = start(model)
    tuned = start(model, server.settings())
    assert answered(tuned) == plain.generate(TOKENS)[0] != before
    tuned.forget()
    assert answered(tuned)["cached"] == 7 * BLOCK  # its own

    save_model(tmp_path / "copy", "Llama", seed=2, rope_parameters=ROPE)
    copied.run("llm.collective_rpc('reload_weights')\nassert llm.reset_prefix_cache(reset_connector=True)")
    assert answered(copied)["tokens"] == plain.generate(TOKENS)[0]["tokens"]
    copied.forget()
    assert answered(copied)["cached"] == 7 * BLOCK  # what the other one has stored of the same weights, or itself
    for each in (copied, plain, tuned):
        each.end()


@pytest.mark.slow
def test_weights_reloaded_from_another_folder_are_not_cached_until_the_connector_is_reset(
    start: Callable[..., Engine], tmp_path: Path, llama: Path, server: Server
) -> None:
    other = save_model(tmp_path / "other", "Llama", seed=3, rope_parameters=ROPE)
    engine = start(llama, server.settings(salt="reload"))
    answered(engine)
    engine.run(f"llm.collective_rpc('reload_weights', kwargs={{'weights_path': {str(other)!r}}})")
    engine.forget()
    (expected,) = start(other).generate(TOKENS)
    for _ in range(2):
        assert answered(engine) == expected
        engine.forget()
    engine.run("assert llm.reset_prefix_cache(reset_connector=True)")
    assert answered(engine) == expected
    engine.forget()
    assert answered(engine) == {**expected, "cached": 7 * BLOCK}
    engine.end()


def test_an_adapter_whose_files_were_replaced_finds_nothing(
    start: Callable[..., Engine], llama: Path, tmp_path: Path, server: Server
) -> None:
    options = {"enable_lora": True, "max_lora_rank": 8}
    adapter = save_adapter(tmp_path / "adapter", 1)
    request = "from vllm.lora.request import LoRARequest\nadapter = LoRARequest('one', 1, {!r})"
    first = start(llama, server.settings(salt="adapter"), **options)
    first.run(request.format(adapter))
    before = answered(first, "adapter")
    first.forget()
    assert answered(first, "adapter") == {**before, "cached": 7 * BLOCK}

    save_adapter(tmp_path / "adapter", 2)
    first.forget()
    assert answered(first, "adapter") == before  # the engine still has the old one, and nobody else is to get that
    second = start(llama, server.settings(salt="adapter"), **options)
    second.run(request.format(adapter))
    after = answered(second, "adapter")
    assert after["cached"] == 0
    assert after["tokens"] != before["tokens"]
    second.forget()
    assert answered(second, "adapter") == {**after, "cached": 7 * BLOCK}
    for each in (first, second):
        each.end()
