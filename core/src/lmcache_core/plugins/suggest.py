"""What to type instead: the nearest name, and the command that installs one of our packages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Our packages that lie in this folder of the repository; the others are in `plugins`.
_IN_CONTRIB = frozenset(
    {
        "lmcache-bench",
        "lmcache-core-vllm",
        "lmcache-hosts",
        "lmcache-l0",
        "lmcache-lab",
        "lmcache-testing",
        "lmcache-tools",
        "lmcache-transformers",
    }
)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?` for the nearest of `known`, or "" if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else ""


def install_command(requirement: str) -> str:
    """How to install one of our packages: by its name, and from a checkout, until an index has it."""
    name, bracket, extra = requirement.partition("[")
    folder = "core" if name == "lmcache-core" else f"{'contrib' if name in _IN_CONTRIB else 'plugins'}/{name}"
    quote = "'" if bracket else ""
    return (
        f"pip install {quote}{requirement}{quote}, or in a checkout of the repository "
        f"pip install {quote}./{folder}{bracket}{extra}{quote}"
    )
