"""Files that outlive the server: each is written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import stat
import tempfile
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path

import msgspec

from lmcache_core.guard import on_failure
from lmcache_core.limits import STATE_FILE_BYTES_MAX

FULL = (errno.ENOSPC, errno.EDQUOT)
_SCARCE_FRACTION = 0.05  # of all inodes


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path` by one with `content`, which the same users may read and write. A crash or power cut
    leaves either the old or the new one. Makes the directory. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    with on_failure(partial(Path(temporary).unlink, missing_ok=True)):
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                _give_access_of(path.stat(), file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the name must survive a power cut, too
    finally:
        os.close(folder)


def _give_access_of(former: os.stat_result, handle: int) -> None:
    """The file's owner, group and mode, as far as they differ. Raises `OSError` where only root may."""
    about = os.fstat(handle)
    if (about.st_uid, about.st_gid) != (former.st_uid, former.st_gid):
        os.fchown(handle, former.st_uid, former.st_gid)
    if about.st_mode != former.st_mode:
        os.fchmod(handle, stat.S_IMODE(former.st_mode))


def inodes_are_scarce(directory: str | Path) -> bool:
    """Whether the file system of this directory has bytes and runs out of inodes. One that does not count them says 0
    of 0, and one that makes them out of free blocks (XFS) has none when it has no bytes."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    return room.f_bavail > 0 and room.f_files > 0 and room.f_favail <= _SCARCE_FRACTION * room.f_files


def reason_of(error: OSError, directory: str | Path) -> str:
    """What the error says, and what there is none of any more in a directory that is full: the system has one number
    for bytes and inodes, and one for all quotas. Asks the file system, so never on the loop."""
    said = error.strerror or str(error)
    if error.errno == errno.EDQUOT:
        return f"{said} (a quota of bytes or of files, of the user, the group or the project)"
    if error.errno == errno.ENOSPC and inodes_are_scarce(directory):
        return f"{said} (it has bytes, but no inodes left)"
    return said


def append_whole(file: FileIO, content: bytes) -> None:
    """Write all of it at the end of an unbuffered file that nobody else writes to, or, where the disk is full, nothing:
    what of it was written is taken back. Raises `OSError` with the file's name."""
    end, left = os.fstat(file.fileno()).st_size, memoryview(content)  # others may have cut it since, to rotate it
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        with contextlib.suppress(OSError):  # a device: then nothing can be torn
            file.truncate(end)
            file.seek(end)
        raise OSError(error.errno, reason_of(error, Path(file.name).parent), str(file.name)) from None


_FORMER = ".former."  # and how far it was read


class SharedLines:
    """Lines in a file that several processes append to, and that may be a link to the file of another one. Nobody waits
    for a lock, and no line that `append` has returned for is ever lost: a writer looks whether its file is still there,
    one process at a time replaces it, and takes over what was written to the former file meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = 0, 0  # the inode of the last read …
        self._at = 0  # … and how far that came
        self.anew = True  # whether that began at the start of a file, or found none: what was read before may be gone

    def read(self) -> list[bytes]:
        """The lines that are new since the last read; all of them if the file was replaced. Raises `OSError`."""
        try:
            with open_regular(self.path) as file:
                about = os.fstat(file.fileno())
                self.anew = (about.st_dev, about.st_ino) != self._file or about.st_size < self._at
                left = b""
                if self.anew:
                    left = self._look_beside()
                    self._file, self._at = (about.st_dev, about.st_ino), 0
                file.seek(self._at)
                content = file.read(max(0, about.st_size - self._at)) or b""
        except (FileNotFoundError, NotADirectoryError):
            self._file, self._at, self.anew = (0, 0), 0, True
            return []
        whole = content.rfind(b"\n") + 1 if b"\n" in content or self._at else len(content)  # one that we did not begin
        self._at += whole
        # A power cut may leave zeros in the place of what never reached the medium.
        return [line for each in (left + b"\n" + content[:whole]).split(b"\n") if (line := each.rstrip(b"\0"))]

    def append(self, line: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Write a line, or several, behind all others, and wait until it is on the medium. `check` is called before
        each write: what it raises keeps the line from being written. Raises `OSError`."""
        written, whole = False, b"\n" + line + b"\n"
        while not written:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                check()
                # A torn line stays one of its own, and nothing is ever taken back: others write behind it at once.
                while file.write(whole) != len(whole):
                    check()
                os.fsync(file.fileno())
                written = _names(self.path, file)  # else: it was replaced since it was opened

    def compact(self, line: bytes) -> None:
        """Replace everything that was read so far by a line, or several, unless another process is about to. The former
        file stays beside it, under a name that says how far it was read, until what others wrote to it meanwhile stands
        in the new one: whoever reads the file anew looks for one that was left. Where there is no room, or a file
        cannot have two names, nothing is replaced, or nothing taken over yet: nothing is lost."""
        target = Path(os.path.realpath(self.path))
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            former = _locked(target, stack)
            if former is None:
                return
            about = os.fstat(former.fileno())
            if (about.st_dev, about.st_ino) != self._file or not _names(target, former):
                return
            former.seek(self._at)
            missed = former.readall() or b""  # by others, since the last read; what breaks off is taken over later
            missed = missed[: missed.rfind(b"\n") + 1]
            beside = target.with_name(f"{target.name}{_FORMER}{self._at + len(missed)}")
            beside.hardlink_to(target)
            with on_failure(partial(beside.unlink, missing_ok=True)):
                replace_file(target, line + b"\n" + missed)
            self._at = 0
            self._take_over(former, beside)

    def _take_over(self, former: FileIO, beside: Path) -> None:
        """Write what came since the file was replaced, by those who had it open, to the one that replaced it."""
        if missed := _behind(former, beside):
            self.append(missed)
        beside.unlink(missing_ok=True)

    def _look_beside(self) -> bytes:
        """Take over from a process that died, or found no room, in the middle of `compact`. Returns what cannot be
        written now."""
        left, target = b"", Path(os.path.realpath(self.path))
        for beside in target.parent.glob(f"{glob.escape(target.name)}{_FORMER}*"):
            with contextlib.ExitStack() as stack:
                former = _locked(beside, stack) if beside.name.rpartition(_FORMER)[2].isdecimal() else None
                if former is None:
                    continue
                try:
                    if _names(target, former):  # it was not replaced after all
                        beside.unlink(missing_ok=True)
                    else:
                        self._take_over(former, beside)
                except OSError:
                    left += _behind(former, beside)
        return left


def open_regular(path: Path, flags: int = os.O_RDONLY) -> FileIO:
    """A file that can be one of ours: a pipe or a device would keep its reader for good, or fill its memory. Raises
    `OSError`."""
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    with on_failure(partial(os.close, handle)):
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", str(path))
        if about.st_size > STATE_FILE_BYTES_MAX and not flags & os.O_APPEND:
            text = f"this has {about.st_size:,} bytes, and a file of ours {STATE_FILE_BYTES_MAX:,} at most"
            raise OSError(errno.EFBIG, text, str(path))
        return FileIO(handle, "rb" if flags == os.O_RDONLY else "r+b" if flags & os.O_RDWR else "ab")


def _behind(former: FileIO, beside: Path) -> bytes:
    former.seek(int(beside.name.rpartition(_FORMER)[2]))
    return former.readall() or b""


def _locked(path: Path, stack: contextlib.ExitStack) -> FileIO | None:
    """The file there; None if there is none, or another process is about to replace it."""
    try:
        file = stack.enter_context(open_regular(path, os.O_RDWR))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a stranger's keeps the file long, and that is all
    except OSError:
        return None
    return file


def is_torn(error: msgspec.MsgspecError) -> bool:
    """Whether a line of JSON only breaks off: its writer died in the middle, and nobody was answered."""
    return "truncated" in str(error)


def _names(path: Path, file: FileIO) -> bool:
    """Whether the path leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
