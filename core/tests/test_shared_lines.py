"""Files of lines that servers share: what a writer was told is kept stays kept, whatever happens to the file."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lmcache_core import files
from lmcache_core.errors import SettingsError
from lmcache_core.files import SharedLines
from lmcache_core.limits import STATE_COMPACT_LINES, STATE_LINE_NAMESPACES
from lmcache_core.server.pool.quotas import _Kept, _QuotaFile
from lmcache_core.tiers.object.epochs import EpochFile, Epochs

MANY = b'{"namespaces":{"7":1}}\n' * (2 * STATE_COMPACT_LINES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.mark.parametrize("tail", [b"", b"\0" * 64])
def test_an_epoch_line_that_breaks_off_anywhere_stops_no_start(path: Path, tail: bytes) -> None:
    line = b'{"namespaces":{"5":3},"by":"0123456789abcdef"}'
    for end in range(len(line)):
        path.write_bytes(b'\n{"namespaces":{"7":1}}\n\n' + line[:end] + tail + b'\n{"namespaces":{"9":2}}\n')
        epochs = Epochs(path)
        assert (epochs.of(7), epochs.of(9)) == (1, 2)


def test_a_quota_line_that_breaks_off_anywhere_stops_no_start(path: Path) -> None:
    line = b'{"b":{"namespaces":[5],"stores":{"l1":{"reserved_bytes":null,"limit_bytes":9}}}}'
    for end in range(len(line)):
        path.write_bytes(
            b'\n{"a":{"namespaces":[1],"stores":{}}}\n\n' + line[:end] + b'\n{"c":{"namespaces":[2],"stores":{}}}\n'
        )
        assert _QuotaFile(path).open().keys() == {"a", "c"}


@pytest.mark.parametrize("strange", [b"garbage", b"{garbage}", b'{"namespaces":{"5":-1}}'])
def test_a_strange_line_hides_no_clear_beside_it(path: Path, strange: bytes) -> None:
    one, other = Epochs(path), Epochs(path)
    other.move(5)
    with path.open("ab") as file:
        file.write(strange + b"\n")
    one.refresh()
    assert one.of(5) == other.of(5) == 1
    with pytest.raises(SettingsError):
        Epochs(path)


@pytest.mark.parametrize("replaced", [False, True])
def test_epochs_survive_the_removal_of_their_file(path: Path, replaced: bool) -> None:
    epochs = Epochs(path)
    for _ in range(2):
        epochs.move(5)
    path.unlink()
    if replaced:
        path.write_bytes(b'{"namespaces":{"6":4}}\n')
    epochs.refresh()
    again = Epochs(path)
    assert again.of(5) == 2
    assert again.of(6) == (4 if replaced else 0)


def test_a_clear_beyond_the_last_epoch_is_refused_and_spoils_no_later_start(path: Path) -> None:
    path.write_bytes(b'{"namespaces":{"5":4294967295}}\n')
    epochs = Epochs(path)
    with pytest.raises(SettingsError, match="not cleared"):
        epochs.move(5)
    epochs.move(6)
    assert Epochs(path).of(6) == 1


def test_a_clear_between_two_compactions_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(MANY)
    clearing, replace, depth = Epochs(), files.replace_file, 0

    def replaced(target: Path, content: bytes) -> None:
        nonlocal clearing, depth
        depth += 1
        if depth == 1:  # another start compacts the same file at this moment, and a third server clears
            Epochs(path)
            clearing = Epochs(path)
            clearing.move(5)
        replace(target, content)

    monkeypatch.setattr(files, "replace_file", replaced)
    Epochs(path)
    monkeypatch.undo()
    assert clearing.of(5) == Epochs(path).of(5) == 1
    assert path.stat().st_size < len(MANY)


def test_another_servers_compaction_gives_the_loop_nothing_to_do_and_no_long_line(path: Path) -> None:
    rises = b"".join(b'{"namespaces":{"%d":%d}}\n' % (name, epoch) for epoch in range(1, 6) for name in range(3_000))
    path.write_bytes(rises)
    ours = EpochFile(path)
    ours.changes()
    ours.found.clear()
    assert Epochs(path).of(2_999) == 5  # its start compacts
    assert path.stat().st_size < len(rises) / 4
    ours.changes()
    assert not ours.found
    kept = [msgspec.json.decode(line)["namespaces"] for line in path.read_bytes().splitlines() if b"names" in line]
    assert sum(map(len, kept)) == 3_000
    assert max(map(len, kept)) == STATE_LINE_NAMESPACES


def test_a_clear_of_everything_is_above_every_namespace_and_compacts_to_one_line(path: Path) -> None:
    path.write_bytes(b'{"namespaces":{"7":3}}\n{"namespaces":{"8":9}}\n' + MANY)
    epochs = Epochs(path)
    epochs.move(None)
    assert [epochs.of(name) for name in (7, 8, 9)] == [10, 10, 10]
    again = Epochs(path)
    assert [again.of(name) for name in (7, 8, 9)] == [10, 10, 10]
    again.move(7)
    assert (Epochs(path).of(7), Epochs(path).of(8)) == (11, 10)


def test_a_line_that_went_to_a_replaced_file_is_written_again(path: Path) -> None:
    path.write_bytes(b"former\n")
    times = 0

    def check() -> None:
        nonlocal times
        times += 1
        if times == 1:
            files.replace_file(path, b"anew\n")

    SharedLines(path).append(b"line", check)
    assert path.read_bytes() == b"anew\n\nline\n"


LIMITED = """
import resource, sys
from pathlib import Path
from lmcache_core.files import SharedLines

path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10,) * 2)
try:
    SharedLines(path).append(b"a line that is too long for what is left")
except OSError as error:
    print(error.strerror)
"""


def test_who_finds_no_room_for_a_line_takes_nothing_back(path: Path) -> None:
    """What it would cut off may be another process's line by then."""
    path.write_bytes(b"former\n")
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert path.read_bytes() == b"former\n\na line th"
    SharedLines(path).append(b"whole")
    assert [line for line in SharedLines(path).read() if line] == [b"former", b"a line th", b"whole"]


COMPACTS = """
import os, resource, sys
from pathlib import Path
from lmcache_core import files
from lmcache_core.files import SharedLines

path, how = Path(sys.argv[1]), sys.argv[2]
ours, other = SharedLines(path), SharedLines(path)
ours.read()
other.append(b"answered, " + b"x" * 100)
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))
elif how == "no links":
    Path.hardlink_to = lambda path, target: open("/dev/full", "wb", 0).write(b"x")
elif how == "killed before":
    files.replace_file = lambda path, content: os._exit(0)
elif how == "killed after":
    replace = files.replace_file
    files.replace_file = lambda path, content: replace(path, content) or os._exit(0)
ours.compact(b"all of it")
"""


@pytest.mark.parametrize("how", ["well", "full", "no links", "killed before", "killed after"])
def test_a_line_that_was_answered_survives_the_compaction_of_its_file(path: Path, how: str) -> None:
    path.write_bytes(b"former\n" * 20)
    subprocess.run([sys.executable, "-c", COMPACTS, path, how], check=True)
    for _ in range(2):
        lines = SharedLines(path).read()
        assert lines[-1] == b"answered, " + b"x" * 100
        assert lines[0] == (b"all of it" if how in ("well", "killed after") else b"former")
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing is left beside it"


def test_a_stranger_who_locks_the_file_keeps_nobody_from_starting(path: Path) -> None:
    path.write_bytes(MANY)
    with path.open("r+b") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        epochs = Epochs(path)
        epochs.move(7)
    assert Epochs(path).of(7) == 2


def test_two_servers_that_gave_a_namespace_away_leave_it_to_the_later_one(path: Path) -> None:
    one, other = _QuotaFile(path), _QuotaFile(path)
    for file in (one, other):
        assert file.open() == {}
    one.keep("x", _Kept([5, 6]))
    other.keep("y", _Kept([5]))
    assert _QuotaFile(path).open() == {"x": _Kept([6]), "y": _Kept([5])}
    one.keep("z", _Kept([6]))
    assert _QuotaFile(path).open() == {"y": _Kept([5]), "z": _Kept([6])}


def test_a_change_behind_a_document_of_a_former_release_is_read(path: Path) -> None:
    """The document stays as it is where it cannot be replaced."""
    document = msgspec.json.format(msgspec.json.encode({"x": _Kept([5])}))
    path.write_bytes(document + b"\n")
    with path.open("r+b") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        file = _QuotaFile(path)
        file.open()
        file.keep("y", _Kept([6]))
        assert _QuotaFile(path).open().keys() == {"x", "y"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_compaction_leaves_the_file_to_the_users_who_share_it(path: Path) -> None:
    path.write_bytes(MANY)
    path.chmod(0o660)
    os.chown(path, 65534, 65533)
    EpochFile(path).open()
    about = path.stat()
    assert about.st_size < len(MANY)
    assert (about.st_uid, about.st_gid, about.st_mode & 0o777) == (65534, 65533, 0o660)


def test_compaction_keeps_the_mode_of_the_file(path: Path) -> None:
    path.write_bytes(MANY)
    path.chmod(0o664)
    EpochFile(path).open()
    assert path.stat().st_size < len(MANY)
    assert path.stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket", "sparse file", "loop"])
@pytest.mark.parametrize("file", [Epochs, lambda path: _QuotaFile(path).open()], ids=["epochs", "quotas"])
def test_what_can_be_none_of_our_files_is_refused_at_once(
    path: Path, kind: str, file: Callable[[Path], object]
) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    elif kind == "loop":
        path.symlink_to(path)
    else:
        with path.open("wb") as sparse:
            sparse.truncate(1 << 40)
    with pytest.raises(SettingsError, match="cannot read"):
        file(path)


def test_a_pipe_in_the_place_of_the_epochs_fails_a_clear_and_nobody_waits_for_it(path: Path) -> None:
    epochs = Epochs(path)
    epochs.move(5)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SettingsError, match="regular file"):
        epochs.move(5)
