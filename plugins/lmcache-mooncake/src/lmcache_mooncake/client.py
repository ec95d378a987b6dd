"""The adapter's end of its client process: starts it, and takes calls there and back by their deadlines."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from lmcache_core.errors import TierError
from lmcache_core.tiers.streams import advance, left_s
from lmcache_mooncake.messages import PACKET_BYTES_MAX, Reply, Request, Setup
from lmcache_mooncake.settings import MooncakeSettings

BUFFERS_MAX = 512  # of one call of the kernel
ABANDONED_MAX = 4  # calls past their deadlines that still run: then the process is replaced
_END_S = 0.5
_CURE = "pip install 'lmcache-mooncake[non-cuda]', or mooncake-transfer-engine on machines with CUDA"


class EndedError(Exception):
    """The process ended, and with it this connection."""


class CallLane:
    """A connection to the process: one call at a time, over memory that both have. `close` while a call is under way
    leaves that memory to the process."""

    def __init__(self, owner: StoreProcess, sock: socket.socket, memory_fd: int) -> None:
        self._owner = owner
        self._sock = sock
        self._memory_fd = memory_fd
        self._busy = False

    @property
    def ended(self) -> bool:
        """Whether the process has gone. Between calls there is nothing else to read."""
        return _readable(self._sock)

    def call(self, request: Request, deadline: float) -> Reply:
        """Raises `TimeoutError` at the deadline, and `EndedError`."""
        self._sock.settimeout(left_s(deadline))
        try:
            self._busy = True
            self._sock.send(msgspec.msgpack.encode(request))
            packet = self._sock.recv(PACKET_BYTES_MAX)
        except TimeoutError:
            raise
        except OSError as error:
            self._busy = False
            raise EndedError(str(error)) from error
        self._busy = False
        if not packet:
            raise EndedError("its connection was closed")
        return msgspec.msgpack.decode(packet, type=Reply)

    def write(self, at: int, buffers: Sequence[memoryview]) -> None:
        """Copy an object into the shared memory. The kernel copies, and the interpreter is free meanwhile."""
        left = [each for each in buffers if each.nbytes]
        first = 0
        while first < len(left):
            moved = os.pwritev(self._memory_fd, left[first : first + BUFFERS_MAX], at)
            first, at = advance(left, first, moved), at + moved

    def read(self, at: int, nbytes: int, buffers: Sequence[memoryview]) -> None:
        """Copy an object out of it, as far as it goes."""
        left = [each for each in buffers if each.nbytes]
        first = 0
        while nbytes > 0:
            some: list[memoryview] = []
            room = 0
            for each in left[first : first + BUFFERS_MAX]:
                some.append(each[: nbytes - room])
                room += some[-1].nbytes
                if room == nbytes:
                    break
            moved = os.preadv(self._memory_fd, some, at)
            first, at, nbytes = advance(left, first, moved), at + moved, nbytes - moved

    def close(self) -> None:
        os.close(self._memory_fd)
        if self._busy:
            self._owner.abandon(self._sock)
        else:
            self._sock.close()


class StoreProcess:
    """The process that has Mooncake's client. It is started for the first call, and again when it has ended, or when
    too many of its calls do not end: nothing that Mooncake does reaches the server."""

    def __init__(self, settings: MooncakeSettings, tier: str) -> None:
        self._tier = tier
        self._setup = Setup(
            master=settings.master,
            metadata=settings.metadata,
            protocol=settings.protocol,
            devices=settings.devices,
            host=settings.host,
            tenant=settings.tenant,
            replicas=settings.replicas,
            soft_pin_ms=round(1000 * (settings.soft_pin_s or 0)),
            staging_bytes=settings.staging_bytes,
        )
        waits_s = str(settings.call_timeout_s)
        self._environment = {
            "MC_LOG_LEVEL": "ERROR",  # by default Mooncake warns of each object that does not fit
            **os.environ,
            "MC_RPC_TIMEOUT_MS": waits_s + "000",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": waits_s,
            "MC_TCP_STATUS_TIMEOUT_SEC": waits_s,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._abandoned: list[socket.socket] = []
        self.starts = 0

    def connect(self, deadline: float) -> CallLane:
        """One more connection. Raises `TierError`."""
        left_s(deadline)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory_fd = os.memfd_create("lmcache-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory_fd, self._setup.staging_bytes)
            with theirs, self._lock:
                try:
                    socket.send_fds(self._running(), [b"c"], [theirs.fileno(), memory_fd])
                except OSError:  # it is ending, and cannot be waited for yet
                    self._end(0)
                    socket.send_fds(self._running(), [b"c"], [theirs.fileno(), memory_fd])
        except BaseException as error:
            ours.close()
            os.close(memory_fd)
            if isinstance(error, OSError):
                raise TierError(f"tier {self._tier!r}: its client process cannot be used: {error}") from error
            raise
        return CallLane(self, ours, memory_fd)

    def abandon(self, sock: socket.socket) -> None:
        """A call has not ended by its deadline. The process finishes it, unless there are too many."""
        with self._lock:
            self._forget_ended()
            self._abandoned.append(sock)
            if len(self._abandoned) > ABANDONED_MAX:
                self._end(0)

    def status(self) -> dict[str, int]:
        """The process's id (0: none runs), how often one was started, and calls of it that have outlived a deadline."""
        if self._lock.acquire(blocking=False):  # else it is ending, and has forgotten them
            try:
                self._forget_ended()
            finally:
                self._lock.release()
        process = self._process
        pid = process.pid if process is not None and process.returncode is None else 0
        return {"pid": pid, "starts": self.starts, "late_calls": len(self._abandoned)}

    def close(self) -> None:
        with self._lock:
            self._end(_END_S)

    def _running(self) -> socket.socket:
        """The socket to a process that runs. Under the lock."""
        if self._process is not None and self._process.poll() is not None:
            self._end(0)
        if self._control is None:
            if importlib.util.find_spec("mooncake") is None:
                message = f"tier {self._tier!r}: Mooncake's client is not installed"
                raise TierError(message, cure=_CURE, retryable=False)
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "lmcache_mooncake", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                )
            control.send(msgspec.msgpack.encode(self._setup))
            self._control = control
            self.starts += 1
        return self._control

    def _end(self, patience_s: float) -> None:
        """Under the lock."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._control = None
        for sock in self._abandoned:
            sock.close()
        self._abandoned.clear()

    def _forget_ended(self) -> None:
        for sock in [each for each in self._abandoned if _readable(each)]:
            sock.close()
            self._abandoned.remove(sock)


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
