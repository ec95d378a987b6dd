"""C extensions built under the address and undefined-behaviour sanitizers, and the tests that run over them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import nox

from tools.packages import ROOT, folders
from tools.release import WITH_C
from tools.wheels import LEFT_OUT

# Tests of core that build programs and packages of their own, which a sanitizer around the interpreter would only slow
# down.
BUILDS = [f"tests/native/{each}" for each in ("test_build.py", "test_programs.py", "test_hunt.py")]
FLAGS = "-fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=all -g"


class _Sanitized(NamedTuple):
    name: str  # of the package, without `lmcache-`
    build: dict[str, str]  # makes its extension a sanitized one
    tests: tuple[str, ...]  # those that know of the extension


_BY_FLAGS = {"CFLAGS": FLAGS, "LDFLAGS": FLAGS}
SANITIZED = (
    _Sanitized(
        "core",
        {"LMCACHE_CORE_NATIVE_SANITIZE": "address,undefined"},
        # Tests of it, and those that hold it and the way in Python together.
        ("native", "tokens", "client/test_hits.py", "client/test_pages.py"),
    ),
    # test_rope.py would need torch.
    _Sanitized(
        "blend",
        _BY_FLAGS,
        (
            "test_cutting.py",
            "test_chunks.py::test_a_text_is_found_at_another_place_with_its_keys_moved",
            "test_chunks.py::test_a_marked_document_is_found_at_any_place",
        ),
    ),
    _Sanitized("fp8", _BY_FLAGS, ("test_fp8_kernels.py",)),
    _Sanitized("quant", _BY_FLAGS, ("test_quant_serdes.py",)),
)


def run_tests(session: nox.Session, *pytest: str) -> None:
    """`pytest` over the tests of each extension, in a copy of its package where it is sanitized."""
    for each in SANITIZED:
        with tempfile.TemporaryDirectory() as folder:
            _run_tests(session, each, Path(folder), pytest)


def _run_tests(session: nox.Session, what: _Sanitized, folder: Path, pytest: tuple[str, ...]) -> None:
    (package,) = folders(what.name)
    required = {WITH_C[f"lmcache-{what.name}"]: "require"}
    libraries = [
        str(session.run("gcc", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    source = folder / package.name
    shutil.copytree(package, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(ROOT / "conftest.py", folder)  # the servers of the tests are there
    with session.chdir(source):
        session.run("python", "setup.py", "-q", "build_ext", "--inplace", env=required | what.build)
    env = required | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has until the end
        "PYTHONMALLOC": "malloc",  # each object with its red zones
        "PYTHONPATH": str(source / "src"),
    }
    code = f"import lmcache_{what.name}._native as native; print(native.__file__)"
    if str(folder) not in str(session.run("python", "-c", code, env=env, silent=True)):
        session.error(f"the sanitized extension of {what.name} is not the one that is imported")
    under = [str(source / "tests" / each) for each in what.tests] + [f"--ignore={source / each}" for each in BUILDS]
    session.run(*pytest, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *under, env=env)
