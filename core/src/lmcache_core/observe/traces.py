"""Recordings of a server's requests: compact, bounded, and without anything that reveals a prompt.

A recording is a directory of files. Each begins with a magic and a header, followed by length-prefixed MessagePack
records, so a kill loses only the record being written. Keys and namespaces are stored as keyed hashes; the hash key is
generated for the recording, kept in memory, and never written.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lmcache_core.errors import UsageError
from lmcache_core.files import append_whole
from lmcache_core.limits import KEY_BYTES, TRACE_RECORD_BYTES_MAX
from lmcache_core.observe.events import CacheEvent
from lmcache_core.observe.subscriber import EventSubscriber
from lmcache_core.settings.model import RecordSettings

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


class TraceHeader(msgspec.Struct, frozen=True):
    """The beginning of each file."""

    began_at_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # Unix
    server: str
    version: str
    about: dict[str, Any]


class OperationServed(CacheEvent, tag="operation", frozen=True):
    """An operation with its keys. Only for the recorder, never on the event bus."""

    asked_at_s: float  # monotonic
    took_s: float
    worker: int
    kind: str
    namespace: int
    nbytes: int
    keys: bytes
    prefix: bool
    hits: int
    statuses: bytes


class TraceRecorder(EventSubscriber):
    """Writes a recording. Raises `UsageError` if the directory already has one, and what the file system raises. A
    batch is written whole or, on a full disk, not at all."""

    may_recover = True

    def __init__(self, settings: RecordSettings, header: TraceHeader, began_s: float) -> None:
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
            if isinstance(event, OperationServed):
                record = msgspec.msgpack.encode(self._record(event))
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

    def _record(self, event: OperationServed) -> Operation:
        ids = [self._id(event.keys[at : at + KEY_BYTES]) for at in range(0, len(event.keys), KEY_BYTES)]
        return Operation(
            int(1e6 * (event.asked_at_s - self._began_s)),
            int(1e6 * event.took_s),
            self._workers.setdefault(event.worker, len(self._workers)),
            event.kind,
            int.from_bytes(self._id(event.namespace.to_bytes(8, "big")), "big"),
            event.nbytes,
            b"".join(ids),
            event.prefix,
            event.hits,
            event.statuses,
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


def is_recording(path: Path) -> bool:
    """Whether it may be a recording: a directory, or a file of one."""
    try:
        if path.is_dir():
            return True
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # the reader of the other format reports what is wrong


def read_recording(path: Path) -> tuple[TraceHeader, Iterator[Operation]]:
    """A recording's header, and its operations in the order of their answers. Raises `UsageError` for other files."""
    files = sorted(filter(_begun, path.glob(f"*{SUFFIX}"))) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} is not a recording: it has no file *{SUFFIX} with anything in it")
    header, _ = _open(files[0])
    return header, _operations(files)


def _begun(path: Path) -> bool:
    """Whether it has its header: a kill may have come before that."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False  # it made room for another meanwhile


def _operations(files: Iterable[Path]) -> Iterator[Operation]:
    for path in files:
        _, at = _open(path)
        with path.open("rb") as file:
            file.seek(at)
            while len(size := file.read(4)) == 4:
                nbytes = int.from_bytes(size, "little")
                if nbytes > TRACE_RECORD_BYTES_MAX:
                    raise UsageError(f"{path} is damaged at byte {file.tell() - 4:,}: no record has {nbytes:,} bytes")
                record = file.read(nbytes)
                if len(record) < nbytes or not nbytes:
                    break  # cut off by a kill, or zeros after a power failure
                try:
                    yield msgspec.msgpack.decode(record, type=Operation)
                except (msgspec.MsgspecError, RecursionError) as error:
                    raise UsageError(f"{path} is damaged at byte {file.tell() - nbytes:,}: {error}") from error


def _open(path: Path) -> tuple[TraceHeader, int]:
    """The header of a file, and the offset of its records."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(f"{path} is not a recording: it does not begin with {MAGIC!r}")
            size = int.from_bytes(file.read(4), "little")
            header = msgspec.msgpack.decode(file.read(min(size, TRACE_RECORD_BYTES_MAX)), type=TraceHeader)
            return header, len(MAGIC) + 4 + size
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as a recording: {error}") from error


def requests_of(operations: Iterable[Operation]) -> Iterator[tuple[int, list[int]]]:
    """For simulators: the time and the blocks of each request, numbered in order of appearance. A request is a lookup;
    in a recording without lookups, a retrieve."""
    numbers: dict[tuple[int, bytes], int] = {}
    kinds = {LOOKUP}
    waiting: list[Operation] | None = []  # retrieves, until the first lookup shows that they are not needed
    for operation in operations:
        if operation.kind == LOOKUP:
            waiting = None
        elif operation.kind == RETRIEVE and waiting is not None:
            waiting.append(operation)
        if operation.kind in kinds and operation.keys:
            yield operation.at_us, _numbered(operation, numbers)
    for operation in waiting or ():
        yield operation.at_us, _numbered(operation, numbers)


def _numbered(operation: Operation, numbers: dict[tuple[int, bytes], int]) -> list[int]:
    return [numbers.setdefault((operation.space, each), len(numbers)) for each in operation.ids()]


def header_of(server: str, version: str, about: dict[str, Any]) -> TraceHeader:
    """The header of a recording that begins now."""
    return TraceHeader(time.time(), server, version, about)
