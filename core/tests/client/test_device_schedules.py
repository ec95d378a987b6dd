"""Copies by a device are right in every order that is allowed, and each fault of the order is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import lmcache_core
from lmcache_core.native import native

pytest.importorskip("lmcache_testing")
pytestmark = pytest.mark.skipif(native is None, reason="pages of a device are copied by the C extension")
SCRIPT = Path(__file__).with_name("device_schedules.py")
CORE = Path(__file__).parents[2]
LIMIT_S = 120.0  # a hang, and not a measurement


def run(schedules: int, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--schedules", str(schedules)]
    return subprocess.run(
        command, env=os.environ | (environment or {}), text=True, capture_output=True, timeout=LIMIT_S, check=False
    )


def test_no_schedule_breaks_anything() -> None:
    done = run(200)
    assert done.returncode == 0, done.stdout + done.stderr


# What is put in, and where: an order that a device makes wrong, though the processor would forgive it.
_WAIT = "    int landed = job->device->wait_stream(stream);"
_HAS_READ = '        """Whether all pages have been read, or will never be: from then on they may change."""\n'
MUTANTS = {
    "the engine's event is not waited for": (
        "native/pages.h", "fault = job->event && !pages_stopped(job) ? device->wait_event(job->event) : 0;",
        "fault = 0;",
    ),
    "committed, and judged, before the copies have landed": ("native/pages.h", _WAIT, "    int landed = 0;"),
    "a job that failed or was cancelled does not wait for the device": (
        "native/pages.h", _WAIT, _WAIT.replace("= job", "= fault || pages_stopped(job) ? 0 : job"),
    ),
    "what was read is not judged again once it has landed": (
        "native/pages.h", "    if (pages_unchanged(object) && object->check && object->verified &&",
        "    if (object->check && object->verified &&",
    ),
    "an object is committed though not all of it has landed": (
        "lmcache_core/client/move/page_jobs.py",
        "if len(positions) != len(statuses) or statuses.count(READ | _WRITTEN) != len(statuses):",
        "if len(positions) != len(statuses):",
    ),
    "pages count as read as soon as the copies are queued": (
        "lmcache_core/client/move/page_jobs.py", _HAS_READ, _HAS_READ + "        return True\n",
    ),
    "slots are given back before the threads have left": (
        "native/pages.c", "        team_shut(self->team);\n        Py_END_ALLOW_THREADS",
        "        Py_END_ALLOW_THREADS",
    ),
    "a copy may cross the end of a registration": ("native/device.h", "n < left ? n : left", "n"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_order_is_noticed(tmp_path: Path, name: str) -> None:
    path, right, wrong = MUTANTS[name]
    shutil.copytree(Path(lmcache_core.__file__).parent, tmp_path / "lmcache_core")
    shutil.copytree(CORE / "native", tmp_path / "native")
    text = (tmp_path / path).read_text()
    assert text.count(right) == 1
    (tmp_path / path).write_text(text.replace(right, wrong))
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    made = tmp_path / "lmcache_core" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = sorted((tmp_path / "native").glob("*.c"))
    flags = ["-shared", "-fPIC", "-O1", "-w", "-pthread", "-std=c11", "-D_GNU_SOURCE"]
    subprocess.run([compiler, *flags, f"-I{sysconfig.get_path('include')}", "-o", made, *sources], check=True)
    done = run(600, {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("schedule "), done.stdout
