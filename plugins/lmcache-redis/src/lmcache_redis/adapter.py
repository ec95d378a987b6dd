"""The Redis tier: one string for each object."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeGuard

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.blocking import BatchAdapter
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_redis.check import BUFFER_LIMIT, BULK_LIMIT, OBJECT_BYTES_MAX, limit_findings, memory_finding
from lmcache_redis.client import Client
from lmcache_redis.errors import explain
from lmcache_redis.settings import RedisSettings
from lmcache_redis.transport.commands import Broken, Command, Received, Refusal, Reply, simple
from lmcache_redis.transport.connections import Address, address_of

log = logging.getLogger("lmcache_redis")

BATCH_BYTES_MAX = 16 << 20  # what a server buffers for one connection's replies
_SCAN_COUNT = b"512"
_SCAN_BYTES_MAX = 4 << 20  # a server may return more than it was asked for, and names of strangers may be long
_USAGE_S = 1.0  # of each answer that it needs
_DONE = Outcome(Result.DONE)
_MISS = Outcome(Result.MISS)


class RedisAdapter(BatchAdapter):
    """Connects when it is first used."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        ttl=True,
        durable=True,
        evicts=True,
        shared=True,
        batch_bytes_max=BATCH_BYTES_MAX,
        object_bytes_max=OBJECT_BYTES_MAX,
    )

    def __init__(self, settings: RedisSettings, context: AdapterContext) -> None:
        self._settings = settings
        self.client = Client(settings, context)
        self._prefix = settings.key_prefix.encode()
        self._expiry = () if settings.ttl_s is None else (b"PX", b"%d" % max(1, round(settings.ttl_s * 1000)))
        self._warned = False
        super().__init__(context, self.client)

    # --- the contract ---------------------------------------------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        commands = []
        for item in items:
            name = self._name(item.key)
            commands.append(Command(name, (b"SET", name), item.buffers or (memoryview(b""),), self._expiry))
        replies = self.client.ask(commands, deadline, self._settings.failover_wait_s)
        self._warn_once()
        stored = [Outcome(Result.DONE, item.nbytes) for item in items]
        return [
            done if reply == b"OK" else self._failed("store", reply)
            for done, reply in zip(stored, replies, strict=True)
        ]

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """TOUCH: it answers like EXISTS, and marks the object as recently used. Raises if any key got no answer: a
        prefix with a hole is worth nothing, and "not there" would be wrong."""
        self.check_open()
        names = [self._name(key) for key in keys]
        replies = self.client.ask([simple(b"TOUCH", name, key=name) for name in names], deadline)
        for reply in replies:
            if not isinstance(reply, int):
                raise self._error("look up", reply, deadline)
        return [bool(reply) for reply in replies]

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        commands = []
        for item in items:
            name = self._name(item.key)
            commands.append(Command(name, (b"GET", name), into=item.buffers))
        replies = self.client.ask(commands, deadline, self._settings.failover_wait_s)
        self._warn_once()
        return [self._loaded(command, reply) for command, reply in zip(commands, replies, strict=True)]

    def load_headers(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        commands = []
        for item in items:
            name, page = self._name(item.key), item.buffers[:1]
            last = b"%d" % (sum(part.nbytes for part in page) - 1)
            commands.append(Command(name, (b"GETRANGE", name, b"0", last), into=page))
        replies = self.client.ask(commands, deadline, self._settings.failover_wait_s)
        outcomes = [self._loaded(command, reply) for command, reply in zip(commands, replies, strict=True)]
        # GETRANGE of a key that is not there gives an empty string.
        return [_MISS if each.result is Result.DONE and not each.nbytes else each for each in outcomes]

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        names = [self._name(key) for key in keys]
        commands = [simple(b"UNLINK", name, key=name) for name in names]
        replies = self.client.ask(commands, deadline, self._settings.failover_wait_s)
        return [_DONE if isinstance(reply, int) else self._failed("delete", reply) for reply in replies]

    def usage(self) -> Usage:
        """Bytes of keys and values in the memory of all primaries, including those of other users."""
        self.check_open()
        deadline = time.monotonic() + _USAGE_S
        nbytes = free = 0
        bounded = True
        for figures in self.memory(deadline).values():
            nbytes += int(figures.get("used_memory_dataset", 0))
            limit = int(figures.get("maxmemory", 0))
            free += max(0, limit - int(figures.get("used_memory", 0)))
            bounded = bounded and limit > 0
        objects = 0
        for address in self._primaries(deadline):
            size = self._one(address, simple("DBSIZE"), deadline)
            if not isinstance(size, int):
                raise self._error("tell its usage", size, deadline)
            objects += size
        return Usage(nbytes, objects, free if bounded else None)

    def memory(self, deadline: float) -> dict[Address, dict[str, str]]:
        """INFO memory of each primary. Raises `TierError`."""
        self.check_open()
        found = {}
        for address in self._primaries(deadline):
            info = self._one(address, simple("INFO", "memory"), deadline)
            if not isinstance(info, bytes):
                raise self._error("tell its memory", info, deadline)
            lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
            found[address] = {name: value for name, colon, value in lines if colon}
        return found

    def limits(self, address: Address, deadline: float) -> dict[str, str]:
        """What the server says of its limits by CONFIG GET; less, or nothing, if it does not let us ask."""
        found: dict[str, str] = {}
        for name in (BULK_LIMIT, BUFFER_LIMIT):
            reply = self._one(address, simple("CONFIG", "GET", name), deadline)
            pairs: Any = reply  # RESP3 has maps, of which `Reply` knows nothing: nothing else here asks for one
            pair = next(iter(pairs.items())) if isinstance(pairs, dict) and len(pairs) == 1 else pairs
            if isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], bytes):
                found[name] = pair[1].decode(errors="replace")
        return found

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """SCAN, server by server; the cursor is `HOST:PORT SCAN-CURSOR`. SCAN may return a key twice while the server
        grows its table; within a page duplicates are dropped."""
        self.check_open()
        primaries = self._primaries(deadline)
        address, at = primaries[0], b"0"
        if cursor is not None:
            where, _, number = cursor.rpartition(" ")
            address, at = _parsed(where), number.encode()
            if address not in primaries:  # it has failed over since: go on with the servers after it
                address, at = next((each for each in primaries if each > address), address), b"0"
                if address not in primaries:
                    return ScanPage([], None)
        pattern = _escaped(self._prefix) + b"*"
        command = (b"SCAN", at, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
        found = self._one(address, simple(*command, reply_bytes_max=_SCAN_BYTES_MAX), deadline)
        if not _is_page(found):
            raise self._error("scan", found, deadline)
        entries = self._entries(address, list(dict.fromkeys(found[1])), deadline)
        if found[0] not in (b"0", 0):
            following = found[0].decode() if isinstance(found[0], bytes) else found[0]
            return ScanPage(entries, f"{address} {following}")
        later = next((each for each in primaries if each > address), None)
        return ScanPage(entries, f"{later} 0" if later is not None else None)

    def medium(self) -> str:
        settings = self._settings
        if settings.mode != "standalone":
            place = f"{settings.mode} {','.join(sorted(settings.nodes)) or settings.server}"
            place += f" {settings.sentinel_service}" if settings.mode == "sentinel" else ""
        else:
            host, port = settings.server
            place = settings.socket_path or f"{host}:{port}"
        return f"Redis at {place}, database {settings.database}, keys of {settings.key_prefix!r}"

    def check(self, deadline: float) -> Iterator[Finding]:
        yield from super().check(deadline)
        for address, memory in self.memory(deadline).items():
            yield memory_finding(address, self._settings, memory)
            yield from limit_findings(address, self.limits(address, deadline))

    # --- parts ----------------------------------------------------------------------------------------------
    def _name(self, key: bytes) -> bytes:
        """Prefix and hex: readable in redis-cli, and no key can contain a hash tag by accident."""
        return self._prefix + key.hex().encode()

    def _loaded(self, command: Command, reply: Reply) -> Outcome:
        if reply is None or (isinstance(reply, Refusal) and reply.code == "WRONGTYPE"):
            return _MISS  # what is there, if anything, is not an object: a store replaces it
        if isinstance(reply, Received):
            if reply.whole:
                return Outcome(Result.DONE, reply.nbytes)
            message = f"key {command.key.decode(errors='replace')} holds at least {reply.nbytes:,} bytes"
            return Outcome(Result.DAMAGED, error=f"{message}, and {command.room_bytes:,} were expected at most")
        return self._failed("load", reply)

    def _entries(self, address: Address, names: Sequence[bytes], deadline: float) -> list[ScanEntry]:
        """Sizes and last uses. OBJECT IDLETIME first, because STRLEN counts as a use. Under an LFU policy the server
        keeps no idle times, and every object counts as just used."""
        if not names:
            return []
        idle = [simple(b"OBJECT", b"IDLETIME", name) for name in names]
        replies = self.client.ask_one(address, [*idle, *(simple(b"STRLEN", name) for name in names)], deadline)
        now = time.time()
        entries = []
        for name, idle_s, nbytes in zip(names, replies, replies[len(names) :], strict=False):
            if isinstance(nbytes, Refusal) and nbytes.code == "WRONGTYPE":
                continue  # someone else's, under our prefix
            if not isinstance(nbytes, int):
                raise self._error("scan", nbytes, deadline)
            try:
                key = bytes.fromhex(name[len(self._prefix) :].decode())
            except (ValueError, UnicodeDecodeError):
                continue  # not ours either
            if not key or self._name(key) != name:
                continue  # a name in capitals, or with spaces, is not ours: ours have only one spelling
            if idle_s is None:
                continue  # gone since it was listed
            entries.append(ScanEntry(key, nbytes, now - idle_s if isinstance(idle_s, int) else now))
        return entries

    def _primaries(self, deadline: float) -> list[Address]:
        if not self.client.topology.version:
            broken = self.client.topology.refresh(deadline, 0)
            if broken is not None:
                raise self._error("find its servers", broken, deadline)
        return self.client.topology.primaries()

    def _one(self, address: Address, command: Command, deadline: float) -> Reply:
        return self.client.ask_one(address, [command], deadline)[0]

    def _failed(self, what: str, reply: Reply) -> Outcome:
        return explain(self._tier, what, reply)

    def _error(self, what: str, reply: Reply, deadline: float) -> TierError:
        if isinstance(reply, Broken):
            # This also notices a change of primaries: the next call finds the new one.
            self.client.topology.refresh(
                min(deadline, time.monotonic() + self._settings.connect_timeout_s), self.client.topology.version
            )
        return explain(self._tier, what, reply).as_error()

    def _warn_once(self) -> None:
        if self.client.fell_back and not self._warned:
            self._warned = True
            log.warning(
                "tier %r: the installed redis-py hides its sockets: payloads are copied, at half the speed or less",
                self._tier,
            )


def _is_page(reply: Reply) -> TypeGuard[list[Any]]:
    """A cursor, and names."""
    return (
        isinstance(reply, list)
        and len(reply) == 2
        and (reply[0].isdigit() if isinstance(reply[0], bytes) else isinstance(reply[0], int))
        and isinstance(reply[1], list)
        and all(isinstance(name, bytes) for name in reply[1])
    )


def _parsed(text: str) -> Address:
    return address_of(text) if text.rpartition(":")[2].isdigit() else Address(text, 0)


def _escaped(text: bytes) -> bytes:
    """For MATCH."""
    return b"".join(b"\\" + bytes([each]) if each in b"*?[]^\\" else bytes([each]) for each in text)
