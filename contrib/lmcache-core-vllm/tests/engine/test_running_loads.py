"""An abort, and kills of either side, that meet a running load: a part of it is copied, the rest waits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from vllm_engines import Engine, Server, prompt

from lmcache_testing.waiting import until

BLOCK = 128
# As a load begins, its last block leaves the pool, and the server stops: the load copies the other blocks by the index,
# asks for the last one, and waits.
HALF = """
import os
begin = worker.start_loads
def half(step):
    if step.loads:
        space = worker.namespaces[0]
        keys = step.hashing.keys(step.loads[0].blocks[0].hashes[-1:], space)
        found = scheduler.client.lookup(keys, namespace=space, identify=True)
        assert scheduler.client.drop(keys, namespace=space, incarnations=found.incarnations) == 1
        os.kill({pid}, {stop})
        worker.start_loads = begin
    begin(step)
worker.start_loads = half
engine = llm.llm_engine
sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
engine.add_request('half', {{'prompt_token_ids': {tokens!r}}}, sampling)
done = []
while not worker.loading:
    engine.step()
time.sleep(0.2)
for _ in range(3):
    engine.step()  # which looks at the load, and reports it if it has ended
said = [list(worker.loading), [each.job.done() for each in worker.loading.values()]]
"""
ABORTED = """
engine.abort_request([*core.scheduler.requests], internal=True)
for _ in range(100):
    if core.scheduler.has_requests(): engine.step()
said = [core.scheduler.has_requests(), scheduler.requests, len(worker.loading)]
"""
FINISHED = """
while engine.has_unfinished_requests():
    done += [each for each in engine.step() if each.finished]
said = list(done[0].outputs[0].token_ids)
"""


def load_half(engine: Engine, server: Server, tokens: list[int]) -> None:
    """Until the load stands in the middle."""
    engine.saved()
    engine.forget()
    engine.figures()
    running, over = engine.run(HALF.format(pid=server.pid, stop=int(signal.SIGSTOP), tokens=tokens))
    assert len(running) == 1
    assert over == [False]


def test_aborts_and_kills_that_meet_a_running_load(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server]
) -> None:
    server, tokens = serve(), prompt(1, 1100)
    engine = start(llama, server.settings(step_wait_s=0.05))
    (expected,) = engine.generate(tokens)

    load_half(engine, server, tokens)
    assert engine.run(ABORTED) == [False, 0, 0]
    assert engine.figures()["load_cancelled_requests"] == 1
    server.signal(signal.SIGCONT)
    engine.forget()
    assert engine.generate(tokens)[0]["tokens"] == expected["tokens"]

    load_half(engine, server, tokens)
    server.end()  # the server dies
    assert engine.run(FINISHED) == expected["tokens"]
    assert engine.figures()["load_failed_blocks"] == 1
    server.start()
    until(lambda: served(engine, tokens) == expected)

    load_half(engine, server, tokens)
    engine.end()  # the engine dies
    server.signal(signal.SIGCONT)
    with server.client() as client:
        until(lambda: client.status()["deaths"] >= 1)
        leases = client.status()["l1"]["leases_by_kind"]
    assert (leases["read"], leases["promise"]) == (0, 0)
    another = start(llama, server.settings())
    assert another.generate(tokens)[0] == {"tokens": expected["tokens"], "cached": 7 * BLOCK}
    another.end()


def served(engine: Engine, tokens: list[int]) -> dict[str, object]:
    """The answer, except for how much of it was cached, once all of it was."""
    engine.saved()
    engine.forget()
    (found,) = engine.generate(tokens)
    return {"tokens": found["tokens"], "cached": 0} if found["cached"] == 8 * BLOCK else {}
