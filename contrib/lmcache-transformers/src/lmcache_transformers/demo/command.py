"""The options of `lmcache-core demo`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

SUMMARY = "a model's second prompt skips its prefill: from memory, from disk, and after kills"
DESCRIPTION = """\
Starts a server with a pool and a disk tier in a temporary folder, and a small model with random weights in worker
processes: (1) one computes a long document with a question and stores its KV; (2) another asks something else
about the same document and computes only its question; (3) the same after the pool was emptied, from disk; (4)
the same after the server was killed and started again; (5) a worker is killed between prepare and commit. Every
answer must equal that of a run without a cache, token by token. Needs no network and no GPU.

The model is a Llama of transformers, or, with `--model none` and where torch is not installed, a few layers of
attention in numpy, which take half a minute."""

LAYERS = {"llama": 8, "none": 4}
NEEDED = {"llama": ("torch", "transformers"), "none": ("numpy",)}


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
        choices=("auto", "llama", "none"),
        default="auto",
        help="llama: of transformers; none: attention in numpy, without torch; auto: llama where torch and "
        "transformers are installed, else none",
    )
    parser.add_argument("--tokens", type=_positive, default=4096, help="length of the document")
    parser.add_argument("--chunk-tokens", type=_positive, default=256, help="tokens of one object")
    parser.add_argument("--answer-tokens", type=_positive, default=16, help="tokens that are compared")
    parser.add_argument(
        "--layers", type=_positive, default=argparse.SUPPRESS, help="layers of the model (default: 8; in numpy 4)"
    )
    parser.add_argument("--kv-heads", type=_positive, default=4, help="KV heads of the model, 64 wide each")
    parser.add_argument("--seed", type=int, default=7, help="seed of the weights")
    parser.add_argument("--document", default="", metavar="FILE", help="text to read; lmcache-core's source if none")
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
    if arguments.model == "auto" and _missing("torch", "transformers"):
        arguments.model = "none"
        if not _missing("numpy"):
            sys.stderr.write("torch or transformers is not installed: numpy computes (`--model llama` asks for them)\n")
    elif arguments.model == "auto":
        arguments.model = "llama"
    missing = _missing(*NEEDED[arguments.model], "lmcache_fs")
    if missing:
        packages = " ".join("./plugins/lmcache-fs" if name == "lmcache_fs" else name for name in missing)
        sys.stderr.write(f"the demo needs {', '.join(missing)}: pip install {packages}\n")
        return 2
    arguments.layers = getattr(arguments, "layers", LAYERS[arguments.model])
    from lmcache_transformers.demo.steps import demonstrate

    return demonstrate(arguments)


def _missing(*names: str) -> list[str]:
    return [name for name in names if find_spec(name) is None]
