"""An S3 that does nothing, for the bench: discards bodies, and sends as many bytes as were put.

python -m lmcache_s3.null_server        prints its port; ends when its standard input does
"""

from __future__ import annotations

import socket
import sys
import threading

_PIECE_BYTES = 1 << 20
_OK = b'HTTP/1.1 200 OK\r\nETag: "0"\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nContent-Length: %d\r\n\r\n'
_ABSENT = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class NullServer:
    """One thread for each connection; sizes of objects by path."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])

    def serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        room = memoryview(bytearray(_PIECE_BYTES))
        kept = b""
        with connection:
            while True:
                while b"\r\n\r\n" not in kept:
                    more = connection.recv(65536)
                    if not more:
                        return
                    kept += more
                head, _, kept = kept.partition(b"\r\n\r\n")
                kept = self._answer(connection, head, kept, room)

    def _answer(self, connection: socket.socket, head: bytes, kept: bytes, room: memoryview) -> bytes:
        method, path, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        path = path.split(b"?")[0]
        lower = head.lower()
        if method == b"PUT":
            if b"100-continue" in lower:
                connection.sendall(_CONTINUE)
            length = _number(lower, b"content-length:")
            kept = _skip(connection, kept, length, room)
            # botocore sends a body with a checksum in chunks; the object's own length is in another header.
            self._sizes[path] = _number(lower, b"x-amz-decoded-content-length:") or length
            connection.sendall(_OK % 0)
        elif method == b"GET" and path in self._sizes:
            start, length = 0, self._sizes[path]
            connection.sendall(_OK % length)
            while start < length:
                start += connection.send(room[: length - start])
        elif method == b"GET" or method == b"HEAD":
            connection.sendall(_ABSENT)
        else:
            kept = _skip(connection, kept, _number(lower, b"content-length:"), room)
            connection.sendall(_OK % 0)
        return kept


def _skip(connection: socket.socket, kept: bytes, length: int, room: memoryview) -> bytes:
    """Read and discard a body; returns what came behind it."""
    left = length - len(kept)
    if left <= 0:
        return kept[length:]
    while left > 0:
        count = connection.recv_into(room[: min(left, len(room))])
        if not count:
            break
        left -= count
    return b""


def _number(head: bytes, name: bytes) -> int:
    at = head.find(b"\n" + name)
    return int(head[at + 1 + len(name) :].split(b"\r\n", 1)[0]) if at >= 0 else 0


def main() -> None:
    server = NullServer()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
