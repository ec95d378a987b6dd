"""What this package adds to lmcache-core: the benches. Their summaries are here, so that `--help` imports no bench."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from lmcache_core import PluginInfo, hookimpl

BENCHES: dict[str, str] = {
    "all": "every bench several times, and a page of the results",
    "rpc": "round trips and two-phase calls on each carrier, against a bare echo",
    "copy": "store and retrieve end to end, against the best plain copy",
    "pages": "an engine's pages stored and retrieved, against bare strided copies of the same pages",
    "prompt": "a long prompt stored and retrieved by several workers, against pickle over ZMQ",
    "alloc": "allocate and free, up to a million residents",
    "clear": "a clear of a million objects, and what others notice of it",
    "l2": "a disk tier against plain writes and reads of the same bytes",
    "policy": "eviction policies: cost of an operation against residents",
    "serde": "codec chains against a plain copy of the same bytes",
    "hash": "the keys of a long prompt, against the bare hash loop in C and hashlib",
    "lookup": "512 hits in one call, against a dict, up to 16 million entries",
    "restart": "a million objects adopted from a dead server's pool, to the first hit",
    "engine": "time to first token of vLLM or transformers, and what traffic without reuse loses",
    "peer": "store, lookup and retrieve beside LMCache's own server, in turns",
    "transfer": "pages copied by the engine itself, and by the copier beside the server",
    "peer-tier": "objects loaded from another node's pool, against a bare socket and Redis",
    "backing": "a pool in memory, on a disk's file, and a disk tier, warm and after a restart",
    "gpu": "pages of a GPU stored and retrieved, against bare copies to pinned memory",
    "hints": "agents' sessions with and without hints before they return, replayed in real time",
    "observe": "what metrics, events, a recording and spans cost other clients, against a server without them",
    "blend": "chunks found by content and moved, prompts planned, and whether reuse lasts",
    "hooks": "a hook call against a direct method",
}


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The hook API that this was written for."""
    return PluginInfo(api=1, summary="the benches of lmcache-core")


@hookimpl
def lmcache_add_commands(benches: _SubParsersAction[Any]) -> None:
    """Add the benches; each is imported only when chosen."""
    from lmcache_core.cli.bench import add_bench

    for name, summary in BENCHES.items():
        add_bench(benches, name, summary, f"lmcache_bench.{name.replace('-', '_')}")
