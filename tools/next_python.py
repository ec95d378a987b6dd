"""A chroot of Debian's next release with the next Python, in which core's tests run; kept between runs.

It needs root, debootstrap and a mirror of Debian. Wheels are carried in, and the chroot asks no network.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import nox

from tools.packages import CORE, ROOT, build_requirements, group, pyproject, strangers, test_requirements, with_ours
from tools.wheels import LEFT_OUT

NEXT = "3.14"  # a Python that no machine of ours has
SUITE = "sid"  # of Debian, which has it
# There `with lock` can be left without giving the lock back, where a signal raises (python/cpython#148874, mended for
# 3.15): what interrupts a call thousands of times waits for such a lock for good.
INTERRUPTS = (
    "core/tests/client/test_promises.py::test_an_interrupted_lookup_leaves_no_promise_and_the_connection_as_it_is"
)
CHOSEN = ["core/tests", "--ignore=core/tests/native", f"--deselect={INTERRUPTS}"]


def run_tests(session: nox.Session) -> None:
    """pytest in the chroot, over the session's arguments or core's tests."""
    root = Path(session.cache_dir, f"{SUITE}-{NEXT}").resolve()
    if not (root / "usr/bin" / f"python{NEXT}").exists():
        shutil.rmtree(root, ignore_errors=True)
        include = f"--include=python{NEXT}-venv,python{NEXT}-dev,gcc,libc6-dev"
        session.run("debootstrap", "--variant=minbase", include, SUITE, str(root), external=True, silent=True)
    ours = [CORE, *with_ours([], group("test"))]
    tools = strangers([*group("test"), *test_requirements(CORE)])
    needs = [each for path in ours for each in strangers(pyproject(path)["project"]["dependencies"])]
    _carry_wheels(session, root / "wheels", [*needs, *tools])
    shutil.rmtree(root / "source", ignore_errors=True)
    for path in ours:
        shutil.copytree(path, root / "source" / path.name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, root / "source" / name)
    pip = "/venv/bin/python -m pip install -q --no-index --find-links /wheels"
    (root / "run.sh").write_text(
        "set -e\n"
        f"python{NEXT} -m venv --clear /venv\n"
        f"{pip} setuptools\n"
        f"{pip} --no-build-isolation {shlex.join(f'/source/{path.name}' for path in ours)} {shlex.join(tools)}\n"
        "cd /source\n"
        "exec /venv/bin/python -m pytest -q -rf --timeout=300 -m 'not slow' -p no:cacheprovider "
        f"{shlex.join(session.posargs or CHOSEN)}\n"
    )
    mounts = " && ".join(f"mount --rbind /{each} {shlex.quote(str(root / each))}" for each in ("proc", "dev"))
    inside = f"{mounts} && exec chroot {shlex.quote(str(root))} /bin/sh /run.sh"
    env = {"HOME": "/root", "TMPDIR": "/tmp", "LMCACHE_CORE_NATIVE": "require", "PIP_FIND_LINKS": None}
    session.run("unshare", "--mount", "sh", "-c", inside, external=True, env=env)


def _carry_wheels(session: nox.Session, folder: Path, wanted: list[str]) -> None:
    """Wheels of these and of what they need, for the next Python and any Debian that has it."""
    shutil.rmtree(folder, ignore_errors=True)
    session.install("-q", "pip")
    target = ["--python-version", NEXT, "--implementation", "cp", "--only-binary", ":all:"]
    for minor in range(17, 37):
        target += ["--platform", f"manylinux_2_{minor}_x86_64"]
    target += ["--platform", "manylinux2014_x86_64"]
    command = ["python", "-m", "pip", "download", "-q", "-d", str(folder), *target]
    session.run(*command, *wanted, *build_requirements([CORE]))
