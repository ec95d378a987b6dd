"""Read recordings of a server's requests. `recorder` writes them and describes their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from lmcache_core.errors import UsageError
from lmcache_lab.recorder import LOOKUP, MAGIC, RETRIEVE, SUFFIX, Operation, RecordingHeader

RECORD_BYTES_MAX = 1 << 20  # a frame's keys are a tenth of it


def is_recording(path: Path) -> bool:
    """Whether it may be a recording: a directory, or a file of one."""
    try:
        if path.is_dir():
            return True
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # the reader of the other format reports what is wrong


def read_recording(path: Path) -> tuple[RecordingHeader, Iterator[Operation]]:
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
                if nbytes > RECORD_BYTES_MAX:
                    raise UsageError(f"{path} is damaged at byte {file.tell() - 4:,}: no record has {nbytes:,} bytes")
                record = file.read(nbytes)
                if len(record) < nbytes or not nbytes:
                    break  # cut off by a kill, or zeros after a power failure
                try:
                    yield msgspec.msgpack.decode(record, type=Operation)
                except (msgspec.MsgspecError, RecursionError) as error:
                    raise UsageError(f"{path} is damaged at byte {file.tell() - nbytes:,}: {error}") from error


def _open(path: Path) -> tuple[RecordingHeader, int]:
    """The header of a file, and the offset of its records."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(f"{path} is not a recording: it does not begin with {MAGIC!r}")
            size = int.from_bytes(file.read(4), "little")
            header = msgspec.msgpack.decode(file.read(min(size, RECORD_BYTES_MAX)), type=RecordingHeader)
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
