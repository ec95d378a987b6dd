"""One connection between two nodes: frames and bytes, each by a deadline, over a plain socket or TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from lmcache_core.tiers.streams import BUFFERS_MAX, advance, left_s, limit, receive_into
from lmcache_peer.errors import LyingPeerError
from lmcache_peer.limits import BYTES_PER_S_MIN, FRAME_BYTES_MAX
from lmcache_peer.messages import PeerMessage

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class Channel:
    """Used by one thread at a time. Every call raises `OSError` if the connection fails, and `TimeoutError`, which is
    one, at the deadline; nothing is known of the connection after that but that it can be closed."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)

    def fileno(self) -> int:
        return self._sock.fileno()

    # --- frames ---------------------------------------------------------------------------------------------
    def send(self, message: PeerMessage, deadline: float) -> None:
        body = _encoder.encode(message)
        self.send_buffers([memoryview(_LENGTH.pack(len(body)) + body)], deadline)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], deadline: float) -> T:
        """The next frame. Raises `LyingPeerError` for one that is too long, or none of those that may come here."""
        length = bytearray(_LENGTH.size)
        self.fill([memoryview(length)], deadline)
        (nbytes,) = _LENGTH.unpack(length)
        if nbytes > FRAME_BYTES_MAX:
            raise LyingPeerError(f"it announces a frame of {nbytes:,} bytes, and the limit is {FRAME_BYTES_MAX:,}")
        body = bytearray(nbytes)
        self.fill([memoryview(body)], deadline)
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise LyingPeerError(f"it sent a frame that has no place here: {error}") from error

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether something comes within this time; the end of the connection counts."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))

    # --- bytes ----------------------------------------------------------------------------------------------
    def fill(self, buffers: Sequence[memoryview], deadline: float, patience_s: float = float("inf")) -> None:
        """Receive until all buffers are full. `patience_s`: the longest time without progress; the whole must not be
        slower than `BYTES_PER_S_MIN` beyond that."""
        left = [part for part in buffers if part.nbytes]
        at, deadline = 0, min(deadline, slowest(sum(part.nbytes for part in left), patience_s))
        while at < len(left):
            until = min(deadline, time.monotonic() + patience_s)
            got = self._some_into(left[at : at + BUFFERS_MAX], until)
            if got == 0:
                raise ConnectionResetError("the other end has closed the connection")
            at = advance(left, at, got)

    def _some_into(self, buffers: list[memoryview], deadline: float) -> int:
        if not self._tls:
            return receive_into(self._sock, buffers, deadline, whole=True)
        self._sock.settimeout(left_s(deadline))
        return self._sock.recv_into(buffers[0])

    def send_buffers(self, buffers: Sequence[memoryview], deadline: float, patience_s: float = float("inf")) -> None:
        """Send all of them; `patience_s` as for `fill`."""
        left = [part for part in buffers if part.nbytes]
        at, deadline = 0, min(deadline, slowest(sum(part.nbytes for part in left), patience_s))
        while at < len(left):
            until = min(deadline, time.monotonic() + patience_s)
            at = advance(left, at, self._some_of(left[at : at + BUFFERS_MAX], until))

    def _some_of(self, buffers: list[memoryview], deadline: float) -> int:
        if self._tls:
            self._sock.settimeout(left_s(deadline))
            return self._sock.send(buffers[0])
        limit(self._sock, socket.SO_SNDTIMEO, deadline)
        try:
            return self._sock.sendmsg(buffers)
        except BlockingIOError:
            raise TimeoutError("the deadline has come") from None

    # --- ends -----------------------------------------------------------------------------------------------
    def shut(self) -> None:
        """Wake whoever waits in this channel: to him it is closed. For any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def slowest(nbytes: int, patience_s: float) -> float:
    """When so many bytes that begin now must be over at the lowest rate (monotonic)."""
    return time.monotonic() + patience_s + nbytes / BYTES_PER_S_MIN
