"""Documents that were seen before, in a new order: computed in full, ordered by the planner, and blended.

    pip install ./core ./plugins/lmcache-blend './contrib/lmcache-transformers[smollm2]'
    python examples/documents_in_a_new_order.py

Starts a server, stores documents made of Python's docstrings, and prints for each way: seconds to the first token, what
was reused, and how far the first token's probabilities are from those of the full computation. Blending needs a
certificate: without `--certificate` one is made from this prompt alone, which says nothing of others.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmcache_blend import Planner
from lmcache_core import Client, Server, make_settings
from lmcache_core.cli.main import main as lmcache_core
from lmcache_transformers import Blending, CachedGenerator, Generated, MarkedPrompt, smollm2
from lmcache_transformers.geometry import geometry_of
from lmcache_transformers.quality.blending import frame_of
from lmcache_transformers.quality.prompts import Prompt, make_prompts, shipped
from lmcache_transformers.weights import computed_by

ONE_TOKEN = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


class Seconds(NamedTuple):
    """To the first token: on the clock, and of this process's CPU time, which other work changes less."""

    clock: float
    cpu: float


def timed(generator: CachedGenerator, prompt: MarkedPrompt) -> tuple[Seconds, Generated]:
    clock, cpu = time.perf_counter(), time.process_time()
    made = generator.generate(prompt, **ONE_TOKEN)
    return Seconds(time.perf_counter() - clock, time.process_time() - cpu), made


def divergence(full: Generated, other: Generated) -> float:
    """Kullback-Leibler's, in nats, of the first token."""
    expected, found = (torch.log_softmax(each.output.logits[0][0].float(), dim=-1) for each in (full, other))
    return float((expected.exp() * (expected - found)).sum())


def row(way: str, seconds: Seconds, made: Generated, loss: float) -> None:
    what = made.blended[0] if made.blended else None
    exact = what.reused_exact if what else made.tokens_reused[0]
    blended, again = (what.reused_blended, what.recomputed) if what else (0, 0)
    note = f" ({what.why})" if what and what.why else ""
    print(
        f"| {way} | {seconds.clock:.2f} | {seconds.cpu:.2f} | {exact} | {blended} | {again} | {loss:.4f} |{note}",
        flush=True,
    )


def certified(options: argparse.Namespace, tokenizer: Any, prompt: Prompt, scratch: Path) -> Path:
    """A certificate of this prompt, its documents in the order that will be asked for."""
    chunks = prompt.chunks(frame_of(tokenizer).tokenize, options.tokens)
    texts, file = [tokenizer.decode(each) for each in reversed(chunks)], scratch / "prompts.jsonl"
    file.write_text(json.dumps({"documents": texts, "question": prompt.question}))
    measure = ["--blend", *map(str, options.share), "--chunk-tokens", str(options.tokens), "--prompts", str(file)]
    if lmcache_core(["quality", options.model, *measure, "--certificate", str(scratch / "certificate.json")]):
        raise SystemExit("no certificate could be made")
    return scratch / "certificate.json"


def run(options: argparse.Namespace, client: Client, scratch: Path) -> None:
    folder = str(smollm2.folder()) if options.model == "smollm2" else options.model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (prompt,) = make_prompts(shipped(), "apart", 1, options.documents, options.tokens)
    certificate = options.certificate or certified(options, tokenizer, prompt, scratch)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    frame, length = frame_of(tokenizer), options.tokens
    documents, question = prompt.chunks(frame.tokenize, length), frame.tail(prompt.question)

    def generator(share: float | None = None) -> CachedGenerator:
        if share is None:
            return CachedGenerator(model, tokenizer, client)
        how = Blending(share, tuple(frame.head), length, length, length, divergence_max=10, agreement_min=0)
        return CachedGenerator(model, tokenizer, client, reuse="blend", blending=how, certificate=certificate)

    exact = generator()
    blending = {share: generator(share) for share in options.share}
    blending[options.share[0]].store_documents(documents)  # each is computed by itself, once
    half = documents[: len(documents) // 2]
    exact.generate(exact.prompt(frame.head, half, question), **ONE_TOKEN)  # a prompt of before, with half of them
    print(f"{geometry_of(model).token_bytes * length:,} bytes for a document\n")
    print("| | first token, s | CPU, s | exact | blended | recomputed | divergence |\n|---|---|---|---|---|---|---|")

    order = documents[::-1]
    planner = Planner(client, exact.prefixes.namespace, exact.prefixes.chunk_tokens, extra=computed_by(model))
    plan = planner.plan(frame.head, order, question)
    seconds, made = timed(exact, exact.prompt(frame.head, [order[at] for at in plan.order], question))
    planned = ("planned, half of them in a prompt before", seconds, made)
    plan = planner.plan(frame.head, order, question)
    seconds, made = timed(exact, exact.prompt(frame.head, [order[at] for at in plan.order], question))
    again = ("planned, all of them in a prompt before", seconds, made)

    client.clear(exact.prefixes.namespace)
    asked = exact.prompt(frame.head, order, question)
    seconds, full = timed(exact, asked)
    row("in full", seconds, full, 0.0)
    for way, seconds, made in (planned, again):
        row(way, seconds, made, 0.0)  # exact, of another order: its own full computation gives the same
    for share, one in blending.items():
        client.clear(exact.prefixes.namespace)  # else the prompt above is a prefix
        seconds, made = timed(one, asked)
        row(f"blended, {share:.0%} recomputed", seconds, made, divergence(full, made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder that transformers can load (default: smollm2)")
    parser.add_argument("--documents", type=int, default=8, help="of the prompt (default: 8)")
    parser.add_argument("--tokens", type=int, default=256, help="of a document (default: 256)")
    parser.add_argument("--share", type=float, nargs="+", default=[0.05, 0.15], help="recomputed (default: 0.05 0.15)")
    parser.add_argument("--certificate", type=Path, help="of `lmcache-core quality --blend` with these shares")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = make_settings(
            name=f"blended-{os.getpid()}",
            runtime_dir=Path(scratch, "run"),
            state_dir=Path(scratch, "state"),
            l1={"size_bytes": "512MiB"},
        )
        with Server(settings).start(wait=True) as server, server.connect() as client:
            run(options, client, Path(scratch))


if __name__ == "__main__":
    main()
