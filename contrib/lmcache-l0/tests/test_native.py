"""The C programs beside this file: plain, under the sanitizers, without the validation, and for arm64."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parent / "native"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread", "-g", f"-I{HEADERS}"]
ADDRESS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-O1", "-fsanitize=thread"]
TORN, MISSED = 3, 4


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
    [(["-O3"], 24, 40000), (ADDRESS, 10, 20000), ([*THREAD, "-Wno-tsan"], 8, 10000)],
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


def test_a_key_that_is_moved_while_it_is_looked_for_is_not_missed(tmp_path):
    done = run(compiled("race", tmp_path, "-O3", "-DL0_TEST_PAUSE"), 24, 20000)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_second_look_at_the_bound_keys_are_missed(tmp_path):
    """The negative control for the one above."""
    done = run(compiled("race", tmp_path, "-O3", "-DL0_TEST_PAUSE", "-DL0_TEST_ONE_LOOK"), 2000, 40000)
    assert done.returncode == MISSED, done.stdout + done.stderr  # ends at the first key that was missed


@pytest.mark.parametrize(("program", "size"), [("model", ["40"]), ("race", ["6", "10000"])])
def test_the_c_code_passes_its_program_on_arm64(tmp_path, program, size):
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not installed (qemu-user)")
    built = compiled(program, tmp_path, "-O2", "-static", compiler="aarch64-linux-gnu-gcc")
    done = run("qemu-aarch64", built, *size)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ("tests/native/model.c", []),
        ("tests/native/race.c", []),
        ("native/table.c", [f"-I{sysconfig.get_paths()['include']}", "-shared", "-undefined", "dynamic_lookup"]),
    ],
)
def test_the_same_compiles_and_links_for_macos(tmp_path, source, flags):
    """Not run there: what is held is that no Linux-only name is used without a way around it."""
    if find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    target = tmp_path / "out"
    line = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos", "-std=c11", "-Wall", "-Wextra", "-O1"]
    built = run(*line, f"-I{HEADERS}", *flags, HERE.parent / source, "-o", target)
    assert built.returncode == 0, built.stderr
    assert target.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # a Mach-O file of 64 bits


@pytest.mark.slow
def test_the_python_module_is_clean_under_the_address_sanitizer(tmp_path):
    """The tests of values, views and the model again, in a process with a sanitized build of the module."""
    libraries = [
        run("cc", f"-print-file-name={name}").stdout.strip() if shutil.which("cc") else ""
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("the compiler has no shared sanitizer libraries")
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__", ".*")
    shutil.copytree(HERE.parent, source, ignore=left_out)
    environ = {**os.environ, "LMCACHE_CORE_L0_SANITIZE": "address,undefined"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(build, cwd=source, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    environ |= {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "PYTHONMALLOC": "malloc",  # so that every object has its red zones
        "PYTHONPATH": str(source / "src"),
    }
    options = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-k",
        "not process and not no_numpy and not tensor and not torch and not jax",
    ]
    files = [f"tests/test_{name}.py" for name in ("values", "views", "model", "switch", "calls")]
    code = (
        "import sys, pytest, lmcache_l0._table as table\n"
        f"assert table.__file__.startswith({str(source)!r}), table.__file__\n"
        f"sys.exit(pytest.main({options + files!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
