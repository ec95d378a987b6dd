"""What needs a GPU, on a machine that has one: tests and `bench gpu`, and one report.

    python tools/gpu.py [--report FILE] [--rehearse | --why-not]

Runs from the checkout, with nothing of it installed: it builds the C extension in place and puts the packages on the
path. The machine needs Linux, a C compiler, torch with CUDA, pytest, numpy, and what core and its kit depend on; what
is missing is named. Ends within ten minutes. Without a GPU it writes why nothing was run, and exits with 0;
`--rehearse` runs all of it over host memory then, which shows that the script works and nothing of a GPU.

Exit status: 0 all passed, or there is no GPU; 1 a test or the bench has failed; 2 something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["core", "plugins/lmcache-mock", "plugins/lmcache-fs", "plugins/lmcache-copier", "contrib/lmcache-testing",
           "contrib/lmcache-bench", "contrib/lmcache-core-vllm"]  # fmt: skip
TESTS = ["core/tests/client/test_devices.py", "core/tests/client/test_device_schedules.py",
         "core/tests/pool/test_cuda.py", "core/tests/server/test_pinning.py",
         "plugins/lmcache-copier/tests/test_gpu.py",
         "contrib/lmcache-core-vllm/tests/test_devices.py"]  # fmt: skip
NEEDED = ["pytest", "numpy", "pluggy", "zmq", "msgspec", "pydantic", "pydantic_settings", "dotenv", "xxhash",
          "hypothesis", "packaging"]  # fmt: skip
LIMIT_S = 280  # for the tests, and for the bench


def why_no_gpu() -> str:
    """Empty: there is one."""
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return "" if torch.cuda.is_available() else "torch sees no GPU on this machine"


def machine() -> dict[str, Any]:
    """What the figures are of."""
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count()}
    if find_spec("torch") is None:
        return found
    import torch

    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
        driver = Path("/proc/driver/nvidia/version")
        found["driver"] = driver.read_text().splitlines()[0] if driver.exists() else "unknown"
    return found


def environment() -> dict[str, str]:
    """The packages of the checkout, in front of any that are installed."""
    paths = [str(ROOT / each / "src") for each in SOURCES]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def build() -> None:
    """The C extension, in place."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=ROOT / "core", env=os.environ | {"LMCACHE_CORE_NATIVE": "require"}, check=True, timeout=LIMIT_S,
    )  # fmt: skip


def run_tests(junit: Path) -> dict[str, Any]:
    """How many there were, and which of them did not pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={junit}",
               *TESTS]  # fmt: skip
    status = _run(command)
    cases = list(ElementTree.parse(junit).iter("testcase")) if junit.exists() else []
    bad = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = [each for each in cases if each.find("skipped") is not None]
    names = [f"{each.get('classname')}::{each.get('name')}" for each in bad]
    return {"status": status, "passed": len(cases) - len(bad) - len(skipped), "skipped": len(skipped), "failed": names}


def run_bench(device: str) -> dict[str, Any]:
    """Its figures, as it prints them for machines."""
    code = (
        "import argparse, sys; from lmcache_bench import gpu; from lmcache_core.cli.bench.harness import Bench\n"
        "parser = argparse.ArgumentParser(); gpu.add_options(parser); options = parser.parse_args()\n"
        "with Bench('gpu', quick=options.device == 'cpu', as_json=True) as bench: gpu.run(options, bench)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--device", device],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"status": done.returncode, "said": done.stderr[-2000:]}
    return {"status": 0, **json.loads(done.stdout)}


def _run(command: list[str]) -> int:
    try:
        return subprocess.run(command, cwd=ROOT, env=environment(), timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def main() -> int:
    """One report, whatever happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "gpu-report.json")
    parser.add_argument("--rehearse", action="store_true", help="over host memory, where there is no GPU")
    parser.add_argument("--why-not", action="store_true", help="only print why there is no GPU; nothing: there is one")
    options = parser.parse_args()
    if options.why_not:
        print(why_no_gpu(), end="")
        return 0
    options.report.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"when": time.strftime("%Y-%m-%d %H:%M:%S %z"), "machine": machine()}
    reason = why_no_gpu()
    missing = [each for each in NEEDED if find_spec(each) is None]
    status = 0
    if reason and not options.rehearse:
        report["not_run"] = reason
    elif missing:
        report["not_run"], status = f"missing: {', '.join(missing)}", 2
    else:
        report["of"] = "host memory: a rehearsal" if reason else "a GPU"
        build()
        report["tests"] = run_tests(options.report.with_suffix(".xml"))
        report["bench"] = run_bench("cpu" if reason else "cuda")
        status = int(bool(report["tests"]["status"] or report["bench"]["status"]))
    options.report.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{options.report}: {report.get('not_run') or report['of']}")
    return status


if __name__ == "__main__":
    sys.exit(main())
