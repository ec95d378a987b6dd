"""Files that outlive the server: each is written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from io import FileIO
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path` by one with `content`. A crash or power cut leaves either the old or the new one.
    Makes the directory. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the name must survive a power cut, too
    finally:
        os.close(folder)


def append_whole(file: FileIO, content: bytes) -> None:
    """Write all of it at the end of an unbuffered file, or, where the disk is full, nothing: what of it was written is
    taken back. Raises `OSError` with the file's name."""
    end, left = os.fstat(file.fileno()).st_size, memoryview(content)  # others may have cut it since, to rotate it
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        with contextlib.suppress(OSError):  # a device: then nothing can be torn
            file.truncate(end)
            file.seek(end)
        raise OSError(error.errno, error.strerror, str(file.name)) from None
