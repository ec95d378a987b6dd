"""Installation: the sdist builds, and the wheel from it has the compiled module."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None, reason="build is not installed")
def test_a_wheel_from_the_sdist_has_the_module_in_it(tmp_path):
    # A copy: a build writes beside its source, and others may be at work there.
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__", ".*"))
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    headers = {f"native/{path.name}" for path in (PACKAGE / "native").iterdir()}
    assert headers | {"LICENSE", "CHANGELOG.md", "tests/native/race.c", "examples/gunicorn.conf.py"} <= names
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert any(name.startswith("lmcache_l0/_table.") and name.endswith(".so") for name in names)
    assert {"lmcache_l0/_table.pyi", "lmcache_l0/py.typed", "lmcache_l0/cli/look.py"} <= names
    assert not any("native" in name or name.startswith("tests") for name in names)


def test_importing_the_plugin_loads_nothing_heavy():
    code = (
        "import sys, lmcache_l0, lmcache_l0.plugin\n"
        "heavy = {'numpy', 'torch', 'zmq', 'pydantic', 'lmdb', 'redis', 'lmcache_l0._table'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_method_of_the_module_stands_in_its_stub():
    from lmcache_l0 import _table

    stub = (PACKAGE / "src" / "lmcache_l0" / "_table.pyi").read_text()
    for kind in (_table.Table, _table.View):
        missing = [name for name in vars(kind) if not name.startswith("_") and f"def {name}(" not in stub]
        assert not missing
