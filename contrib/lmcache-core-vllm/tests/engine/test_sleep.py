"""An engine that sleeps gives its KV's memory back, and finds in the cache what belongs to the weights it wakes with.

vLLM's CPU worker does not sleep, so the tests do to the engine what its GPU worker does (of 0.33, which tells the
connector), in the same order: the memory of all blocks is freed and allocated again, and at level 2 the weights are
lost, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import ROPE, Engine, Server, prompt, save_model

BLOCK = 128
TOKENS = prompt(21, 1000)
SLEEPS = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
connector = get_kv_transfer_group()
buffers = [region.buffer for layers in worker.memory for layer in layers for region in layer.regions]
storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in buffers}
sizes = {each: each.nbytes() for each in storages.values()}
def fall_asleep(level):
    llm.sleep(level)
    connector.unregister_kv_caches()
    for storage in sizes: storage.resize_(0)
    if level == 2:
        for each in core.model_executor.driver_worker.model_runner.model.parameters(): each.data.zero_()
def wake_up():
    for storage, size in sizes.items(): storage.resize_(size)
    for each in buffers: each.fill_(7)
    connector.restore_kv_caches()
    core.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): connector.get_handshake_metadata()})
    llm.wake_up()
"""


def answered(engine: Engine) -> Any:
    """The answer and the cached tokens; what is stored is stored when this returns, and the engine has none of it."""
    engine.forget()
    (found,) = engine.generate(TOKENS)
    engine.saved()
    engine.forget()
    return found


@pytest.mark.slow
def test_an_engine_wakes_to_the_cache_of_the_weights_that_it_has_then(
    start: Callable[..., Engine], llama: Path, tmp_path: Path, serve: Callable[..., Server]
) -> None:
    server, model = serve(), Path(shutil.copytree(llama, tmp_path / "model"))
    sleeper = start(model, server.settings())
    sleeper.run(SLEEPS)
    before = answered(sleeper)
    assert before["cached"] == 0
    sleeper.run("fall_asleep(1)")
    assert sleeper.run("said = worker.sleeps")
    another = start(model, server.settings())
    assert answered(another) == before  # vLLM clears the caches of an engine that falls asleep
    sleeper.run("wake_up()")
    assert answered(sleeper) == {**before, "cached": 7 * BLOCK}  # of the same weights

    sleeper.run("fall_asleep(2)")
    assert answered(another) == before
    save_model(model, "Llama", seed=2, rope_parameters=ROPE)
    sleeper.run("llm.collective_rpc('reload_weights')\nwake_up()")
    after = answered(sleeper)
    assert after["cached"] == 0
    assert after["tokens"] != before["tokens"]
    assert answered(sleeper) == {**after, "cached": 7 * BLOCK}
    another.end()
    anew = start(model, server.settings())
    assert answered(anew) == {**after, "cached": 7 * BLOCK}
