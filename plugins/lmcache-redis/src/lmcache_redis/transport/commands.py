"""Commands to a server, and its replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

REPLY_BYTES_MAX = 64 << 10  # of one that is a status, a number, an error, or a few lines


@dataclass(frozen=True, slots=True)
class Command:
    """`arguments`, then the concatenation of `payload` as one argument if there is any, then `options`.

    `key` decides the node in a cluster. `into`: the reply is an object, and goes there. Any other reply of more than
    `reply_bytes_max` is not received to its end: what a server sends is kept until then.
    """

    key: bytes
    arguments: tuple[bytes, ...]
    payload: Sequence[memoryview] = ()
    options: tuple[bytes, ...] = ()
    into: Sequence[memoryview] | None = None
    reply_bytes_max: int = REPLY_BYTES_MAX

    @property
    def payload_bytes(self) -> int:
        return sum(part.nbytes for part in self.payload)

    @property
    def room_bytes(self) -> int:
        return sum(part.nbytes for part in self.into or ())


class Received(NamedTuple):
    """An object arrived. `whole` False: it was larger than its buffers, and was discarded; `nbytes` is then the least
    that it has."""

    nbytes: int
    whole: bool


class Refusal(NamedTuple):
    """The server answered with an error: `MOVED`, `OOM`, `NOPERM`, … and the rest of its words."""

    code: str
    text: str


class Broken(NamedTuple):
    """There was no answer, and the connection is closed. `late`: because the deadline passed. `cure`: what a person can
    do, if only a person can help."""

    text: str
    late: bool = False
    retryable: bool = True
    cure: str = ""


Reply = Received | Refusal | Broken | int | bytes | list[Any] | None

ASKING = Command(b"", (b"ASKING",))


def simple(*arguments: bytes | str, key: bytes = b"", reply_bytes_max: int = REPLY_BYTES_MAX) -> Command:
    """A command without payload."""
    encoded = tuple(argument if isinstance(argument, bytes) else argument.encode() for argument in arguments)
    return Command(key, encoded, reply_bytes_max=reply_bytes_max)
