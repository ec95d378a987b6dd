"""The way to a user: source archive, then wheel, with the C extension, without it, or not at all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")
PARTS = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PACKAGE / "setup.py").is_file(), reason="the tests run outside the source tree"),
]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


def built(source: Path, kind: str, native: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the build backend as pip does, in `source`; the result is in `source/dist`."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    env = os.environ | {"LMCACHE_CORE_NATIVE": native} | environment
    # In a session of its own: what is said on the terminal of whoever installs is not for that of whoever tests.
    return subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True, start_new_session=True
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of a clean tree."""
    tree = tmp_path_factory.mktemp("clean")
    for part in PARTS:
        shutil.copy(PACKAGE / part, tree)
    leave_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for folder in ("src", "native", "tests"):
        shutil.copytree(PACKAGE / folder, tree / folder, ignore=leave_out)
    done = built(tree, "sdist", "require")
    assert done.returncode == 0, done.stderr
    (found,) = (tree / "dist").glob("*.tar.gz")
    return found


@pytest.fixture
def unpacked(archive: Path, tmp_path: Path) -> Path:
    """What a user unpacks from it."""
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / archive.name.removesuffix(".tar.gz")


def warnings(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the compiler complained about."""
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if re.search(r"\.[ch]:\d+:\d+: warning: ", line)]


def wheel_of(source: Path) -> Path:
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def imported(wheel: Path, folder: Path, code: str) -> str:
    """What the package in a wheel prints: its own files, and the dependencies of this interpreter."""
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_CORE")}
    program = f"import lmcache_core; assert lmcache_core.__file__.startswith({str(folder)!r}), lmcache_core\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env | {"PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_source_and_header_travels_in_the_source_archive(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / "native").rglob("*.[ch]")}
    assert any(name.endswith(".h") for name in needed)
    assert needed - names == set()


@needs_compiler
def test_a_wheel_from_the_source_archive_has_the_extension_and_it_works(unpacked: Path, tmp_path: Path) -> None:
    done = built(unpacked, "wheel", "require")
    assert done.returncode == 0, done.stderr
    assert warnings(done) == []
    with zipfile.ZipFile(wheel_of(unpacked)) as wheel:
        names = wheel.namelist()
    assert [name for name in names if name.startswith("lmcache_core/_native.") and name.endswith(".so")]
    assert "lmcache_core/_native.pyi" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]
    said = imported(
        wheel_of(unpacked),
        tmp_path / "installed",
        "from lmcache_core.native import native; print(native.SHA256_BY, native.__file__)",
    )
    assert str(tmp_path / "installed") in said


def test_without_a_compiler_the_package_builds_and_works_and_says_what_is_missing(
    unpacked: Path, tmp_path: Path
) -> None:
    done = built(unpacked, "wheel", "auto", CC="/bin/false")
    assert done.returncode == 0, done.stderr
    said = imported(
        wheel_of(unpacked),
        tmp_path / "installed",
        "from lmcache_core import Layout, Namespace\n"
        "from lmcache_core.native import native, why_not\n"
        "from lmcache_core.tokens import chunk_keys\n"
        "assert native is None\n"
        "print(len(chunk_keys(range(1024), Namespace('m', Layout('uint8', (4,))))), why_not)\n",
    )
    assert said.startswith("4 the C extension is not in use")
    told = [line for line in done.stderr.splitlines() if line.startswith("lmcache-core is installed without")]
    assert len(told) == 1
    assert "two calls" in told[0]
    assert "apt-get install gcc" in told[0]


def test_whoever_installs_without_a_compiler_is_told_on_the_terminal_what_it_costs(unpacked: Path) -> None:
    """pip keeps to itself what a build prints, unless it is asked with -v."""
    code = (
        "import pty, sys\n"
        "status = pty.spawn([sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '.'])\n"
        "sys.exit(status)"
    )
    env = os.environ | {"LMCACHE_CORE_NATIVE": "auto", "CC": "/bin/false"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=unpacked, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.stdout.count("lmcache-core is installed without its C extension") == 1, done.stdout


def test_without_a_compiler_require_fails(unpacked: Path) -> None:
    assert built(unpacked, "wheel", "require", CC="/bin/false").returncode != 0


def test_off_builds_a_pure_wheel(unpacked: Path) -> None:
    assert built(unpacked, "wheel", "off").returncode == 0
    assert wheel_of(unpacked).name.endswith("-py3-none-any.whl")


def test_another_word_is_refused_with_the_words_that_are_known(unpacked: Path) -> None:
    done = built(unpacked, "wheel", "yes")
    assert done.returncode != 0
    assert "auto, require or off" in done.stderr


@needs_compiler
def test_another_compiler_has_nothing_to_complain_about_either(unpacked: Path) -> None:
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    done = built(unpacked, "wheel", "require", CC="clang", LDSHARED="clang -shared")
    assert done.returncode == 0, done.stderr
    assert warnings(done) == []


def test_at_run_time_off_does_without_and_another_word_is_refused() -> None:
    def run(mode: str, code: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"LMCACHE_CORE_NATIVE": mode}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)

    done = run("off", "from lmcache_core.native import native, why_not; assert native is None; print(why_not)")
    assert "LMCACHE_CORE_NATIVE is off" in done.stdout, done.stderr
    done = run("perhaps", "import lmcache_core.native")
    assert done.returncode != 0
    assert "LMCACHE_CORE_NATIVE is 'perhaps': use auto, require, off" in done.stderr
    missing = "import sys; sys.modules['lmcache_core._native'] = None; import lmcache_core.native"
    done = run("require", missing)
    assert done.returncode != 0
    assert "LMCACHE_CORE_NATIVE is require, and the C extension is not there" in done.stderr
    assert "set LMCACHE_CORE_NATIVE to auto" in done.stderr
    assert run("auto", missing).returncode == 0
