"""A cache of our packages' wheels: one for each state of a package's sources, however many sessions install it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.packages import CORE, PACKAGES, build_requirements

LEFT_OUT = ("build", "dist", "*.egg-info", "*.so", "__pycache__", ".*")


def wheel(package: Path, native: str, cache: Path, log: Callable[[str], object] = print) -> Path:
    """A local package's wheel. `native`: LMCACHE_CORE_NATIVE while it is built; "" for what the environment says.

    It is built from a copy: nothing is left in the checkout, and nothing that a former build left there comes along.
    """
    with tempfile.TemporaryDirectory() as folder, alone(cache):
        source, out = Path(folder) / package.name, Path(folder) / "out"
        copy_sources(package, source)
        target = cache / "wheels" / digest(source, native)
        if not target.exists():
            log(f"building a wheel of {package.parent.name}/{package.name}")
            command = [builder(cache), "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
            env = {**os.environ, "LMCACHE_CORE_NATIVE": native} if native else None
            subprocess.run([*command, "-w", str(out), str(source)], env=env, check=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(out, target)
        (built,) = target.glob("*.whl")
        return built


def copy_sources(package: Path, target: Path) -> None:
    """What a wheel is built from: a package without its tests (templates bring some, which stay) and build outputs."""
    shutil.copytree(package, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.rmtree(target / "tests", ignore_errors=True)


def digest(source: Path, native: str) -> str:
    """What a wheel depends on: the sources, the interpreter, the compiler, and whether the extension is wanted."""
    parts = [sys.version, native, os.environ.get("CC", ""), str(shutil.which("gcc"))]
    for path in sorted(each for each in source.rglob("*") if each.is_file()):
        parts += [str(path.relative_to(source)), hashlib.sha256(path.read_bytes()).hexdigest()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def builder(cache: Path) -> str:
    """The interpreter that has what our packages name as their build systems, and nothing else."""
    needs = build_requirements((CORE, *PACKAGES.values()))
    home = cache / "builder"
    noted, python, wanted = home / "requires.txt", str(home / "bin/python"), " ".join([sys.version, *needs])
    if not noted.exists() or noted.read_text() != wanted:
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *needs], check=True)
        noted.write_text(wanted)
    return python


@contextmanager
def alone(cache: Path) -> Iterator[None]:
    """One session at a time, of all that run beside each other."""
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
