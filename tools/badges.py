"""Measures what README's badges show: core's tests, what the tests cover, the kit's card of our adapters.

Run it by `nox -s badges`, which brings the tools; arguments go to the tests of core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = "tests/conformance/test_adapters.py"


def main(arguments: list[str]) -> None:
    results = ROOT / "build/badges"
    results.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"COVERAGE_FILE": str(results / "coverage")}
    junit, covered, card = (str(results / name) for name in ("tests.xml", "coverage.json", "adapters.json"))
    pytest = ["run", "-m", "pytest", "-q", "--timeout=300", "-p", "no:cacheprovider", "-m", "not slow"]
    for command in (
        [*pytest, f"--junitxml={junit}", "core/tests", "--ignore=core/tests/native", *arguments],
        [*pytest, "tests/integration", "tests/conformance", f"--ignore={ADAPTERS}"],
        [*pytest, f"--kit-card={card}", ADAPTERS],
        ["combine", "-q"],
        ["json", "-q", "-o", covered],
    ):
        subprocess.run([sys.executable, "-m", "coverage", *command], cwd=ROOT, env=env, check=True)
    pictures = [sys.executable, str(ROOT / "tools/pictures.py"), "badges", junit, covered, card]
    subprocess.run(pictures, cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
