"""Packages with kernels in C: source archive, then wheel, with the kernels, without them, or failing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
COMPILER = shutil.which("cc") or shutil.which("gcc")
PARTS = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]

pytestmark = pytest.mark.slow


def built(source: Path, kind: str, native: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the build backend as pip does, in `source`; the result is in `source/dist`."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    settings = {f"LMCACHE_CORE_{name}_NATIVE": native for name in ("BLEND", "FP8", "QUANT")}
    env = os.environ | settings | environment
    return subprocess.run([sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True)


@pytest.fixture(params=["blend", "fp8", "quant"])
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def unpacked(tmp_path: Path, package: str) -> Path:
    """What a user unpacks from the source archive."""
    folder = PLUGINS / f"lmcache-{package}"
    tree = tmp_path / "tree"
    tree.mkdir()
    for part in PARTS:
        shutil.copy(folder / part, tree)
    leave_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(folder / "src", tree / "src", ignore=leave_out)
    done = built(tree, "sdist", "auto")
    assert done.returncode == 0, done.stderr
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / archive.name.removesuffix(".tar.gz")


def wheel_names(source: Path) -> list[str]:
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
def test_a_wheel_from_the_source_archive_has_the_kernel_and_not_its_sources(unpacked: Path, package: str) -> None:
    done = built(unpacked, "wheel", "require")
    assert done.returncode == 0, done.stderr
    names = wheel_names(unpacked)
    assert [name for name in names if name.startswith(f"lmcache_{package}/_native.") and name.endswith(".so")]
    assert not [name for name in names if name.endswith((".c", ".h"))]
    assert f"lmcache_{package}/_native.pyi" in names


def test_off_builds_a_pure_wheel(unpacked: Path) -> None:
    assert built(unpacked, "wheel", "off").returncode == 0
    (wheel,) = (unpacked / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_without_a_compiler_auto_goes_on_and_require_does_not(unpacked: Path) -> None:
    assert built(unpacked, "wheel", "require", CC="false").returncode != 0
    assert built(unpacked, "wheel", "auto", CC="false").returncode == 0
    assert not [name for name in wheel_names(unpacked) if name.endswith(".so")]


def test_another_word_is_refused_with_the_words_that_are_known(unpacked: Path) -> None:
    done = built(unpacked, "wheel", "yes")
    assert done.returncode != 0
    assert "auto, require or off" in done.stderr
