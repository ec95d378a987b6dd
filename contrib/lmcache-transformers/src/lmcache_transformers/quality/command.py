"""The options of `lmcache-core quality`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUMMARY = "what a serde does to a model's answers, on text of yours"
DESCRIPTION = """\
Computes the KV of a text's beginning, sends it through a chain of serdes as a tier would, and predicts what follows
from the KV that came back, beside the KV as it was. Prints for each chain: the bytes it takes; the Kullback-Leibler
divergence of the predictions, in nats a token; how often the most likely token is the same; and the perplexity. Each
has its standard deviation over the windows that were measured.

A chain is named with commas between its serdes, and with colons before their settings: int8, or fp8,zstd, or
int8:group_tokens=32. One that returns the same bytes shows a divergence of zero, which tests the measurement.

--certificate FILE writes what was measured for the server: a tier with l2.NAME.require_certificate = "FILE" starts if
its lossy serdes are in it, and takes KV of this model alone."""


def _count(least: int) -> Any:
    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return count


def add_command(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `quality` to the commands of `lmcache-core`."""
    parser = subparsers.add_parser(
        "quality",
        help=SUMMARY,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder that transformers can load, or smollm2 for the model of the demo"
    )
    parser.add_argument("--document", nargs="+", required=True, metavar="FILE", help="text to read, one after another")
    parser.add_argument("--serde", nargs="+", required=True, metavar="CHAIN", dest="chains", help="chains to measure")
    parser.add_argument(
        "--context", type=_count(1), default=768, metavar="TOKENS", help="tokens whose KV is sent (default: 768)"
    )
    parser.add_argument(
        "--predict", type=_count(1), default=128, metavar="TOKENS", help="tokens that are predicted (default: 128)"
    )
    parser.add_argument(
        "--chunk-tokens", type=_count(1), default=256, metavar="TOKENS", help="of one object (default: 256)"
    )
    parser.add_argument("--windows", type=_count(1), default=16, metavar="N", help="windows at most (default: 16)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the model and its KV (default: bfloat16)",
    )
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="write a certificate, for require_certificate")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 once everything is measured."""
    needed = ("torch", "transformers", *(("gguf", "accelerate") if arguments.model == "smollm2" else ()))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"quality needs {', '.join(missing)}: pip install {' '.join(missing)}\n")
        return 2
    from lmcache_core.files import replace_file
    from lmcache_transformers.quality.measure import measure

    report = measure(arguments)
    if arguments.certificate is not None:
        replace_file(arguments.certificate, json.dumps(asdict(report), indent=2).encode() + b"\n")
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    print(
        f"{report.model}, {report.layout}: {report.windows} windows of {report.context_tokens} + "
        f"{report.predicted_tokens} tokens\n"
        "| chain | bytes | divergence | same token | perplexity |\n|---|---|---|---|---|\n"
        f"| unchanged | 1 | 0 | 1 | {report.perplexity_unchanged:.2f} |"
    )
    for each in report.chains:
        print(
            f"| {each.chain} | {each.size:.3f} | {each.divergence:.4f} | {each.agreement:.4f} | {each.perplexity:.2f} |"
        )
    return 0
