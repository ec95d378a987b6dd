"""The process that has Mooncake's client: `python -m lmcache_mooncake FD`, started by the adapter.

FD is a socket. Its first packet is a `Setup`; each further one brings a socket and a memory file for a connection,
which a thread of its own serves. When FD is closed, the calls under way have a while to end (a half-stored object
blocks its key at the master), unless the adapter kills the process, and it ends without a farewell to Mooncake: closing
its client during a call crashes it.

An object has two names at the master, `KEY.0` and `KEY.1`, of which one is used at a time. A put of a name that is
there keeps the old bytes, an upsert of the same size overwrites them under its readers, and between a removal and a put
there is nothing. So an object is replaced by storing the other name, and then removing the one that was there; where
both are there, readers take the first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import xxhash

from lmcache_core.protocol.hostport import HostPort
from lmcache_mooncake.messages import (
    BUSY,
    CHECKSUM_BYTES,
    DAMAGED,
    FULL,
    NOT_THERE,
    PACKET_BYTES_MAX,
    TOO_LARGE,
    Reply,
    Request,
    Setup,
    places,
)
from lmcache_mooncake.settings import ETCD

_FINISH_S = 10.0  # for calls under way, when the server is gone
_CONNECT_S = 2.0
_PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)  # for the master's eviction, or for another client's store
WHEELS = "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine, on machines with CUDA)"


class UnavailableError(Exception):
    """There is no client of Mooncake; `cure` says what an operator can do."""

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(message)
        self.cure = cure


class Objects:
    """What a store of Mooncake holds, under two names for each object. `base`: where `memory` begins, which the caller
    shares with the adapter."""

    def __init__(self, store: Any, config: Any) -> None:
        self._store = store
        self._config = config
        self._changed = threading.Condition()
        self._changing: set[str] = set()

    @contextmanager
    def _alone(self, names: Sequence[str]) -> Iterator[None]:
        """Within it no other call of this process changes these objects."""
        mine = set(names)
        with self._changed:
            self._changed.wait_for(lambda: self._changing.isdisjoint(mine))
            self._changing |= mine
        try:
            yield
        finally:
            with self._changed:
                self._changing -= mine
                self._changed.notify_all()

    def exists(self, names: Sequence[str]) -> list[int]:
        """1, 0, or a negative code for each. The first name is asked twice, or an object that moves from the second to
        the first meanwhile would be in neither."""
        first, second = _first(names), _second(names)
        found = self._store.batch_is_exist([*first, *second, *first])
        count = len(names)
        return [
            min(each) if min(each) < 0 else max(each)
            for each in zip(found[:count], found[count : 2 * count], found[2 * count :], strict=True)
        ]

    def load(self, names: Sequence[str], base: int, sizes: Sequence[int], memory: memoryview) -> list[int]:
        """The bytes of each object, or a negative code. What looks damaged is read once more: it may have been removed,
        and its memory used again, while it was read."""
        at = places(list(sizes))
        codes = [-704] * len(names)
        for which in (_first, _second, _first):
            wanted = [number for number, code in enumerate(codes) if code in NOT_THERE or code == DAMAGED]
            if not wanted:
                break
            found = self._store.batch_get_into(
                which([names[number] for number in wanted]),
                [base + at[number] for number in wanted],
                [sizes[number] + CHECKSUM_BYTES for number in wanted],
            )
            for number, code in zip(wanted, found, strict=True):
                if code in NOT_THERE and codes[number] == DAMAGED:
                    continue
                codes[number] = code if code < 0 else _checked(names[number], memory[at[number] :][:code])
        return [DAMAGED if code == TOO_LARGE else code for code in codes]

    def store(self, names: Sequence[str], base: int, sizes: Sequence[int], memory: memoryview) -> list[int]:
        """0, or a negative code for each object. A full store is asked again: its master evicts when it has refused."""
        at = places(list(sizes))
        for name, place, nbytes in zip(names, at, sizes, strict=True):
            memory[place + nbytes :][:CHECKSUM_BYTES] = _checksum(name, memory[place : place + nbytes])
        codes = [BUSY] * len(names)
        with self._alone(names):
            for pause_s in (0.0, *_PAUSES_S):
                left = [number for number, code in enumerate(codes) if code in (BUSY, FULL)]
                if not left:
                    break
                time.sleep(pause_s)
                found = self._put(
                    [names[number] for number in left],
                    [base + at[number] for number in left],
                    [sizes[number] + CHECKSUM_BYTES for number in left],
                )
                for number, code in zip(left, found, strict=True):
                    codes[number] = code
        return codes

    def _put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Replace each object, in steps. One that a step answers with a code for stays as that step left it: what is
        answered with 0 is what readers see from then on."""
        first, second, count = _first(names), _second(names), len(names)
        there = self._store.batch_is_exist([*first, *second])
        pairs = list(zip(there[:count], there[count:], strict=True))
        codes = [min(0, *pair) for pair in pairs]
        into = [second[number] if pairs[number][0] == 1 else first[number] for number in range(count)]
        old = [first[number] if pairs[number][0] == 1 else second[number] for number in range(count)]

        def step(among: Sequence[int], call: Callable[[list[int]], Sequence[int]]) -> None:
            left = [number for number in among if not codes[number]]
            for number, code in zip(left, call(left) if left else (), strict=True):
                codes[number] = code

        every = range(count)
        replaced = [number for number in every if 1 in pairs[number]]
        # Both: the second is what a killed store left, and no reader sees it.
        both = [number for number in every if pairs[number] == (1, 1)]
        step(both, lambda left: self._remove([into[number] for number in left]))
        step(
            every,
            lambda left: self._store.batch_put_from(
                [into[number] for number in left],
                [addresses[number] for number in left],
                [sizes[number] for number in left],
                self._config,
            ),
        )
        # 0 also says that somebody else is storing this name, or has stored it.
        step(every, lambda left: self._visible([into[number] for number in left]))
        step(replaced, lambda left: self._remove([old[number] for number in left]))
        # Another server may have replaced the same object meanwhile, in the other direction.
        step(replaced, lambda left: self._visible([into[number] for number in left]))
        return codes

    def delete(self, names: Sequence[str]) -> list[int]:
        """0, or a negative code for each object. Leases are of readers, who notice by the checksum: they do not defer
        a removal."""
        with self._alone(names):
            codes = self._remove([*_first(names), *_second(names)])
        return [min(pair) for pair in zip(codes[: len(names)], codes[len(names) :], strict=True)]

    def _remove(self, names: Sequence[str]) -> list[int]:
        found = self._store.batch_remove(list(names), True) if names else []
        return [0 if code in NOT_THERE else code for code in found]

    def _visible(self, names: Sequence[str]) -> list[int]:
        """0 for names that readers see, BUSY for others."""
        answers = {1: 0, 0: BUSY}
        return [answers.get(found, found) for found in self._store.batch_is_exist(list(names))]


def _first(names: Sequence[str]) -> list[str]:
    return [f"{name}.0" for name in names]


def _second(names: Sequence[str]) -> list[str]:
    return [f"{name}.1" for name in names]


def _checksum(name: str, content: memoryview) -> bytes:
    """Of these bytes under this name: the memory of an object that was removed may have another one by now."""
    return xxhash.xxh3_64_intdigest(content, seed=xxhash.xxh3_64_intdigest(name.encode())).to_bytes(
        CHECKSUM_BYTES, "little"
    )


def _checked(name: str, stored: memoryview) -> int:
    """The bytes of an object, if its checksum is right."""
    nbytes = len(stored) - CHECKSUM_BYTES
    return nbytes if nbytes >= 0 and stored[nbytes:] == _checksum(name, stored[:nbytes]) else DAMAGED


class StoreClient:
    """The client of Mooncake, set up for the first call."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._store: Any = None
        self._objects: Objects | None = None

    def objects(self) -> Objects:
        """Raises `UnavailableError`."""
        with self._lock:
            if self._objects is None:
                self._objects = self._made()
            return self._objects

    def register(self, address: int, nbytes: int) -> None:
        """Tell Mooncake of memory that objects are read into and stored from."""
        code = self._store.register_buffer(address, nbytes)
        if code:
            raise UnavailableError(f"Mooncake did not register {nbytes:,} bytes of memory: {code}", "")

    def unregister(self, address: int) -> None:
        self._store.unregister_buffer(address)

    def _made(self) -> Objects:
        setup = self._setup
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
        except ImportError as error:
            raise UnavailableError(f"Mooncake's client cannot be loaded: {error}", WHEELS) from error
        host = setup.host or self._reached_from()
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            host, setup.metadata, 0, 0, setup.protocol, setup.devices, setup.master, tenant_id=setup.tenant
        )
        if code:
            cure = "see Mooncake's messages in the server's log (MC_LOG_LEVEL=INFO in its environment for all)"
            raise UnavailableError(f"Mooncake's client did not start: {code}", cure)
        config = ReplicateConfig()
        config.replica_num = setup.replicas
        if setup.soft_pin_ms:
            config.soft_pin_action = SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = setup.soft_pin_ms
        return Objects(self._store, config)

    def _reached_from(self) -> str:
        """This machine's address as the master sees it. Mooncake waits for a minute for one that is not there."""
        if self._setup.master.startswith(ETCD):
            return socket.gethostbyname(socket.gethostname())
        where = HostPort.parse(self._setup.master, port_min=1)
        try:
            with socket.create_connection((where.host, where.port), _CONNECT_S) as sock:
                return str(sock.getsockname()[0])
        except OSError as error:
            cure = "see whether mooncake_master runs, and l2.NAME.master names it"
            raise UnavailableError(f"no connection to the master {self._setup.master}: {error}", cure) from error


class Connection:
    """One connection of the adapter: its requests, one after another."""

    def __init__(self, sock: socket.socket, memory_fd: int, nbytes: int, client: StoreClient) -> None:
        self._sock = sock
        self._client = client
        self._memory = mmap.mmap(memory_fd, nbytes)
        os.close(memory_fd)
        self._anchor = (ctypes.c_char * nbytes).from_buffer(self._memory)
        self._base = ctypes.addressof(self._anchor)
        self._registered = False
        self.busy = threading.Lock()  # held by a call under way

    def serve(self) -> None:
        """Until the adapter closes its end. An error ends the connection, which the adapter sees."""
        try:
            self._serve()
        finally:
            self._close()

    def _serve(self) -> None:
        while packet := _packet(self._sock):
            with self.busy:
                try:
                    reply = self._answer(msgspec.msgpack.decode(packet, type=Request))
                except UnavailableError as error:
                    # Mooncake's client is in an unknown state: the adapter starts another process.
                    self._sock.send(msgspec.msgpack.encode(Reply([], str(error), error.cure)))
                    os._exit(1)
                try:
                    self._sock.send(msgspec.msgpack.encode(reply))
                except OSError:  # the adapter has not waited
                    break

    def _answer(self, request: Request) -> Reply:
        objects = self._client.objects()
        if request.verb == "exists":
            return Reply(objects.exists(request.names))
        if request.verb == "delete":
            return Reply(objects.delete(request.names))
        if not self._registered:
            self._client.register(self._base, len(self._memory))
            self._registered = True
        move: Callable[[Sequence[str], int, Sequence[int], memoryview], list[int]]
        move = objects.store if request.verb == "store" else objects.load
        with memoryview(self._memory) as memory:
            return Reply(move(request.names, self._base, request.sizes, memory))

    def _close(self) -> None:
        if self._registered:
            self._client.unregister(self._base)
        self._sock.close()
        del self._anchor
        self._memory.close()


def _packet(sock: socket.socket) -> bytes:
    """Empty: the other end is closed."""
    try:
        return sock.recv(PACKET_BYTES_MAX)
    except OSError:
        return b""


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.msgpack.decode(_packet(control), type=Setup)
    client = StoreClient(setup)
    connections: list[tuple[threading.Thread, Connection]] = []
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 2)
        if len(fds) != 2:
            break
        connection = Connection(socket.socket(fileno=fds[0]), fds[1], setup.staging_bytes, client)
        thread = threading.Thread(target=connection.serve, name="mooncake-call", daemon=True)
        thread.start()
        connections = [each for each in connections if each[0].is_alive()]
        connections.append((thread, connection))
    until = time.monotonic() + _FINISH_S
    for _, connection in connections:
        connection.busy.acquire(timeout=max(0.0, until - time.monotonic()))
    os._exit(0)


if __name__ == "__main__":
    main()
