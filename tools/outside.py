"""As a stranger: core, the kit and its mock tier from sdist to wheel, installed with no checkout on the path; a new
package of each kind that `plugins new` writes passes its own tests.

Run it by `nox -s outside`, which brings the tools.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "plugins/lmcache-mock", "contrib/lmcache-testing")
NEW = {"l2_adapter": "tier", "eviction": "order", "serde": "codec", "subscriber": "hearer", "operation": "inspect"}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in PACKAGES:
            build = [sys.executable, "-m", "build", "--outdir", name, str(ROOT / package)]
            done = subprocess.run(build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{package} cannot be built:\n{done.stdout}")
        _run(sys.executable, "-m", "venv", folder / "venv", at=folder)
        python, command = folder / "venv/bin/python", folder / "venv/bin/lmcache-core"
        _run(python, "-m", "pip", "install", "-q", *sorted(folder.glob("*.whl")), at=folder)
        code = "import lmcache_core; print(lmcache_core.__file__)"
        found = subprocess.run(
            [python, "-c", code], cwd=folder, env=_clean(), stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
        if not Path(found).is_relative_to(folder):
            raise SystemExit(f"something of the checkout is on the path: {found}")
        for kind, new in NEW.items():
            _run(command, "plugins", "new", new, "--kind", kind, at=folder)
        packages = [folder / f"lmcache-{new}" for new in NEW.values()]
        _run(python, "-m", "pip", "install", "-q", *packages, at=folder)
        tests = [package / "tests" for package in packages]
        _run(python, "-m", "pytest", "-q", "--import-mode=importlib", *tests, at=folder)
        _run(command, "plugins", at=folder)


def _run(*command: str | Path, at: Path) -> None:
    subprocess.run(command, cwd=at, env=_clean(), check=True)


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    main()
