"""One object, one file: its bytes, then a trailer of 16 bytes with their number.

The trailer distinguishes a truncated or longer file from a whole one without reading the object. Bytes go straight from
and into the caller's buffers; every call that moves them releases the GIL.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Sequence

BLOCK_BYTES = 4096  # offset, length and address that O_DIRECT wants, on every medium in use
TRAILER = struct.Struct("<8sQ")
_MAGIC = b"LMCFSEND"
_IOV_BYTES_MAX = 0x7FFFF000  # the most that Linux moves in one call
_IOV_MAX = 1024
_BOUNCE_BYTES = 1 << 20  # for buffers that O_DIRECT does not take as they are


class NotWholeError(Exception):
    """The file is not what was published; the message says how."""


class NotAFileError(NotWholeError):
    """Something else has the name, and it is not ours: we make regular files only."""


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


def open_file(path: str, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
    """Open a file of ours, and look at it. Never waits for the other end of a FIFO or for a device. Raises
    `NotAFileError` for anything but a regular file, and `OSError`."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a socket, a directory to write to
            raise
        kind = stat.S_IFMT(os.stat(path, follow_symlinks=False).st_mode)  # noqa: PTH116  # a name like all others
        if kind == stat.S_IFREG:  # it is one by now, or a folder on the way is a loop of links
            raise
        raise _not_a_file(kind) from error
    try:
        about = os.fstat(handle)  # of a file that another node has removed, NFS answers ESTALE
        if not stat.S_ISREG(about.st_mode):
            raise _not_a_file(stat.S_IFMT(about.st_mode))
    except (OSError, NotAFileError):
        os.close(handle)
        raise
    return handle, about


def _not_a_file(kind: int) -> NotAFileError:
    return NotAFileError(f"it is {_KINDS.get(kind, 'something unknown')}, where a file is expected")


def make_folder(path: str, *, sync: bool) -> None:
    """Create a folder that only its owner may read, unless it exists. `sync`: its name survives a power cut, and so do
    those of the parents that had to be created."""
    above = os.path.dirname(path)  # noqa: PTH120  # a name like all others here
    try:
        os.mkdir(path, 0o700)  # noqa: PTH102
    except FileExistsError:
        if not os.path.isdir(path):  # noqa: PTH112
            raise
        return
    except FileNotFoundError:
        if os.path.isdir(above):  # noqa: PTH112  # it takes no folders, as /proc does
            raise
        make_folder(above, sync=sync)
        make_folder(path, sync=sync)
        return
    if sync:
        sync_folder(above)


def sync_folder(path: str) -> None:
    """The names in a folder are on the medium when this returns."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def trailer(nbytes: int) -> bytes:
    """The end of a file that holds `nbytes` of object."""
    return TRAILER.pack(_MAGIC, nbytes)


def write_object(path: str, buffers: Sequence[memoryview], *, direct: bool, sync: bool) -> None:
    """Write a new file. Raises `OSError`: EINVAL if the medium does not allow `direct`."""
    nbytes = sum(part.nbytes for part in buffers)
    aligned, rest = split_aligned(buffers) if direct and nbytes >= BLOCK_BYTES else ([], list(buffers))
    direct = bool(aligned)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    handle = os.open(path, flags, 0o600)
    try:
        if direct:
            _write_direct(handle, aligned)
            # The tail is not a whole block: it goes through the page cache.
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
        _write_all(handle, [*rest, memoryview(trailer(nbytes))])
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def read_object(handle: int, file_bytes: int, buffers: Sequence[memoryview], *, direct: bool) -> int:
    """Fill `buffers` from a file of `file_bytes`; the object's size. Raises `NotWholeError`, or `OSError`.

    With `direct`, past the page cache. Raises EINVAL if the medium does not allow it.
    """
    nbytes = file_bytes - TRAILER.size
    if nbytes < 0:
        raise NotWholeError(f"it has {file_bytes} bytes, fewer than its trailer")
    room = sum(part.nbytes for part in buffers)
    if nbytes > room:
        raise NotWholeError(f"it holds {nbytes:,} bytes, and {room:,} were expected at most")
    parts = _cut(buffers, nbytes)
    end = bytearray(TRAILER.size)
    at = 0
    if direct:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
        aligned, parts = split_aligned(parts)
        at = _read_direct(handle, aligned)
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
    _read_all(handle, [*parts, memoryview(end)], at)
    magic, recorded = TRAILER.unpack(end)
    if magic != _MAGIC or recorded != nbytes:
        raise NotWholeError(f"its {file_bytes:,} bytes do not end in its trailer: it was truncated or overwritten")
    return nbytes


def split_aligned(buffers: Sequence[memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """The whole blocks at the front, and the rest."""
    aligned: list[memoryview] = []
    for position, part in enumerate(buffers):
        whole = part.nbytes // BLOCK_BYTES * BLOCK_BYTES
        if whole == part.nbytes:
            aligned.append(part)
            continue
        if whole:
            aligned.append(part[:whole])
        return aligned, [part[whole:], *buffers[position + 1 :]]
    return aligned, []


def _cut(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    parts: list[memoryview] = []
    for part in buffers:
        if nbytes <= 0:
            break
        parts.append(part[:nbytes])
        nbytes -= part.nbytes
    return parts


def _some(parts: Sequence[memoryview]) -> list[memoryview]:
    """The first buffers, as many as one call takes."""
    room = _IOV_BYTES_MAX // BLOCK_BYTES * BLOCK_BYTES
    some: list[memoryview] = []
    for part in parts[:_IOV_MAX]:
        some.append(part[:room])
        room -= part.nbytes
        if room <= 0:
            break
    return some


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """The remaining buffers after `done` bytes."""
    while parts and done >= parts[0].nbytes:
        done -= parts[0].nbytes
        parts = parts[1:]
    if done:
        parts = [parts[0][done:], *parts[1:]]
    return parts


def _write_all(handle: int, parts: list[memoryview]) -> None:
    while parts:
        done = os.writev(handle, _some(parts))
        if done == 0 and any(part.nbytes for part in parts):
            raise OSError(errno.EIO, "the medium accepts no more bytes and gives no reason")
        parts = _after(parts, done)


def _write_direct(handle: int, parts: list[memoryview]) -> None:
    try:
        _write_all(handle, parts)
        return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some buffer is not aligned to a block (an encoder's bytes): copy it through one that is.
    parts = _after(parts, os.lseek(handle, 0, os.SEEK_CUR))
    bounce = _bounce()
    while parts:
        filled = 0
        while parts and filled < bounce.nbytes:
            piece = parts[0][: bounce.nbytes - filled]
            bounce[filled : filled + piece.nbytes] = piece
            filled += piece.nbytes
            parts = _after(parts, piece.nbytes)
        _write_all(handle, [bounce[:filled]])


def _read_direct(handle: int, parts: list[memoryview]) -> int:
    """Where the next byte would come from."""
    try:
        return _read_all(handle, parts, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    bounce = _bounce()
    at = 0
    while parts:
        wanted = min(bounce.nbytes, sum(part.nbytes for part in parts))
        _read_all(handle, [bounce[:wanted]], at)
        at += wanted
        taken = 0
        while taken < wanted:
            piece = parts[0][: wanted - taken]
            piece[:] = bounce[taken : taken + piece.nbytes]
            taken += piece.nbytes
            parts = _after(parts, piece.nbytes)
    return at


def _bounce() -> memoryview:
    return memoryview(mmap.mmap(-1, _BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _read_all(handle: int, parts: list[memoryview], at: int) -> int:
    """Where the next byte would come from."""
    while parts:
        done = os.preadv(handle, _some(parts), at)
        if done == 0 and any(part.nbytes for part in parts):
            raise NotWholeError(f"it ended at byte {at:,} while it was read")
        at += done
        parts = _after(parts, done)
    return at
