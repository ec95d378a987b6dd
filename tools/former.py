"""Two environments side by side: a former release of core and the disk tier, and the ones of this checkout."""

from __future__ import annotations

import subprocess
import tempfile
import venv
from pathlib import Path

import nox

from tools.packages import ROOT
from tools.wheels import wheel


def both_sides(session: nox.Session, posargs: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that tell the tests each side's interpreter, and the arguments without `--former REF`.

    Both sides are installed from wheels made here, each into an environment of its own.
    """
    arguments = list(posargs)
    if "--former" in arguments:
        at = arguments.index("--former")
        former, arguments[at : at + 2] = arguments[at + 1], []
    else:
        former = newest_tag()
    if not former:
        session.error("no tag says which release came before: name a commit, as in `-- --former v0.1.0`")
    pythons = {}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", former], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for side, tree in (("FORMER", Path(folder)), ("PRESENT", ROOT)):
            home = Path(session.create_tmp()).absolute() / side.lower()  # tests run elsewhere
            venv.create(home, clear=True, with_pip=True)
            python = str(home / "bin/python")
            ours = [
                str(wheel(tree / each, "require", Path(session.cache_dir), session.log))
                for each in ("core", "plugins/lmcache-fs")
            ]
            subprocess.run([python, "-m", "pip", "install", "-q", *ours], check=True)
            pythons[f"LMCACHE_CORE_{side}_PYTHON"] = python
    return pythons, arguments


def newest_tag() -> str:
    """The newest tag before this commit; "" where there is none."""
    done = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()
