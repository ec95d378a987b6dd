"""`lmcache-core bench l2 --tier s3`: the tier against the boto3 calls of a first-time user, in the same run.

Theirs: `put_object(Body=bytes)` and `get_object()["Body"].read()`, from as many threads as the tier has connections,
with boto3's defaults. Ours: the adapter's `store` and `load`, header page and payload, into existing memory. Both sides
take turns; CPU seconds are those of this process, with all its threads. First against a server that does nothing, in a
separate process, which compares only the clients; then against the service of `--set endpoint_url=… --set bucket=…`, if
given.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmcache_core.errors import TierError, UsageError
from lmcache_core.tiers.contract import LoadItem, Outcome, Result, StoreItem
from lmcache_core.tiers.tier.parallel import adapter_context
from lmcache_s3.adapter import S3Adapter
from lmcache_s3.names import Names
from lmcache_s3.settings import S3Settings

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

SIZES = {"1 MiB": 1 << 20, "8 MiB": 8 << 20, "32 MiB": 32 << 20}
AIMED = "8 MiB"
AT_ONCE = 8
HEADER_BYTES = 4096
RATE_TARGET = 1.3
CPU_TARGET = 0.35
ROUNDS, ROUNDS_QUICK = 15, 5
DEADLINE_S = 300.0
NULL: dict[str, Any] = {
    "bucket": "null-bucket",
    "access_key_id": "null",
    "secret_access_key": "null",
    "region": "us-east-1",
}


@dataclass
class _Side:
    """Seconds and CPU seconds of each batch."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def measure(self, call: Callable[[], None]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)


def run(options: Namespace, bench: Bench) -> None:
    """Record every size, against the null server and against the service given."""
    given: dict[str, Any] = {}
    for pair in options.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair!r} has no value: write NAME=VALUE")
        given[name] = value
    bench.steps(len(SIZES) * (2 if given else 1))
    with null_server() as endpoint:
        for name in SIZES:
            bench.step(f"objects of {name}, null server")
            _record(bench, name, ", null server", S3Settings(**NULL, endpoint_url=endpoint), aims_at_rate=True)
    if given:
        settings = S3Settings(**given)
        for name in SIZES:
            bench.step(f"objects of {name}, bucket {settings.bucket}")
            _record(bench, name, "", settings, aims_at_rate=False)


@contextmanager
def null_server() -> Iterator[str]:
    """The endpoint of a server that does nothing, in a separate process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "lmcache_s3.null_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait()


class _Ours:
    def __init__(self, settings: S3Settings, nbytes: int) -> None:
        self._adapter = S3Adapter(settings, adapter_context("bench", AT_ONCE))
        self._header = memoryview(os.urandom(HEADER_BYTES))
        self.source = [_memory(nbytes) for _ in range(AT_ONCE)]
        self.target = [_memory(nbytes) for _ in range(AT_ONCE)]
        page = os.urandom(4096)
        for view in self.source:
            view[:] = page * (nbytes // 4096)
        self.keys = [os.urandom(32) for _ in range(AT_ONCE)]

    def store(self) -> None:
        items = [StoreItem(key, [self._header, view]) for key, view in zip(self.keys, self.source, strict=True)]
        _check(self._adapter.store(items, time.monotonic() + DEADLINE_S))

    def load(self) -> None:
        header = memoryview(bytearray(HEADER_BYTES))
        items = [LoadItem(key, [header, view]) for key, view in zip(self.keys, self.target, strict=True)]
        _check(self._adapter.load(items, time.monotonic() + DEADLINE_S))

    def delete(self) -> None:
        self._adapter.delete(self.keys, time.monotonic() + DEADLINE_S)

    def close(self) -> None:
        self._adapter.close()


class _Theirs:
    """What the first page of boto3's documentation shows."""

    def __init__(self, settings: S3Settings, bodies: list[memoryview]) -> None:
        import boto3

        key, secret, token = (
            credential.get_secret_value() if credential else None
            for credential in (settings.access_key_id, settings.secret_access_key, settings.session_token)
        )
        self._client: Any = boto3.Session(
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            aws_session_token=token,
            region_name=settings.region,
            profile_name=settings.profile,
        ).client("s3", endpoint_url=settings.endpoint_url)
        self._bucket = settings.bucket
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._bodies = [bytes(body) for body in bodies]  # made beforehand, not counted
        names = Names(settings.prefix)
        self._names = [names.of(os.urandom(32)) for _ in bodies]

    def presigned(self, name: str) -> str:
        place = {"Bucket": self._bucket, "Key": name}
        return str(self._client.generate_presigned_url("get_object", Params=place, ExpiresIn=3600))

    def store(self) -> None:
        list(self._threads.map(self._put, self._names, self._bodies))

    def load(self) -> None:
        list(self._threads.map(self._get, self._names))

    def delete(self) -> None:
        for name in self._names:
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()

    def _put(self, name: str, body: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=name, Body=body)

    def _get(self, name: str) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()  # type: ignore[no-any-return]


class _Bare:
    """Sockets that request what ours has stored, and receive it into the same memory."""

    def __init__(self, settings: S3Settings, ours: _Ours, theirs: _Theirs) -> None:
        names = Names(settings.prefix)
        self._heads, self._socks, self._into = [], [], ours.target
        for key in ours.keys:
            url = urlsplit(theirs.presigned(names.of(key)))
            target = f"{url.path}?{url.query}"
            self._heads.append(f"GET {target} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
            self._socks.append(socket.create_connection((url.hostname or "", url.port or 80)))
        self._threads = ThreadPoolExecutor(AT_ONCE)

    def load(self) -> None:
        list(self._threads.map(self._get, self._socks, self._heads, self._into))

    def close(self) -> None:
        self._threads.shutdown()
        for sock in self._socks:
            sock.close()

    def _get(self, sock: socket.socket, request: bytes, into: memoryview) -> None:
        sock.sendall(request)
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(HEADER_BYTES)
        begun = len(head) - head.index(b"\r\n\r\n") - 4
        left = HEADER_BYTES + into.nbytes - begun
        into[:begun] = head[len(head) - begun :]
        view = into[begun:]
        while left:
            count = sock.recv_into(view[:left] if view else into[:left])
            view, left = view[count:], left - count


def _record(bench: Bench, name: str, where: str, settings: S3Settings, *, aims_at_rate: bool) -> None:
    nbytes = SIZES[name]
    ours = _Ours(settings, nbytes)
    theirs = _Theirs(settings, ours.source)
    sides: dict[str, tuple[_Side, _Side]] = {"store": (_Side(), _Side()), "load": (_Side(), _Side())}
    bare, floor_of_load = None, _Side()
    try:
        clients: list[_Ours | _Theirs] = [ours, theirs]
        for each in clients:  # connections are opened by the first
            each.store()
            each.load()
        if str(settings.endpoint_url).startswith("http://"):
            bare = _Bare(settings, ours, theirs)
            bare.load()
        for turn in range(ROUNDS_QUICK if bench.quick else ROUNDS):
            for what in ("store", "load"):
                pair = list(zip(clients, sides[what], strict=True))
                for each, side in pair if turn % 2 else reversed(pair):
                    side.measure(getattr(each, what))
            if bare is not None:
                floor_of_load.measure(bare.load)
                ours.load()  # the memory holds objects again, without their headers
        if not where and any(a != b for a, b in zip(ours.source, ours.target, strict=True)):
            raise TierError("the bytes that came back are not those that were stored: do not use this service")
        ours.delete()
        theirs.delete()
    finally:
        if bare is not None:
            bare.close()
        ours.close()
        theirs.close()
    moved_gb = AT_ONCE * nbytes / 1e9
    for what, (our, their) in sides.items():
        rate = moved_gb / median(our.wall_s)
        target = RATE_TARGET if aims_at_rate and name == AIMED else None
        floor = moved_gb / median(their.wall_s)
        bench.record(f"{what} {name}{where}", rate, "GB/s", floor=floor, target=target, lower_is_better=False)
        bench.record(
            f"{what} {name}{where}, client CPU",
            median(our.cpu_s) / moved_gb,
            "s/GB",
            floor=median(their.cpu_s) / moved_gb,
            target=CPU_TARGET if name == AIMED else None,
        )
    if bare is not None:
        rate, cpu = moved_gb / median(floor_of_load.wall_s), median(floor_of_load.cpu_s) / moved_gb
        bench.record(f"load {name}{where}, bare sockets", rate, "GB/s", lower_is_better=False)
        bench.record(f"load {name}{where}, bare sockets' CPU", cpu, "s/GB")


def _check(outcomes: object) -> None:
    assert isinstance(outcomes, list)
    for outcome in outcomes:
        assert isinstance(outcome, Outcome)
        if outcome.result is not Result.DONE:
            raise TierError(outcome.error or f"the tier answered {outcome.result}")


def _memory(nbytes: int) -> memoryview:
    """Memory like a slot: page-aligned, and populated."""
    region = memoryview(mmap.mmap(-1, nbytes))
    region[:] = bytes(nbytes)
    return region
