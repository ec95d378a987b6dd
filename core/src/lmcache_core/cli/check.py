"""`lmcache-core check`: would a server start here, and would it work? Prints findings with cures; exits with 1 if one
is bad."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_core.cli.compose import add_settings_options, composed, print_settings_help
from lmcache_core.cli.table import print_table
from lmcache_core.errors import CacheError, SettingsError, UsageError
from lmcache_core.guard import guarded
from lmcache_core.plugins.components import Finding, Kind
from lmcache_core.plugins.error_text import error_text
from lmcache_core.plugins.suggest import install_command

if TYPE_CHECKING:
    from lmcache_core.plugins.records import PluginRecord
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.pool.header import Header
    from lmcache_core.settings.model import Settings, TierSettings
    from lmcache_core.tiers.contract import Usage

CHECK_S = 10.0  # as the hook promises
TIER_CHECK_S = 8.0  # then the adapter says itself what it waited for
RUNNING_S = 2.0
ENGINE_CHECK_S = 60.0  # engines take long to import
STAT_BLOCK_BYTES = 512  # of st_blocks


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
        print_table(("", "subject", "finding"), [(_mark(each), each.subject, _sentence(each)) for each in findings])
    return 0 if well else 1


def _sentence(finding: Finding) -> str:
    """With the cure behind it, so that a line is no longer than what it says."""
    return f"{finding.message}: {finding.cure}" if finding.cure else finding.message


def _mark(finding: Finding) -> str:
    """A finding that is fine but has a cure is worth a look."""
    if not finding.ok:
        return "NOT OK"
    return "look" if finding.cure else "ok"


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    registry: Registry = arguments.registry
    for refusal in registry.refused:
        # Not an error in this configuration: if the settings named it, composing them fails below.
        text = f"not in use: {refusal.distribution} {refusal.version}: {refusal.why}"
        cure = f"fix that, or pip uninstall {refusal.distribution} if nothing uses it"
        yield Finding(True, f"plugin {refusal.name}", text, cure)
    yield native_finding()
    try:
        settings = composed(arguments).settings
    except CacheError as error:
        yield Finding.of_error(
            "settings", error, "correct it where it is set: lmcache-core check --help lists all settings"
        )
        return
    if arguments.engine:
        yield Finding(True, "settings", f"those of this command are valid: it looks for the server {settings.name!r}")
        yield from _engine(registry, arguments.engine, settings)
        return
    yield Finding(True, "settings", f"valid: server {settings.name!r}, tiers: {', '.join(settings.l2) or 'none'}")
    yield from _components(registry, settings)
    running = _running(settings)
    if running is not None:
        yield Finding(True, "server", f"{settings.name!r} is {running}: these findings are about its next start")
    for finding in _of_a_start(registry, settings, running):
        yield finding if running is None else _beside(finding)


def _of_a_start(registry: Registry, settings: Settings, running: _Running | None) -> Iterator[Finding]:
    """What a server would find when it starts."""
    yield from _surroundings(settings, 0 if running is None else running.pool_bytes)
    in_use = {registry.owner(kind, name).name: registry.owner(kind, name) for kind, name in settings.components()}
    for record in in_use.values():
        yield from findings_of(registry, record, settings)
    yield from _serdes(registry, settings)
    for name, tier in settings.l2.items():
        yield from _tier(registry, settings.name, name, tier)


def _engine(registry: Registry, name: str, settings: Settings) -> Iterator[Finding]:
    """The findings of an engine's connector plugin. The server is already running, so its start is not checked."""
    record = next((each for each in registry.plugins if each.name == name), None)
    if record is None:
        cure = f"run this command in the engine's environment, and there {install_command('lmcache-core-vllm')}"
        if name != "vllm":
            cure = "vllm is the engine whose connector has a check; any plugin's name is accepted"
        yield Finding(False, f"engine {name}", "no plugin of this name is in use", cure)
    else:
        yield from findings_of(registry, record, settings, ENGINE_CHECK_S)


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


def _surroundings(settings: Settings, running_bytes: int) -> Iterator[Finding]:
    """`running_bytes`: the memory of the pool of a server that runs, which the next one gets."""
    from lmcache_core.pool.backing import SHM_DIR, Backing, segment_path
    from lmcache_core.pool.making import check_fits
    from lmcache_core.protocol.hostport import HostPort
    from lmcache_core.settings.sizes import size_text

    try:
        header = header_of(settings)
        there = segment_path(header.name) if header.backing is Backing.SHM else settings.l1.path
        if header.backing is Backing.FILE and there is not None:
            yield from _on_disk(there, header.name)
        there_bytes = 0 if there is None or not there.exists() else there.stat().st_blocks * STAT_BLOCK_BYTES
        there_bytes = there_bytes or running_bytes
        found = check_fits(header, there_bytes=there_bytes, shm_dir=SHM_DIR if there is None else there.parent)
    except CacheError as error:
        yield Finding.of_error("l1", error, "change l1.size_bytes")
    else:
        needs = (
            f"{size_text(settings.l1.size_bytes)} and {header.index_offset + header.index_bytes >> 20:,} MiB of index"
        )
        text = f"{needs} fit: {found.where} has {found.available_bytes / 2**30:.2f} GiB of {header.backing} memory"
        yield Finding(True, "l1", text + (", besides the pool that is there" if there_bytes else ""))
        yield index_of(header)
    if settings.zmq.tcp is not None:
        yield Finding.of_port("zmq", HostPort.parse(settings.zmq.tcp), "zmq.tcp")
    if settings.l2:
        yield _state(settings)
    yield from (_unbounded(name) for name, tier in settings.l2.items() if tier.capacity_bytes is None)


def _on_disk(path: Path, name: str) -> Iterator[Finding]:
    """Raises `PoolError` where no server of this name would begin."""
    from lmcache_core.pool import on_disk
    from lmcache_core.pool.ownership import open_ours

    on_disk.check_place(path)
    if (file := open_ours(path)) is not None:
        with contextlib.closing(file):
            on_disk.check_ours(file.fileno(), path, name)
    if kind := on_disk.lies_in_memory(path):
        yield Finding(False, "l1.path", f"{path} is on {kind}, which ends with the machine: name a file on a disk")
    else:
        yield Finding(
            True, "l1.path", f"{path} is on {on_disk.file_system_of(path.parent) or 'an unknown file system'}"
        )


def header_of(settings: Settings) -> Header:
    """The plan of the pool, as a server makes it."""
    from lmcache_core.pool.backing import Backing
    from lmcache_core.pool.header import plan

    l1 = settings.l1
    return plan(settings.name, l1.size_bytes, Backing(l1.backing), boot_id=1, index_entries=l1.index_entries or None)


class _Running(NamedTuple):
    """A server that runs under the name in the settings. `pool_bytes`: what its pool has of the machine's memory, which
    the next one gets; 0 if it does not answer us."""

    pid: int
    pool_bytes: int

    def __str__(self) -> str:
        return f"running (process {self.pid})" if self.pid else "running"  # 0: of another pid namespace


def _running(settings: Settings) -> _Running | None:
    from lmcache_core.client.client import Client
    from lmcache_core.pool.backing import LIFELINE_NAME
    from lmcache_core.protocol.address import server_directory

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lifeline:
        try:
            lifeline.connect(str(server_directory(settings.name, settings.runtime_dir) / LIFELINE_NAME))
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    pool_bytes = 0
    with contextlib.suppress(CacheError):  # of another user, or one that hangs
        with Client.connect(
            settings.name,
            runtime_dir=settings.runtime_dir,
            client_name="lmcache-core check",
            maps_pool=False,
            call_timeout_s=RUNNING_S,
        ) as client:
            pool_bytes = client.status()["pool"]["populated_bytes"]
    return _Running(pid, pool_bytes)


def _beside(finding: Finding) -> Finding:
    """A finding while the server runs: it listens itself where its next start will."""
    if finding.ok or not finding.message.endswith(os.strerror(errno.EADDRINUSE)):
        return finding
    return replace(finding, ok=True, message=f"{finding.message}, which is fine if by the running server", cure="")


def index_of(header: Header) -> Finding:
    """The smallest objects for which the index can hold a whole pool, and what smaller objects would need."""
    from lmcache_core.limits import INDEX_LOAD_MAX, INDEX_OBJECT_BYTES, PAGE_BYTES
    from lmcache_core.pool.header import index_entries_for

    least = int(header.data_bytes / (INDEX_LOAD_MAX * header.index_entries))
    size = f"{header.index_entries:,} entries, {header.index_bytes >> 20:,} MiB"
    text = f"{size}: enough for objects of {least:,} bytes or more"
    if least > PAGE_BYTES:
        pages = index_entries_for(header.data_bytes, PAGE_BYTES)
        text += f" (for a pool of single pages, {PAGE_BYTES:,} bytes each, it would be l1.index_entries = {pages})"
    cure = ""
    if least > INDEX_OBJECT_BYTES:
        cure = f"set l1.index_entries = {index_entries_for(header.data_bytes, INDEX_OBJECT_BYTES)}, or 0 for the same"
    return Finding(True, "index", text, cure)


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
    text = "it has no capacity_bytes and grows until its medium is full"
    return Finding(True, f"tier {name!r}", text, f"set l2.{name}.capacity_bytes, unless the medium bounds it")


def _serdes(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """The tiers whose certificate does not do; and those that take no bytes of which nothing is known, which is no
    error: most engines say what theirs are."""
    from lmcache_core.limits import PAGE_BYTES
    from lmcache_core.pool.layout import Layout
    from lmcache_core.serde.certificate import certificate_for
    from lmcache_core.serde.chain import CodecChain

    for name, tier in settings.l2.items():
        with contextlib.suppress(CacheError, ValueError):  # one that cannot be built is the plugin's own finding
            chain = CodecChain([registry.build(Kind.SERDE, each.type, each.settings) for each in tier.serde])
            if tier.require_certificate is not None and chain.lossy:
                setting = f"l2.{name}.require_certificate"
                try:
                    certificate_for(
                        chain.lossy, tier.require_certificate, tier.divergence_max, tier.agreement_min, setting
                    )
                except SettingsError as error:
                    yield Finding.of_error(f"tier {name!r}", error, f"measure it, or leave {setting} out")
            try:
                chain.encoded_bytes_max(Layout("uint8", (PAGE_BYTES,)))
            except UsageError as error:
                message = f"engines whose KV is opaque bytes (states, KV that they quantise) will be refused: {error}"
                cure = f"for such engines take it out of l2.{name}.serde; `check --engine` says whether one was refused"
                yield Finding(True, f"tier {name!r}", message, cure)


def _tier(registry: Registry, server: str, name: str, tier: TierSettings) -> Iterator[Finding]:
    """What its adapter says of the medium, and whether its capacity fits there."""
    from lmcache_core.tiers.tier.parallel import adapter_context

    subject, cure = f"tier {name!r}", f"check l2.{name}, which says where the medium is, and the medium itself"
    found: list[Finding] = []
    context = adapter_context(name, tier.connections, server)

    def ask() -> None:
        nonlocal subject
        with registry.build(Kind.L2_ADAPTER, tier.type, tier.settings, context) as here:
            subject += f" ({here.medium() or tier.type})"
            found.extend(here.check(time.monotonic() + TIER_CHECK_S))
            if tier.capacity_bytes is not None:
                found.extend(_capacity(name, tier.capacity_bytes, here.usage()))

    def failed(error: BaseException) -> None:
        if isinstance(error, CacheError):
            happened = error.happened.removeprefix(f"tier {name!r}: ")
            found.append(Finding(False, "", happened, error.cure or cure))
        else:
            owner = registry.owner(Kind.L2_ADAPTER, tier.type)
            found.append(Finding(False, "", error_text(error), f"report it to {owner}"))

    if not _ends_within(CHECK_S, lambda: guarded(failed, ask)):
        found.append(Finding(False, "", f"its check did not finish within {CHECK_S:.0f} s", cure))
    for finding in list(found):
        yield replace(finding, subject=finding.subject or subject)


def _ends_within(limit_s: float, call: Callable[[], object]) -> bool:
    """A check that hangs must not hold up the command."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def _capacity(name: str, capacity_bytes: int, usage: Usage) -> Iterator[Finding]:
    from lmcache_core.settings.sizes import size_text

    if usage.bytes_free is None:
        return
    may, free = size_text(capacity_bytes), f"{usage.bytes_free / 2**30:.2f} GiB"
    if capacity_bytes <= usage.bytes_free + (usage.bytes_used or 0):
        yield Finding(True, "", f"its capacity_bytes ({may}) fit: the medium has {free} free")
        return
    cure = f"set l2.{name}.capacity_bytes to what the medium can hold, or give it more room"
    if usage.bytes_used is None:  # the used bytes may be ours
        cure += "; ignore this if the tier's own objects take up the rest"
        yield Finding(True, "", f"its capacity_bytes are {may}, but the medium has {free} free", cure)
    else:
        taken = f"{usage.bytes_used / 2**30:.2f} GiB"
        text = f"its capacity_bytes are {may}, but the medium has {free} free and {taken} in use"
        yield Finding(False, "", text, cure)


def findings_of(
    registry: Registry, record: PluginRecord, settings: Settings, limit_s: float = 0.0
) -> Iterator[Finding]:
    """The findings of the plugin's own check, if it answers in time."""
    answers: list[Any] = []

    def ask() -> None:
        answers.extend(registry.call("lmcache_check", {record.name}, settings=settings))

    limit_s = limit_s or CHECK_S
    faults_before = len(registry.faults)
    subject = f"plugin {record.name}"
    if not _ends_within(limit_s, ask):
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
