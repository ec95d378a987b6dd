"""Commands to a server, and its replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Command:
    """`words`, then the concatenation of `payload` as one argument if there is any, then `options`.

    `key` decides the node in a cluster. `into`: the reply is an object, and goes there.
    """

    key: bytes
    words: tuple[bytes, ...]
    payload: Sequence[memoryview] = ()
    options: tuple[bytes, ...] = ()
    into: Sequence[memoryview] | None = None

    @property
    def payload_bytes(self) -> int:
        return sum(part.nbytes for part in self.payload)

    @property
    def room_bytes(self) -> int:
        return sum(part.nbytes for part in self.into or ())


class Received(NamedTuple):
    """An object arrived. `whole` False: it was larger than its buffers, and was discarded."""

    nbytes: int
    whole: bool


class Refusal(NamedTuple):
    """The server answered with an error: `MOVED`, `OOM`, `NOPERM`, … and the rest of its words."""

    code: str
    text: str


class Broken(NamedTuple):
    """There was no answer, and the connection is closed. `late`: because the deadline passed."""

    text: str
    late: bool = False
    retryable: bool = True


Reply = Received | Refusal | Broken | int | bytes | list[Any] | None

ASKING = Command(b"", (b"ASKING",))


def simple(*words: bytes | str, key: bytes = b"") -> Command:
    """A command without payload."""
    return Command(key, tuple(word if isinstance(word, bytes) else word.encode() for word in words))
