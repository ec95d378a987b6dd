"""RESP on a channel, with payloads that go from and into the caller's memory.

Only what payload commands need: arrays of bulk strings out; status, error, integer, bulk and null replies in. Many
objects are sent in one call, and the end of one reply is received together with the head of the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lmcache_core.tiers.streams import advance
from lmcache_redis.transport.channel import Channel
from lmcache_redis.transport.commands import Command, Received, Refusal, Reply

# A server copies an object into its reply when it reads the request, and sends it later: if a whole batch is requested
# at once, it copies into fresh memory and sends from uncached memory. At least two objects, so that it always has one
# to send.
OWED_BYTES_MAX = 2 << 20
OWED_MIN = 2
AHEAD_BYTES = 4096  # read beyond an object for the next reply's head; what of it is payload is copied
LINE_BYTES_MAX = 64 << 10
BULK_BYTES_MAX = 512 << 20  # proto-max-bulk-len, as servers have it
_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_END = b"\r\n"


class WireError(Exception):
    """The stream is invalid; the connection cannot be used any more."""


def converse(channel: Channel, commands: Sequence[Command], replies: list[Reply]) -> None:
    """Send all commands and append their replies as they come. Large replies are requested a few at a time. Raises
    `OSError`, `TimeoutError` or `WireError`: the stream is then in the middle of something."""
    rooms = [command.room_bytes for command in commands]
    stream = Replies(channel)
    sent = owed = 0
    for position, command in enumerate(commands):
        # Not before half has arrived: a send for each object would cost more than it gains.
        if sent < len(commands) and (sent < position + OWED_MIN or owed <= OWED_BYTES_MAX // 2):
            first = sent
            while sent < len(commands) and (
                sent < position + OWED_MIN or owed + rooms[sent] <= OWED_BYTES_MAX or not rooms[sent]
            ):
                owed += rooms[sent]
                sent += 1
            channel.send_all([*_joined(commands[first:sent], channel.join_bytes_max)])
        replies.append(stream.read(command, rooms[position]))
        owed -= rooms[position]
    stream.finish()


# --- out ----------------------------------------------------------------------------------------------------


def _joined(commands: Sequence[Command], copy_bytes_max: int) -> Iterator[memoryview]:
    """The stream in parts: framing is joined across commands, payloads stay separate unless they are small."""
    pending = bytearray()
    for command in commands:
        arguments = [*command.arguments]
        count = len(arguments) + bool(command.payload) + len(command.options)
        pending += b"*%d\r\n" % count
        for argument in arguments:
            pending += b"$%d\r\n%b\r\n" % (len(argument), argument)
        if command.payload:
            pending += b"$%d\r\n" % command.payload_bytes
            for part in command.payload:
                if part.nbytes <= copy_bytes_max:
                    pending += part
                else:
                    yield memoryview(pending)
                    yield part.cast("B")
                    pending = bytearray()
            pending += _END
        for argument in command.options:
            pending += b"$%d\r\n%b\r\n" % (len(argument), argument)
    if pending:
        yield memoryview(pending)


# --- in -----------------------------------------------------------------------------------------------------


class Replies:
    """Reads the replies of one exchange; after the last, `finish` checks that nothing is left."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ahead = bytearray(AHEAD_BYTES)
        self._begin = self._end = 0  # received, and not yet read

    def read(self, command: Command, room_bytes: int) -> Reply:
        """The next reply; an object of at most `room_bytes` goes where the command says. Raises `OSError`,
        `TimeoutError` or `WireError`."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        try:
            if kind == b"$":
                return self._bulk(_number(rest, -1, BULK_BYTES_MAX), command, room_bytes)
            if kind == b":":
                return _number(rest, -(1 << 63), (1 << 63) - 1)
            if kind == b"!":
                text = bytearray(_number(rest, 0, LINE_BYTES_MAX))
                self._fill([memoryview(text)])
                self._line_end()
                return _refusal(bytes(text))
        except ValueError as error:
            raise WireError(f"a reply begins with {line[:40]!r}") from error
        if kind == b"-":
            return _refusal(rest)
        if kind == b"+":
            return rest
        if kind == b"_":
            return None
        raise WireError(f"a reply begins with {line[:40]!r}")

    def finish(self) -> None:
        """All replies have been read: check that the stream is idle."""
        if self._begin != self._end:
            raise WireError("more data came than was requested")

    def _bulk(self, nbytes: int, command: Command, room_bytes: int) -> Reply:
        if nbytes == -1:
            return None
        if command.into is None:
            raise WireError("an object came that was not requested")
        if nbytes == room_bytes:
            self._fill([part.cast("B") for part in command.into])
        elif nbytes < room_bytes:
            self._fill(_cut(command.into, nbytes))
        else:
            self._skip(nbytes)
        self._line_end()
        return Received(nbytes, nbytes <= room_bytes)

    def _line(self) -> bytes:
        while (at := self._ahead.find(_END, self._begin, self._end)) < 0:
            self._more()
        line = bytes(self._ahead[self._begin : at])
        self._begin = at + len(_END)
        return line

    def _more(self) -> None:
        """Receive more, behind the unread bytes."""
        if self._begin:
            held = self._ahead[self._begin : self._end]
            self._ahead[: len(held)] = held
            self._begin, self._end = 0, len(held)
        if self._end == len(self._ahead):
            if self._end >= LINE_BYTES_MAX:
                raise WireError("a line does not end")
            self._ahead = self._ahead.ljust(2 * self._end, b"\0")
        self._end += self._channel.receive([memoryview(self._ahead)[self._end :]])

    def _line_end(self) -> None:
        while self._end - self._begin < len(_END):
            self._more()
        if not self._ahead.startswith(_END, self._begin):
            raise WireError("an object is longer than its head says")
        self._begin += len(_END)

    def _fill(self, parts: list[memoryview]) -> None:
        """Fill all parts, first from the read-ahead and then from the channel."""
        at = 0
        while at < len(parts) and self._begin < self._end:
            part = parts[at]
            taken = min(self._end - self._begin, part.nbytes)
            part[:taken] = memoryview(self._ahead)[self._begin : self._begin + taken]
            self._begin += taken
            at = advance(parts, at, taken)
        while at < len(parts):
            at = advance(parts, at, self._channel.receive(parts[at:], whole=True)) if parts[at].nbytes else at + 1

    def _skip(self, nbytes: int) -> None:
        """Discard an object, so that the replies behind it can be read."""
        held = min(nbytes, self._end - self._begin)
        self._begin += held
        nbytes -= held
        scratch = memoryview(bytearray(min(nbytes, 1 << 18)))
        while nbytes:
            nbytes -= self._channel.receive([scratch[: min(nbytes, len(scratch))]])


def _number(text: bytes, least: int, most: int) -> int:
    """Raises `ValueError` for anything but plain digits, and for a number that is out of bounds."""
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise ValueError
    return int(text)


def _cut(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the parts."""
    cut = []
    for part in parts:
        flat = part.cast("B")[:nbytes]
        cut.append(flat)
        nbytes -= flat.nbytes
    return cut


def _refusal(text: bytes) -> Refusal:
    code, _, rest = text.decode(errors="replace").partition(" ")
    return Refusal(code, rest)
