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

# What they need of ours besides core: pip finds it on no index yet.
_NEEDS = {
    "lmcache-bench": ("lmcache-kv-events", "lmcache-lab", "lmcache-mock", "lmcache-testing"),
    "lmcache-peer": ("lmcache-redis",),
    "lmcache-testing": ("lmcache-mock",),
}


def suggestion(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?` for the nearest of `known`, or "" if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else ""


def install_command(requirement: str) -> str:
    """How to install one of our packages: by its name, and from a checkout, until an index has it."""
    name, bracket, extra = requirement.partition("[")
    quote = "'" if bracket else ""
    folders = [*map(_folder, _NEEDS.get(name, ())), f"{quote}{_folder(name)}{bracket}{extra}{quote}"]
    return (
        f"pip install {quote}{requirement}{quote}, or in a checkout of the repository pip install {' '.join(folders)}"
    )


def _folder(name: str) -> str:
    return "./core" if name == "lmcache-core" else f"./{'contrib' if name in _IN_CONTRIB else 'plugins'}/{name}"
