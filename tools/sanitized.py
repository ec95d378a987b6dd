"""Core's C extension built under the address and undefined-behaviour sanitizers, and the tests that run over it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nox

from tools.packages import CORE, ROOT
from tools.wheels import LEFT_OUT

# What knows of the extension: tests of it, and those that hold it and the way in Python together.
NATIVE = ["tests/native", "tests/tokens", "tests/client/test_hits.py", "tests/client/test_pages.py"]
# Those that build programs and packages of their own, which a sanitizer around the interpreter would only slow down.
BUILDS = [f"tests/native/{each}" for each in ("test_build.py", "test_programs.py", "test_hunt.py")]


def run_tests(session: nox.Session, *pytest: str) -> None:
    """`pytest` over the tests in `NATIVE`, in a copy of core whose extension is sanitized."""
    required = {"LMCACHE_CORE_NATIVE": "require"}
    libraries = [
        str(session.run("gcc", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "core"
        shutil.copytree(CORE, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
        shutil.copy(ROOT / "conftest.py", folder)  # the servers of the tests are there
        with session.chdir(source):
            sanitized = required | {"LMCACHE_CORE_NATIVE_SANITIZE": "address,undefined"}
            session.run("python", "setup.py", "-q", "build_ext", "--inplace", env=sanitized)
        env = required | {
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has until the end
            "PYTHONMALLOC": "malloc",  # each object with its red zones
            "PYTHONPATH": str(source / "src"),
        }
        code = "from lmcache_core.native import native; print(native.__file__)"
        if folder not in str(session.run("python", "-c", code, env=env, silent=True)):
            session.error("the sanitized extension is not the one that is imported")
        under = [str(source / each) for each in NATIVE] + [f"--ignore={source / each}" for each in BUILDS]
        session.run(*pytest, "-c", str(ROOT / "pyproject.toml"), "--rootdir", folder, *under, env=env)
