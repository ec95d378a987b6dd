"""A short text for the content of a model's weights, since a name does not say that they were trained further, merged
or replaced under it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_128

from lmcache_core.errors import UsageError
from lmcache_core.limits import FINGERPRINTS_KEPT_MAX, PAGE_BYTES

SAFETENSORS = ".safetensors"
OTHERS = (".bin", ".pt", ".pth", ".gguf")  # what engines load where there are no safetensors
ADAPTER_CONFIG = "adapter_config.json"  # its rank and scale count as the weights do
SAMPLES = 4  # of each tensor, a page each, evenly spread from its first byte to its last
_READ_BYTES = 4 << 20
_HEADER_BYTES_MAX = 100_000_000  # the bound of the format itself

# Digests by what the system says of a file. None of it is part of a fingerprint: two nodes with equal weights share.
_known: dict[tuple[int, ...], bytes] = {}


def weights_fingerprint(path: str | os.PathLike[str], *, whole: bool = False) -> str:
    """32 hexadecimal digits, equal for equal weights, whatever the path and the names of the files.

    `path`: a file, or a folder, of which its `*.safetensors` count, or if there are none, its `*.bin`, `*.pt`, `*.pth`
    and `*.gguf`; and an `adapter_config.json`. Of safetensors the header is read, with every tensor's name, dtype and
    shape, and four pages of each tensor: training changes some of the values there, but an edit of a few rows may not
    show. `whole` reads everything; files of other formats are always read whole. A file that has not changed since this
    process read it is not read again.

    It tells versions of weights apart, and is no proof against somebody who makes two on purpose. Raises `UsageError`
    if there are no weights, or they cannot be read.
    """
    try:
        digests = sorted(_digest(file, whole) for file in _files(Path(path)))
    except OSError as error:
        raise UsageError(f"the weights at {os.fspath(path)} cannot be read: {error.strerror or error}") from error
    state = xxh3_128(b"lmcache-core weights 1 " + (b"whole" if whole else b"samples"))
    for digest in digests:
        state.update(digest)
    return state.hexdigest()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [each for each in path.iterdir() if each.is_file()]
    weights = [each for each in files if each.suffix == SAFETENSORS]
    weights = weights or [each for each in files if each.suffix in OTHERS]
    if not weights:
        raise UsageError(f"there are no weights in {path}: it has none of *{SAFETENSORS}, *{', *'.join(OTHERS)}")
    return [*weights, *(each for each in files if each.name == ADAPTER_CONFIG)]


def _digest(file: Path, whole: bool) -> bytes:
    with file.open("rb", buffering=0) as opened:
        before = _state(opened.fileno())
        digest = _known.get((*before, whole))
        if digest is not None:
            return digest
        state = xxh3_128()
        for piece in _pieces(opened.fileno(), whole or file.suffix != SAFETENSORS):
            state.update(piece)
        if _state(opened.fileno()) != before:
            raise UsageError(f"{file} is being written: wait until it is complete")
    if len(_known) >= FINGERPRINTS_KEPT_MAX:
        del _known[next(iter(_known))]
    _known[*before, whole] = state.digest()
    return state.digest()


def _state(descriptor: int) -> tuple[int, ...]:
    """`ctime`, because a copy may set `mtime` back to what it was."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _pieces(descriptor: int, whole: bool) -> Iterator[bytes | memoryview]:
    size = os.fstat(descriptor).st_size
    spans = None if whole else _spans(descriptor, size)
    if spans is not None:
        for at, length in spans:
            yield os.pread(descriptor, length, at)
        return
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    at = 0
    while count := os.preadv(descriptor, [buffer], at):
        yield buffer[:count]
        at += count


def _spans(descriptor: int, size: int) -> list[tuple[int, int]] | None:
    """Where the header is, and the samples of each tensor. None: this is no safetensors file."""
    header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if header_bytes > min(size - 8, _HEADER_BYTES_MAX):
        return None
    first = 8 + header_bytes
    spans = [(0, first)]
    try:
        tensors = json.loads(os.pread(descriptor, header_bytes, 8))
        for begin, end in sorted(each["data_offsets"] for name, each in tensors.items() if name != "__metadata__"):
            length = int(end) - int(begin)
            if not 0 <= begin <= end <= size - first:
                return None
            if length <= SAMPLES * PAGE_BYTES:
                spans.append((first + begin, length))
            else:
                last = length - PAGE_BYTES
                spans += [(first + begin + last * at // (SAMPLES - 1), PAGE_BYTES) for at in range(SAMPLES)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return spans
