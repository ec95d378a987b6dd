"""Messages over a Unix stream socket: a length, then MessagePack. Descriptors may travel with a message."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from lmcache_copier.budget import Budget, Charges, Share
from lmcache_copier.limits import DESCRIPTORS_MAX, FRAME_BYTES_MAX
from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import LimitError, ProtocolError

_LENGTH = struct.Struct("<I")
_READ_BYTES = 32 << 10  # malloc maps larger ones anew each time
_ROOM = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
_M = TypeVar("_M")


def frame_of(message: msgspec.Struct) -> bytes:
    """As it is sent. Raises `ProtocolError` for one that is too long."""
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {len(body):,} bytes, and the limit is {FRAME_BYTES_MAX:,}: split the batch")
    return _LENGTH.pack(len(body)) + body


class PassedFile:
    """A descriptor that came with a message. It counts in a share until it is closed; where that has no room for it, it
    is closed at once, and whoever wants it hears why."""

    def __init__(self, number: int, share: Share) -> None:
        self._descriptor = Descriptor.of(number)
        self._charges = Charges()
        self._why = ""
        try:
            self._charges.take(share, 1)
        except LimitError as error:
            self._why = str(error)
            self.close()

    def fileno(self) -> int:
        """The descriptor. Raises `LimitError` if there was no room for it."""
        if self._why:
            raise LimitError(self._why)
        return self._descriptor.fileno()

    def close(self) -> None:
        """Close the descriptor. Does nothing if it is closed."""
        self._descriptor.close()
        self._charges.free()


class Incoming(Generic[_M]):
    """What has been received of one peer, as messages of one union. Descriptors are kept until somebody takes them."""

    def __init__(self, sock: socket.socket, kind: Any, files: Share | None = None) -> None:
        """`files`: what its descriptors count in; none: it may send none."""
        self._sock = sock
        self._files = Share(Budget("files", 0, 0)) if files is None else files
        self._decoder: msgspec.msgpack.Decoder[_M] = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()
        self.descriptors: list[PassedFile] = []

    def receive(self, flags: int = 0) -> bool:
        """Read once, and wait for that as the socket is set to. False: the peer has ended. Raises `OSError`, and
        `ProtocolError` for descriptors that nobody asked for."""
        data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC | flags)
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i", raw[: len(raw) - len(raw) % 4])
                self.descriptors += [PassedFile(number, self._files) for number in numbers]
        if flags & socket.MSG_CTRUNC or len(self.descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"more than {DESCRIPTORS_MAX} descriptors at once")
        self._bytes += data
        return bool(data)

    def messages(self) -> Iterator[_M]:
        """Those that are complete. Raises `ProtocolError`."""
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"a message of {length:,} bytes, and the limit is {FRAME_BYTES_MAX:,}")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            try:
                message = self._decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
                raise ProtocolError(f"a message makes no sense: {error}") from error
            yield message

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        for each in self.descriptors:
            each.close()
        self.descriptors.clear()


def send(sock: socket.socket, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """Send it whole, and wait for that as the socket is set to. Raises `OSError` and `ProtocolError`."""
    frame = frame_of(message)
    if not fds:
        sock.sendall(frame)
        return
    sent = sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    sock.sendall(frame[sent:])


def pidfd_of(sock: socket.socket, pid: int) -> Descriptor:
    """Of the process at the other end, as the kernel knows it. The caller then sees that the peer still answers: a pid
    that has ended by now could be another's. Raises `OSError`."""
    with contextlib.suppress(OSError):
        return Descriptor.of(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return Descriptor.of(os.pidfd_open(pid))


_SO_PEERPIDFD = 77
