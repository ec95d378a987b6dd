"""The C programs beside this file: plain, under the sanitizers, without the validation, and for arm64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parent / "native"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread", "-g", f"-I{HEADERS}"]
ADDRESS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-O1", "-fsanitize=thread"]
TORN = 3


def compiled(program: str, folder: Path, *flags: str, compiler: str = "cc") -> Path:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    target = folder / program
    done = subprocess.run(
        [compiler, *FLAGS, *flags, str(HERE / "native" / f"{program}.c"), "-o", str(target)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0 and "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip(f"{compiler} has no library for {flags}")
    assert done.returncode == 0, done.stderr
    return target


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("flags", [["-O3"], ADDRESS], ids=["plain", "asan-ubsan"])
def test_one_writer_agrees_with_the_model_and_damaged_files_crash_nothing(tmp_path, flags):
    done = run(compiled("model", tmp_path, *flags), 150)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize(
    ("flags", "rounds", "writes"),
    [(["-O3"], 20, 40000), (ADDRESS, 10, 20000), ([*THREAD, "-Wno-tsan"], 8, 10000)],
    ids=["plain", "asan-ubsan", "tsan"],
)
def test_racing_writers_and_readers_never_tear_or_double_a_key(tmp_path, flags, rounds, writes):
    done = run(compiled("race", tmp_path, *flags, compiler="gcc"), rounds, writes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 0


def test_without_the_validation_torn_reads_are_found(tmp_path):
    """The negative control: the hunt above can find what it looks for."""
    program = compiled("race", tmp_path, "-O3", "-DL0_TEST_NO_VALIDATION")
    done = run(program, 2000, 40000)  # ends at the first torn value
    assert done.returncode == TORN, done.stdout + done.stderr


@pytest.mark.parametrize(("program", "size"), [("model", ["40"]), ("race", ["6", "10000"])])
def test_the_same_on_arm64(tmp_path, program, size):
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not installed (qemu-user)")
    built = compiled(program, tmp_path, "-O2", "-static", compiler="aarch64-linux-gnu-gcc")
    done = run("qemu-aarch64", built, *size)
    assert done.returncode == 0, done.stdout + done.stderr
