"""LMCache in its own environment, created once and kept, so that its dependencies do not become ours.

It shares torch, and vLLM if present, with the environment of the bench, by a line in a `.pth` file: those two alone
take 3.5 GB, and both sides should compute with the same. Their dependencies are shared too; what is missing is
installed. Of the 41 packages that its wheel names, those are skipped that its server, client and connector do not
import on a machine without a GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from lmcache_core.errors import UsageError

LMCACHE = "lmcache==0.5.6"
NEEDED = (
    "aiohttp", "blake3", "cachetools", "cryptography", "httpx", "msgspec", "numba", "numpy", "opentelemetry-api",
    "opentelemetry-sdk", "prometheus_client", "psutil", "py-cpuinfo", "pyyaml", "pyzmq", "requests", "setuptools",
    "sortedcontainers",
)  # fmt: skip
SHARED = ("torch", "vllm")
IMPORTS = "import lmcache.v1.multiprocess.server, lmcache.v1.multiprocess.transfer_context.shm, blake3"
INSTALL_S = 900.0
QUIET = {
    "LMCACHE_TRACK_USAGE": "false",  # it would report to its makers
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONWARNINGS": "ignore",
}
READY = "ready"


def cache_folder() -> Path:
    """Where environments are kept: `$XDG_CACHE_HOME/lmcache-core/peers`, or below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmcache-core" / "peers"


def lmcache_python(tell: Callable[[str], None]) -> Path:
    """The interpreter of LMCache's environment, which is created if missing; `tell` is called first.

    Raises `UsageError` if it cannot be created: torch is missing here, or there is no package index, or no room.
    """
    shared = _shared_folders()
    facts = "\n".join([sys.version, LMCACHE, *NEEDED, *shared])
    folder = cache_folder() / f"{LMCACHE.replace('==', '-')}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two concurrent benches, one creates it
            if not (folder / READY).exists():
                tell(f"install {LMCACHE} into {folder} (once, about 300 MB and two minutes)")
                _make(folder, python, shared)
                (folder / READY).touch()
    except OSError as error:
        raise UsageError(f"no environment for {LMCACHE} in {folder}: {error}; set XDG_CACHE_HOME") from error
    return python


def environment() -> dict[str, str]:
    """Environment variables for LMCache's processes: no path to our packages, no reports to its makers."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **QUIET}


def _shared_folders() -> list[str]:
    """The folders on the path that contain torch and vLLM."""
    folders = []
    for name in SHARED:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent.parent))
        elif name == "torch":
            raise UsageError("--peer lmcache needs torch in this environment, which it shares: pip install torch")
    return sorted(set(folders))


def _make(folder: Path, python: Path, shared: list[str]) -> None:
    has_pip = find_spec("pip") is not None  # then the new environment does not need its own
    _run([sys.executable, "-m", "venv", "--clear", *(["--without-pip"] if has_pip else []), str(folder)])
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text("".join(f"{each}\n" for each in shared))
    pip = [sys.executable, "-m", "pip", "--python", str(python)] if has_pip else [str(python), "-m", "pip"]
    pip += ["install", "-q", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", LMCACHE])
    _run([*pip, *NEEDED])
    _run([str(python), "-c", IMPORTS])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False, env=environment(), cwd="/"
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{LMCACHE} was not installed within {INSTALL_S / 60:.0f} minutes: {command}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise UsageError(
            f"{LMCACHE} could not be installed, and --peer lmcache needs it: {errors[-1].strip()} "
            "(is a package index within reach? Without --peer the bench needs none)"
        )
