"""Writes recordings of a server's requests: compact, bounded, and without anything that reveals a prompt.

A recording is a directory of files. Each begins with a magic and a header, followed by length-prefixed MessagePack
records, so a kill loses only the record being written. Keys and namespaces are stored as keyed hashes; the hash key is
generated for the recording, kept in memory, and never written.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from lmcache_core.errors import UsageError
from lmcache_core.files import append_whole
from lmcache_core.limits import KEY_BYTES
from lmcache_core.observe.events import CacheEvent
from lmcache_core.observe.subscriber import EventSubscriber
from lmcache_core.server.operation import AnsweredRequest
from lmcache_core.settings.paths import OptionalPath
from lmcache_core.settings.sizes import Size

MAGIC = b"LMCTRACE1\n"
SUFFIX = ".lmctrace"
ID_BYTES = 8  # of the 32 bytes of a key
LOOKUP, STORE, RETRIEVE, CLEAR = "lookup", "store", "retrieve", "clear"


class Operation(msgspec.Struct, array_like=True, frozen=True):
    """One operation. `keys`: ids of 8 bytes each; `hits`: the number of hits of a lookup or a retrieve, or of slots
    granted to a store."""

    at_us: int  # since the recording began
    took_us: int
    worker: int
    kind: Annotated[str, msgspec.Meta(pattern="^[a-z_]{1,32}$")]
    space: Annotated[int, msgspec.Meta(ge=0)]  # its namespace
    nbytes: Annotated[int, msgspec.Meta(ge=0)]  # of one object
    keys: bytes
    prefix: bool
    hits: int
    statuses: bytes

    def __post_init__(self) -> None:
        if len(self.keys) % ID_BYTES or not 0 <= self.hits <= len(self.keys) // ID_BYTES:
            raise ValueError(f"{self.hits} hits of {len(self.keys)} bytes of ids")

    def ids(self) -> list[bytes]:
        """The ids of its keys."""
        return [self.keys[at : at + ID_BYTES] for at in range(0, len(self.keys), ID_BYTES)]


class RecordingHeader(msgspec.Struct, frozen=True):
    """The beginning of each file."""

    began_at_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # Unix
    server: str
    version: str
    about: dict[str, Any]


class RequestRecorded(CacheEvent, tag="recorded", frozen=True):
    """A request on its way to the recorder, which has a bus of its own."""

    request: AnsweredRequest


def recorded(at_s: float, request: AnsweredRequest) -> Iterator[CacheEvent]:
    """What to call `EventBus.emit` with."""
    yield RequestRecorded(at_s=at_s, request=request)


class RecordSettings(BaseModel):
    """A recording of the requests to the server: the table `[operations.record]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    dir: OptionalPath = Field(default=None, description="directory of the recording; none: nothing is recorded")
    file_bytes: Annotated[Size, Field(gt=0)] = Field(default=64 << 20, description="begin a new file at this size")
    files: int = Field(default=16, ge=1, le=10_000, description="files to keep; the oldest is deleted")


class Recorder(EventSubscriber):
    """Writes a recording. Raises `UsageError` if the directory already has one, and what the file system raises. A
    batch is written whole or, on a full disk, not at all."""

    may_recover = True

    def __init__(self, settings: RecordSettings, header: RecordingHeader, began_s: float) -> None:
        assert settings.dir is not None
        self._settings = settings
        self._header = header
        self._began_s = began_s
        self._keyed = blake2b(digest_size=ID_BYTES, key=secrets.token_bytes(32))  # copied: the key goes in once
        self._workers: dict[int, int] = {}
        self._files: list[Path] = []
        self._number = 0
        settings.dir.mkdir(parents=True, exist_ok=True)
        if any(settings.dir.glob(f"*{SUFFIX}")):
            raise UsageError(f"{settings.dir} already has a recording: choose another directory, or empty it")
        self.operations = 0
        self._file: FileIO | None = self._begin_file()

    def hear(self, events: Sequence[CacheEvent]) -> None:
        parts: list[bytes] = []
        for event in events:
            if isinstance(event, RequestRecorded):
                record = msgspec.msgpack.encode(self._record(event.request))
                parts += (len(record).to_bytes(4, "little"), record)
        if self._file is None:
            self._file = self._begin_file()
        append_whole(self._file, b"".join(parts))
        self.operations += len(parts) // 2
        if self._file.tell() >= self._settings.file_bytes:
            self.close()  # close this file first: if opening the next one fails, only that one is missing

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _record(self, request: AnsweredRequest) -> Operation:
        ids = [self._id(request.keys[at : at + KEY_BYTES]) for at in range(0, len(request.keys), KEY_BYTES)]
        return Operation(
            int(1e6 * (request.asked_at_s - self._began_s)),
            int(1e6 * request.took_s),
            self._workers.setdefault(request.session, len(self._workers)),
            request.kind,
            int.from_bytes(self._id(request.namespace.to_bytes(8, "big")), "big"),
            request.nbytes,
            b"".join(ids),
            request.prefix,
            request.hits,
            request.statuses,
        )

    def _id(self, raw: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(raw)
        return keyed.digest()

    def _begin_file(self) -> FileIO:
        assert self._settings.dir is not None
        while len(self._files) >= self._settings.files:
            self._files.pop(0).unlink(missing_ok=True)
        path = self._settings.dir / f"{self._number:06}{SUFFIX}"
        header = msgspec.msgpack.encode(self._header)
        file = path.open("xb", buffering=0)
        try:
            append_whole(file, MAGIC + len(header).to_bytes(4, "little") + header)
        except OSError:
            file.close()
            path.unlink()
            raise
        self._number += 1
        self._files.append(path)
        return file
