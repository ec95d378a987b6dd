"""The options of `lmcache-core quality`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_transformers.quality.measure import Report

SUMMARY = "what a serde, or blending, does to a model's answers"
DESCRIPTION = """\
Computes the KV of a text's beginning, sends it through a chain of serdes as a tier would, and predicts what follows
from the KV that came back, beside the KV as it was. Prints for each chain: the bytes it takes; the Kullback-Leibler
divergence of the predictions, in nats a token; how often the most likely token is the same; and the perplexity. Each
has its standard deviation over the windows that were measured.

A chain is named with commas between its serdes, and with colons before their settings: int8, or fp8,zstd, or
int8:group_tokens=32. One that returns the same bytes shows a divergence of zero, which tests the measurement.

--blend SHARE measures reuse="blend" of CachedGenerator: prompts of several documents, each computed in full and over
moved KV of which this share of the tokens is recomputed. Prints the divergence, the cosine of the logits, how often the
most likely token is the same, and how often the whole greedy answer is. 1 recomputes everything, which tests the
measurement. Without --prompts, documents and questions are made of the docstrings of Python's own library and of
Debian's licences, as they are installed here: of documents that stand apart, that continue each other, and that refer
to each other.

--certificate FILE writes what was measured: a tier with l2.NAME.require_certificate = "FILE" starts if its lossy serdes
are in it, and takes KV of this model alone; reuse="blend" needs one for its share and chunks."""


def _count(least: int) -> Any:
    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return count


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return share


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
    parser.add_argument("--document", nargs="+", metavar="FILE", help="text to read for serdes, one after another")
    parser.add_argument("--serde", nargs="+", default=[], metavar="CHAIN", dest="chains", help="chains to measure")
    parser.add_argument(
        "--blend", nargs="+", type=_share, default=[], metavar="SHARE", dest="shares", help="shares to measure, 0 to 1"
    )
    parser.add_argument(
        "--context", type=_count(1), default=768, metavar="TOKENS", help="tokens whose KV is sent (default: 768)"
    )
    parser.add_argument(
        "--predict", type=_count(1), default=128, metavar="TOKENS", help="tokens that are predicted (default: 128)"
    )
    parser.add_argument(
        "--chunk-tokens",
        nargs="+",
        type=_count(1),
        default=[256],
        metavar="TOKENS",
        help="of one object, or of the chunks that are blended, of which there may be several (default: 256)",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with documents and question, to blend")
    parser.add_argument(
        "--documents", nargs="+", type=_count(2), default=[2, 4], metavar="N", help="of a prompt (default: 2 4)"
    )
    parser.add_argument(
        "--each",
        type=_count(1),
        default=4,
        metavar="N",
        help="prompts of each number and kind of documents (default: 4)",
    )
    parser.add_argument(
        "--each-tokens",
        type=_count(1),
        metavar="TOKENS",
        help="of all those prompts together at most: fewer than --each of the long ones, and one at least",
    )
    parser.add_argument(
        "--prefix-tokens",
        type=_count(0),
        metavar="N",
        help="of a prompt's beginning, behind which a document is computed (default: all)",
    )
    parser.add_argument(
        "--outcomes",
        type=Path,
        metavar="FILE",
        help="write what was measured of each prompt to FILE at once; prompts that are in it are not measured again",
    )
    parser.add_argument(
        "--answer", type=_count(1), default=12, metavar="TOKENS", help="tokens of an answer to a prompt (default: 12)"
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
    wrong = _wrong(arguments)
    if wrong:
        sys.stderr.write(f"{wrong}\n")
        return 2
    needed = ("torch", "transformers", *(("gguf", "accelerate") if arguments.model == "smollm2" else ()))
    needed += ("lmcache_blend",) if arguments.shares else ()
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"quality needs {', '.join(missing)}: pip install {' '.join(missing).replace('_', '-')}\n")
        return 2
    from lmcache_core.files import replace_file
    from lmcache_transformers.quality.measure import measure

    report = measure(arguments)
    if arguments.certificate is not None:
        replace_file(arguments.certificate, json.dumps(asdict(report), indent=2).encode() + b"\n")
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    _print(report)
    return 0


def _wrong(arguments: argparse.Namespace) -> str:
    """Why these options do not go together; empty if they do."""
    if not arguments.chains and not arguments.shares:
        return "nothing to measure: give --serde or --blend"
    if arguments.chains and not arguments.document:
        return "serdes are measured on text of yours: give --document"
    if arguments.chains and len(arguments.chunk_tokens) > 1:
        return "several --chunk-tokens are for --blend alone: measure serdes by themselves"
    return ""


def _print(report: Report) -> None:
    chains: list[Any] = [each for each in report.chains if hasattr(each, "perplexity")]
    blends: list[Any] = [each for each in report.chains if not hasattr(each, "perplexity")]
    if chains:
        print(
            f"{report.model}, {report.layout}: {report.windows} windows of {report.context_tokens} + "
            f"{report.predicted_tokens} tokens\n"
            "| chain | bytes | divergence | same token | perplexity |\n|---|---|---|---|---|\n"
            f"| unchanged | 1 | 0 | 1 | {report.perplexity_unchanged:.2f} |"
        )
    for each in chains:
        print(
            f"| {each.chain} | {each.size:.3f} | {each.divergence:.4f} | {each.agreement:.4f} | {each.perplexity:.2f} |"
        )
    if blends:
        print(
            f"{report.model}, {report.dtype}\n"
            "| blended | prompts | divergence | cosine | same token | same answer |\n|---|---|---|---|---|---|"
        )
    for each in blends:
        print(
            f"| {each.chain} | {each.prompts} | {each.divergence:.4f} | {each.cosine:.4f} | {each.agreement:.4f} | "
            f"{each.same_answer.mean:.2f} |"
        )
        for part in each.parts:
            print(
                f"| … {part.documents} documents, {part.kind} | {part.prompts} | {part.divergence:.4f} | | "
                f"{part.agreement:.4f} | {part.same_answer.mean:.2f} |"
            )
