"""Every route to a server that a bench measures, each with a bare echo over the same kind of socket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lmcache_bench.echo import Echo, SeqpacketEcho, ZmqEcho, serve_seqpacket, serve_zmq
from lmcache_bench.workers import WorkerProcess
from lmcache_core import Client
from lmcache_core.client import CurveKeys
from lmcache_testing.processes import ServerProcess, cpu_s, temporary_directory

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

CARRIERS = ("lifeline", "zmq ipc", "zmq tcp", "embedded")


class Route(ABC):
    """One carrier: how to reach the server, and its echo."""

    carrier: str

    @abstractmethod
    def client(self, *, use_index: bool = True) -> Client:
        """A client of the server over this carrier."""

    @abstractmethod
    def echo(self) -> Echo:
        """A connection to the bare echo."""


@dataclass(frozen=True)
class ProcessRoute(Route):
    """To a server process; can be sent to a worker process."""

    carrier: str
    name: str
    runtime_dir: Path
    address: str | None
    keys: Path | None  # a directory with CURVE keys
    echo_address: str

    def client(self, *, use_index: bool = True) -> Client:
        curve = None
        if self.keys is not None:
            curve = CurveKeys.from_files(self.keys / "server.key", self.keys / "client.key_secret")
        return Client.connect(
            self.name, runtime_dir=self.runtime_dir, address=self.address, curve=curve, use_index=use_index
        )

    def echo(self) -> Echo:
        if self.address is None:
            return SeqpacketEcho.connect(self.echo_address)
        return ZmqEcho(self.echo_address, self.keys)


@dataclass(frozen=True)
class EmbeddedRoute(Route):
    """To a server on a thread of this process; its echo is also a thread."""

    server: Server
    carrier: str = "embedded"

    def client(self, *, use_index: bool = True) -> Client:
        client: Client = self.server.connect(use_index=use_index)
        return client

    def echo(self) -> Echo:
        return SeqpacketEcho.pair()


@contextmanager
def open_routes(carriers: Sequence[str], size_bytes: int) -> Iterator[list[Route]]:
    """The routes of these carriers: one server process for all but embedded mode, and an echo process for each."""
    with ExitStack() as stack:
        routes: list[Route] = []
        beyond = [each for each in carriers if each != "embedded"]
        if beyond:
            zmq = any(each.startswith("zmq") for each in beyond)
            server = stack.enter_context(ServerProcess(size_bytes, zmq=zmq))
            routes += [_process_route(carrier, server, stack) for carrier in beyond]
        if "embedded" in carriers:
            routes.append(EmbeddedRoute(stack.enter_context(embedded_server(size_bytes))))
        yield routes


def _process_route(carrier: str, server: ServerProcess, stack: ExitStack) -> ProcessRoute:
    keys = server.directory / "keys" if carrier == "zmq tcp" else None
    address = {"lifeline": None, "zmq ipc": server.ipc_address, "zmq tcp": server.tcp_address}[carrier]
    start: tuple[Any, ...]
    match carrier:
        case "lifeline":
            start = (serve_seqpacket, str(server.directory / "echo"))
        case "zmq ipc":
            start = (serve_zmq, f"ipc://{server.directory / 'echo-zmq'}", None)
        case _:
            start = (serve_zmq, "tcp://127.0.0.1:*", keys)
    echo = stack.enter_context(WorkerProcess(*start))
    return ProcessRoute(carrier, server.name, server.runtime_dir, address, keys, echo.ready)


@contextmanager
def embedded_server(size_bytes: int) -> Iterator[Server]:
    """A populated server in this process, with its own name and directory."""
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.server.server import Server
    from lmcache_core.settings.compose import make_settings

    with temporary_directory() as directory:
        settings = make_settings(
            name=f"bench-{uuid4().hex[:12]}",
            runtime_dir=str(Path(directory, "run")),
            state_dir=str(Path(directory, "state")),
            l1={"size_bytes": size_bytes, "watermark": 1.0},
        )
        with Server(settings, load_plugins()) as server:
            server.parts.populator.wait()
            yield server


def server_cpu_s(client: Client) -> float:
    """CPU seconds of the process that a client's server runs in."""
    return cpu_s(client.status()["server"]["pid"])
