"""`lmcache-core check`: would a server start here, and would it work? Prints findings with cures; exits with 1 if one
is bad."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmcache_core.cli.compose import add_settings_options, composed, print_settings_help
from lmcache_core.cli.table import print_table
from lmcache_core.errors import CacheError
from lmcache_core.plugins.components import Finding, Kind

if TYPE_CHECKING:
    from lmcache_core.plugins.records import PluginRecord
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.settings.model import Settings, TierSettings
    from lmcache_core.tiers.contract import Usage

CHECK_S = 10.0  # as the hook promises
ENGINE_CHECK_S = 60.0  # engines take long to import


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options other than settings."""
    add_settings_options(parser)
    parser.add_argument(
        "--engine", metavar="NAME", help="check whether this engine can use the running server instead: vllm"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: ok, findings")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if all is well, 1 otherwise."""
    if arguments.help:
        print_settings_help(arguments)
        return 0
    findings = list(_findings(arguments))
    well = all(finding.ok for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": well, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print_table(
            ("", "subject", "finding", "cure"),
            [(_mark(each), each.subject, each.message, each.cure) for each in findings],
        )
    return 0 if well else 1


def _mark(finding: Finding) -> str:
    """A finding that is fine but has a cure is worth a look."""
    if not finding.ok:
        return "NOT OK"
    return "look" if finding.cure else "ok"


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    registry: Registry = arguments.registry
    for refusal in registry.refused:
        # Not an error in this configuration: if the settings named it, composing them fails below.
        said = f"not in use: {refusal.distribution} {refusal.version}: {refusal.why}"
        cure = f"fix that, or pip uninstall {refusal.distribution} if nothing uses it"
        yield Finding(True, f"plugin {refusal.name}", said, cure)
    yield native_finding()
    try:
        settings = composed(arguments).settings
    except CacheError as error:
        yield Finding.of_error(
            "settings", error, "correct it where it is set: lmcache-core check --help lists all settings"
        )
        return
    yield Finding(True, "settings", f"valid: server {settings.name!r}, tiers: {', '.join(settings.l2) or 'none'}")
    if arguments.engine:
        yield from _engine(registry, arguments.engine, settings)
        return
    yield from _components(registry, settings)
    yield from _surroundings(settings)
    in_use = {registry.owner(kind, name).name: registry.owner(kind, name) for kind, name in settings.components()}
    for record in in_use.values():
        yield from asked(registry, record, settings)
    yield from _capacities(registry, settings)  # after the checks that may make a directory


def _engine(registry: Registry, name: str, settings: Settings) -> Iterator[Finding]:
    """The findings of an engine's connector plugin. The server is already running, so its start is not checked."""
    record = next((each for each in registry.plugins if each.name == name), None)
    if record is None:
        cure = f"pip install lmcache-core-{name} in the engine's environment, and run this command there"
        yield Finding(False, f"engine {name}", "no plugin of this name is in use", cure)
    else:
        yield from asked(registry, record, settings, ENGINE_CHECK_S)


def native_finding() -> Finding:
    """Whether the C extension is in use. Everything works without it, so its absence is not a failure."""
    from lmcache_core import native as extension

    if not extension.why_not:
        return Finding(True, "C extension", f"in use; SHA-256 by {extension.native.SHA256_BY}")
    return Finding(True, "C extension", f"{extension.why_not}; so {extension.COST_WITHOUT}", extension.cure())


def _components(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """Import every component that a server would import."""
    for kind, name in dict.fromkeys(settings.components()):
        try:
            registry.factory(kind, name)
        except CacheError as error:
            yield Finding.of_error(f"{kind} {name}", error, "reinstall its package, or remove it from the settings")
        else:
            yield Finding(True, f"{kind} {name}", f"from {registry.owner(kind, name)}")


def _surroundings(settings: Settings) -> Iterator[Finding]:
    from lmcache_core.pool.backing import Backing
    from lmcache_core.pool.room import check_room, room
    from lmcache_core.settings.sizes import size_text

    try:
        check_room(settings.l1.size_bytes, room(Backing(settings.l1.backing)))
        index = index_of(settings)
    except CacheError as error:
        yield Finding.of_error("l1", error, "change l1.size_bytes")
    else:
        yield Finding(True, "l1", f"{size_text(settings.l1.size_bytes)} of {settings.l1.backing} memory is available")
        yield index
    if settings.l2:
        yield _state(settings)
    yield from (_unbounded(name) for name, tier in settings.l2.items() if tier.capacity_bytes is None)


def index_of(settings: Settings) -> Finding:
    """The smallest objects for which the index can hold a whole pool, and what smaller objects would need."""
    from lmcache_core.limits import INDEX_LOAD_MAX, INDEX_OBJECT_BYTES, PAGE_BYTES
    from lmcache_core.pool.backing import Backing
    from lmcache_core.pool.header import index_entries_for, plan

    l1 = settings.l1
    header = plan("check", l1.size_bytes, Backing(l1.backing), boot_id=1, index_entries=l1.index_entries or None)
    least = int(header.data_bytes / (INDEX_LOAD_MAX * header.index_entries))
    size = f"{header.index_entries:,} entries, {header.index_bytes >> 20:,} MiB"
    said = f"{size}: enough for objects of {least:,} bytes or more"
    if least > PAGE_BYTES:
        pages = index_entries_for(header.data_bytes, PAGE_BYTES)
        said += f"; with smaller objects the index fills up before the pool does: set l1.index_entries = {pages}"
    cure = ""
    if least > INDEX_OBJECT_BYTES:
        cure = f"set l1.index_entries = {index_entries_for(header.data_bytes, INDEX_OBJECT_BYTES)}, or 0 for the same"
    return Finding(True, "index", said, cure)


def _state(settings: Settings) -> Finding:
    """Whether the epochs of the namespaces can be kept. Leaves nothing behind: the server makes what is missing."""
    from lmcache_core.limits import PAGE_BYTES

    folder = settings.state_dir
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))  # not below a closed folder
    kept = folder / f"{settings.name}.epochs"
    cure = f"make {folder} a directory that user {os.geteuid()} may read and write, or move state_dir"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(False, "state_dir", f"{there} is not writable, so clears of tiers could not be kept", cure)
    if kept.exists() and not os.access(kept, os.R_OK | os.W_OK):
        return Finding(False, "state_dir", f"{kept} is not readable and writable", cure)
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(bytes(PAGE_BYTES))
    except OSError as error:  # what no mode shows: a full or read-only file system, a quota
        return Finding(False, "state_dir", f"cannot create a file in {there}: {error.strerror}", cure)
    return Finding(True, "state_dir", f"{folder} is writable")


def _unbounded(name: str) -> Finding:
    """Not an error: the medium may have its own bound, or serve only this tier."""
    said = "it has no capacity_bytes and grows until its medium is full"
    return Finding(True, f"tier {name!r}", said, f"set l2.{name}.capacity_bytes, unless the medium bounds it")


def _capacities(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """Whether the medium of each tier can hold its capacity. The adapter is asked through its contract, as a server
    does. Other faults of the medium are reported by its plugin's check."""
    for name, tier in settings.l2.items():
        if tier.capacity_bytes is None:
            continue
        usage: list[Usage] = []
        thread = threading.Thread(target=_ask_usage, args=(registry, name, tier, usage), daemon=True)
        thread.start()
        thread.join(CHECK_S)
        if usage:
            yield from _capacity(name, tier.capacity_bytes, usage[0])


def _ask_usage(registry: Registry, name: str, tier: TierSettings, usage: list[Usage]) -> None:
    from lmcache_core.tiers.tier.parallel import adapter_context

    with contextlib.suppress(Exception):  # if the medium is missing, the plugin's own check says how to fix it
        context = adapter_context(name, tier.connections)
        with registry.build(Kind.L2_ADAPTER, tier.type, tier.settings, context) as adapter:
            usage.append(adapter.usage())


def _capacity(name: str, capacity_bytes: int, usage: Usage) -> Iterator[Finding]:
    from lmcache_core.settings.sizes import size_text

    if usage.bytes_free is None:
        return
    subject, may, free = f"tier {name!r}", size_text(capacity_bytes), f"{usage.bytes_free / 2**30:.2f} GiB"
    if capacity_bytes <= usage.bytes_free + (usage.bytes_used or 0):
        yield Finding(True, subject, f"its capacity_bytes ({may}) fit: the medium has {free} free")
        return
    cure = f"set l2.{name}.capacity_bytes to what the medium can hold, or give it more room"
    if usage.bytes_used is None:  # the used bytes may be ours
        cure += "; ignore this if the tier's own objects take up the rest"
        yield Finding(True, subject, f"its capacity_bytes are {may}, but the medium has {free} free", cure)
    else:
        taken = f"{usage.bytes_used / 2**30:.2f} GiB"
        said = f"its capacity_bytes are {may}, but the medium has {free} free and {taken} in use"
        yield Finding(False, subject, said, cure)


def asked(registry: Registry, record: PluginRecord, settings: Settings, limit_s: float = 0.0) -> Iterator[Finding]:
    """The findings of the plugin's own check, if it answers in time."""
    answers: list[Any] = []

    def ask() -> None:
        answers.extend(registry.call("lmcache_check", {record.name}, settings=settings))

    limit_s = limit_s or CHECK_S
    faults_before = len(registry.faults)
    thread = threading.Thread(target=ask, daemon=True)  # a check that hangs must not hold up the command
    thread.start()
    thread.join(limit_s)
    subject = f"plugin {record.name}"
    if thread.is_alive():
        yield Finding(False, subject, f"its check did not finish within {limit_s:.0f} s", f"report it to {record}")
        return
    for fault in registry.faults[faults_before:]:
        yield Finding(False, subject, str(fault), "report it to the plugin's authors")
    for answer in answers:
        for finding in answer if isinstance(answer, list | tuple) else [answer]:
            sound = isinstance(finding, Finding)
            yield (
                finding
                if sound
                else Finding(
                    False,
                    subject,
                    f"its check yielded a {type(finding).__name__}, not a Finding",
                    f"report it to {record}",
                )
            )
