"""How long after the last block of a prompt the other engine goes on with it.

    python handover_time.py [PROMPTS]

Two real engines with a small random model. The time goes from the end of the save of the last whole block in the engine
that computes to the step in which the other one computes its first tokens. Beside it: the time from the end of that
save to the next step in one engine that does both, and the time from the first question of vLLM's scheduler to the
first step if all blocks are in the pool.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from test_prefill import BLOCK, computing, decoding, heard
from vllm_engines import ROPE, Engine, Server, prompt, save_model

NOTE_SAVES = """
save, saves = worker.save, []
def noting(step):
    save(step)
    if step.saves: saves.append(time.monotonic())
worker.save = noting
"""
NOTE_STEPS = """
step, matched, steps = scheduler.step, scheduler.match, []
asked = []
def noting(output):
    if output.total_num_scheduled_tokens: steps.append(time.monotonic())
    return step(output)
def asking(*given):
    asked.append(time.monotonic())
    return matched(*given)
scheduler.step, scheduler.match = noting, asking
"""


def main() -> None:
    """Prints milliseconds."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "model", "Llama", rope_parameters=ROPE)
        server = Server(folder).start()
        try:
            for role, tokens in (("kv_producer", 2 * BLOCK), ("kv_consumer", 4 * BLOCK), ("kv_both", 2 * BLOCK)):
                options: dict[str, Any] = {"role": role, "max_num_batched_tokens": tokens}
                salt = "alone" if role == "kv_both" else "pair"
                settings = server.settings(salt=salt, prefill_timeout_s=10, step_wait_s=0.25, store_cpu_share=4)
                engines.append(Engine(model, settings, log=folder / role, **options))
            prefill, decode, alone = engines
            for engine in (prefill, alone):
                engine.run(NOTE_SAVES)
            for engine in (decode, alone):
                engine.run(NOTE_STEPS)
            times, loads, in_one = [], [], []
            for number in range(count):
                tokens = prompt(number, 900)
                prefill.run("saves.clear()")
                decode.run("steps.clear()")
                decoding(decode, tokens, transfer_id=f"{number}")
                computing(prefill, tokens, transfer_id=f"{number}")
                heard(prefill)
                heard(decode)
                times.append(1e3 * (decode.run("said = steps[0]") - prefill.run("said = saves[-1]")))
                decode.forget()
                decode.run("steps.clear(); asked.clear()")
                decode.generate(tokens)
                loads.append(1e3 * decode.run("said = steps[0] - asked[0]"))
                alone.run("saves.clear(); steps.clear()")
                alone.generate(tokens)
                in_one.append(1e3 * alone.run("said = next(each for each in steps if each > saves[-1]) - saves[-1]"))
                alone.forget()
        finally:
            for engine in engines:
                engine.end()
            server.remove()
    rows = (("last save to first step", times), ("in one engine", in_one), ("load of a whole prompt", loads))
    for what, found in rows:
        print(f"{what}: median {statistics.median(found):.1f} ms, longest {max(found):.1f} ms, {len(found)} prompts")


if __name__ == "__main__":
    main()
