"""Real memory, real processes, small mounts: what the pool's tests stand on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core.pool.backing import Backing, segment_path
from lmcache_core.pool.segment import Segment

MIB = 1 << 20
_PATIENCE_S = 60.0  # a safety net on a loaded machine, never a measure


class Child:
    """A Python process that runs a script and speaks by lines: `read` its prints, `tell` its input()."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended early with {self._process.wait(_PATIENCE_S)}"
        return line.rstrip("\n")

    def tell(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """kill -9, and see it dead."""
        self._process.kill()
        self._process.wait(_PATIENCE_S)

    def wait(self) -> int:
        return self._process.wait(_PATIENCE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(script: str, *arguments: object) -> Child:
        children.append(Child(script, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.001)

    return wait


@pytest.fixture
def pool_name() -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    segment_path(name).unlink(missing_ok=True)


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def make(pool_name: str, runtime_dir: Path) -> Iterator[Callable[..., Segment]]:
    """Segments of this process, closed at the end."""
    made: list[Segment] = []

    def create(data_bytes: int = 4 * MIB, backing: Backing = Backing.SHM, **more: object) -> Segment:
        made.append(Segment.create(pool_name, data_bytes, backing, runtime_dir=runtime_dir, **more))  # type: ignore[arg-type]
        return made[-1]

    yield create
    for segment in made:
        segment.close()


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A tmpfs of so many MiB."""
    mounted: list[Path] = []

    def mount(size_mib: int) -> Path:
        directory = tmp_path / f"tmpfs{len(mounted)}"
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(directory)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"mounting is refused here: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Some huge pages, reserved for this test: their number."""
    setting, wanted = Path("/proc/sys/vm/nr_hugepages"), 32
    # The setting is the machine's: other test runs on it wait until this one has put it back.
    turn = open(Path(tempfile.gettempdir()) / f"lmcache-test-hugepages-{os.getuid()}", "w")  # noqa: SIM115
    with turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield from _reserved(setting, wanted)


def _reserved(setting: Path, wanted: int) -> Iterator[int]:
    try:
        before = setting.read_text()
        setting.write_text(str(wanted))
    except OSError as error:
        pytest.skip(f"huge pages cannot be reserved here: {error}")
    try:
        got = int(setting.read_text())
        if got < wanted:
            pytest.skip(f"the kernel gave {got} huge pages of {wanted}")
        yield got
    finally:
        setting.write_text(before)


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    # Autouse, so it is set up before the others and looks after they have cleaned up.
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) <= before, "the test left descriptors open"
