"""The torn-read hunt, and its negative control: built without the validation, it finds torn reads.

The hunt in C alone is c/index_hunt.c and c/index_race.c; here it is held over a real server, its eviction, and clients
in processes of their own. LMCACHE_CORE_HUNT_TIMES=100 in the environment makes all of it a hundred times as long.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.native import native
from lmcache_testing.processes import ServerProcess

HERE = Path(__file__).parent
CORE = HERE.parents[1]
NO_VALIDATION = "LMCACHE_CORE_INDEX_NO_VALIDATION"
TIMES = int(os.environ.get("LMCACHE_CORE_HUNT_TIMES", "1"))
TORN, POOL_BYTES, END_S = 3, 24 << 20, 250 * TIMES
FOR_EVER = 10**9

needs_source = pytest.mark.skipif(
    shutil.which("gcc") is None or not (CORE / "setup.py").is_file(), reason="no compiler, or outside the source tree"
)
needs_extension = pytest.mark.skipif(native is None, reason="the C extension is not in use")


def program(name: str, folder: Path, *flags: str) -> str:
    target = str(folder / name)
    source = str(HERE / "c" / f"{name}.c")
    options = ["-O2", "-std=c11", "-D_GNU_SOURCE", "-pthread", f"-I{CORE / 'native'}", *flags]
    subprocess.run(["gcc", *options, source, "-o", target], check=True, timeout=120)
    return target


@needs_source
@pytest.mark.parametrize("name", ["index_hunt", "index_race"])
def test_the_programs_find_torn_reads_where_nobody_validates(name: str, tmp_path: Path) -> None:
    """They end at the first one; with the validation they run to their end (test_programs.py)."""
    hunt = program(name, tmp_path, f"-D{NO_VALIDATION}")
    done = subprocess.run([hunt, str(FOR_EVER)], capture_output=True, text=True, timeout=END_S)
    assert done.returncode == TORN, done.stdout + done.stderr


@needs_source
@pytest.mark.parametrize(("name", "count"), [("index_hunt", 2_000), ("index_race", 30_000)])
def test_the_programs_find_nothing_where_everybody_validates(name: str, count: int, tmp_path: Path) -> None:
    hunt = program(name, tmp_path)
    done = subprocess.run([hunt, str(count * TIMES)], capture_output=True, text=True, timeout=END_S)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def without_validation(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The whole extension, built from the same sources with one macro."""
    folder = tmp_path_factory.mktemp("extension")
    environ = {**os.environ, "LMCACHE_CORE_NATIVE": "require", "LMCACHE_CORE_NATIVE_DEFINES": NO_VALIDATION}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    done = subprocess.run(command, cwd=CORE, env=environ, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("lmcache_core/_native*.so")
    return str(built)


def hunter(role: str, server: ServerProcess, count: int, *extension: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        str(HERE / "hunter.py"),
        role,
        server.name,
        str(server.runtime_dir),
        str(count),
        *extension,
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ready(*hunters: subprocess.Popen[str]) -> None:
    for each in hunters:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"


def hunt(batches: int, role: str = "read") -> list[int]:
    """Two readers beside two writers that store so many batches. Returns what the readers saw of each size."""
    with ServerProcess(POOL_BYTES) as server:
        writers = [hunter("store", server, batches) for _ in range(2)]
        readers = [hunter(role, server, FOR_EVER) for _ in range(2)]
        try:
            ready(*writers, *readers)
            seen = [[int(word) for word in each.communicate(timeout=END_S)[0].split()] for each in writers]
            assert all(sum(column) for column in zip(*seen, strict=True))
            said = [each.communicate(timeout=END_S)[0] for each in readers]  # the end of their input ends them
            assert [each.returncode for each in readers] == [0, 0], said
        finally:
            for each in (*writers, *readers):
                each.kill()
                each.wait(60)
    return [sum(column) for column in zip(*([int(word) for word in line.split()] for line in said), strict=True)]


@needs_extension
def test_clients_of_a_server_that_evicts_all_the_time_read_whole_objects_only() -> None:
    seen = hunt(batches=150 * TIMES)
    print(f"objects of 64 B, 4 KiB, 64 KiB and 1 MiB that were read and whole: {seen}")
    assert all(seen)


@needs_extension
def test_pages_of_a_server_that_evicts_all_the_time_are_whole_or_reported() -> None:
    seen = hunt(batches=150 * TIMES, role="pages")
    print(f"objects of 64 B, 4 KiB, 64 KiB and 1 MiB that were read into pages and whole: {seen}")
    assert all(seen)


@needs_source
@needs_extension
@pytest.mark.parametrize("role", ["read", "pages"])
def test_a_client_that_does_not_validate_reads_torn_objects(without_validation: str, role: str) -> None:
    with ServerProcess(POOL_BYTES) as server:
        writers = [hunter("store", server, FOR_EVER) for _ in range(2)]
        reader = hunter(role, server, FOR_EVER, without_validation)
        try:
            ready(*writers, reader)
            assert reader.stdout is not None
            said = reader.stdout.readline()
            assert reader.wait(END_S) == TORN, said
            assert said.startswith("torn: ")
        finally:
            for each in (*writers, reader):
                each.kill()
                each.communicate(timeout=60)
