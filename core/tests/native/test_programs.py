"""The C programs of c/, each of them plain, under the sanitizers, and for arm64.

A program includes the headers of core/native by name, takes no arguments, prints what failed and exits with 0 only
where nothing did. It must end within seconds, also under a sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "native"
PROGRAMS = sorted(path.stem for path in (HERE / "c").glob("*.c"))
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread", "-g", f"-I{HEADERS}"]
ARM64 = "aarch64-linux-gnu-gcc"
WAYS = {
    "plain": ["-O3"],
    "arm64": ["-O2", "-static"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wno-maybe-uninitialized"],
    # gcc warns that it does not see through fences, and of values that only its instrumentation might leave unset.
    "thread": ["-O1", "-fsanitize=thread", "-Wno-tsan", "-Wno-maybe-uninitialized"],
}
# In CI everything must be there; elsewhere a missing tool leaves its tests out.
REQUIRED = os.environ.get("LMCACHE_CORE_NATIVE") == "require"

pytestmark = pytest.mark.skipif(not HEADERS.is_dir(), reason="the tests run outside the source tree")


def needed(tool: str) -> str:
    if shutil.which(tool) is None:
        if REQUIRED:
            pytest.fail(f"{tool} is not installed, and LMCACHE_CORE_NATIVE=require asks for all there is")
        pytest.skip(f"{tool} is not installed")
    return tool


def tried(program: str, way: str, folder: Path) -> None:
    """Compile and run it; raises what the test has to say."""
    compiler = needed(ARM64 if way == "arm64" else "gcc")
    runner = [needed("qemu-aarch64")] if way == "arm64" else []
    target = folder / f"{program}-{way}"
    command = [compiler, *FLAGS, *WAYS[way], str(HERE / "c" / f"{program}.c"), "-o", str(target), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode and "cannot find" in done.stderr and "san" in done.stderr and not REQUIRED:
        pytest.skip(f"{compiler} has no library for {WAYS[way]}")
    assert done.returncode == 0, done.stderr
    done = subprocess.run([*runner, str(target)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def trials(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[None]]]:
    """All that are asked for, as many at a time as there are cores: most of it is compiling."""
    here = [item for item in request.session.items if item.path == Path(__file__) and isinstance(item, pytest.Function)]
    asked = [(item.callspec.params["program"], item.callspec.params["way"]) for item in here]
    folder = tmp_path_factory.mktemp("programs")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {(program, way): pool.submit(tried, program, way, folder) for program, way in asked}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_finds_nothing_wrong(program: str, way: str, trials: dict[tuple[str, str], Future[None]]) -> None:
    trials[program, way].result()
