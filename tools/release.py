"""Makes what a release consists of into `dist/`, and looks at it as those will who install it.

    python tools/release.py [--pythons 3.11,3.12] [--arm64] [--no-compare] [--only lmcache-core,lmcache-l0]
    python tools/release.py --notes                   # print the release notes, which are made from the changelogs

One sdist a package. Wheels: Python ones once; those with C for each Python that is found, compiled by zig against an
old glibc, so that they run on older systems than this one; core, which goes on without its extension, as a wheel
without it, too. Everything is built twice and must come out the same, byte for byte; then the checkers look at it,
and each wheel is installed into an environment of its own and all of them into one.

Run it by `nox -s release`, which brings the tools.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
PYTHONS = ("3.11", "3.12", "3.13")
# By package: the setting that makes a failure to build the C part a failure, and whether one build serves all Pythons.
WITH_C = {
    "lmcache-core": "LMCACHE_CORE_NATIVE",
    "lmcache-fp8": "LMCACHE_CORE_FP8_NATIVE",
    "lmcache-quant": "LMCACHE_CORE_QUANT_NATIVE",
    "lmcache-blend": "LMCACHE_CORE_BLEND_NATIVE",
    "lmcache-l0": "",
}
STABLE_ABI = {"lmcache-blend", "lmcache-fp8", "lmcache-quant"}
WITHOUT_C_TOO = {"lmcache-core": "LMCACHE_CORE_NATIVE", "lmcache-fp8": "LMCACHE_CORE_FP8_NATIVE"}
MACHINES = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}

# What each environment has to do: a server in the process that stores an object and finds it, by core's C extension.
SMOKE = """
import tempfile
from lmcache_core import Layout, Namespace, Server, make_settings
from lmcache_core.native import native
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.tokens import chunk_keys

assert native, "core's wheel has no C extension"
namespace = Namespace("smoke", Layout("uint8", (4096,)))
keys = chunk_keys(range(512), namespace)
with tempfile.TemporaryDirectory() as home:
    l1 = {"size_bytes": 16 << 20, "backing": "memfd"}
    settings = make_settings(name="smoke", runtime_dir=home, state_dir=home, l1=l1)
    with Server(settings, load_plugins()) as server, server.connect() as client:
        assert server.parts.populator.wait(60)
        assert client.store(keys, [bytes([at]) * 4096 for at in (1, 2)], namespace=namespace).stored == 2
        into = [bytearray(4096), bytearray(4096)]
        assert client.retrieve(keys, into, namespace=namespace).hits == 2 and into[1] == bytes([2]) * 4096
"""


@dataclass(frozen=True)
class Package:
    """One of ours, with the folder that it is built from."""

    name: str
    version: str
    path: Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pythons", default=",".join(PYTHONS), help="for which C wheels are built (default: %(default)s)"
    )
    parser.add_argument("--arm64", action="store_true", help="C wheels for arm64, too; they are compiled, not run")
    parser.add_argument("--no-compare", action="store_true", help="build once, not twice")
    parser.add_argument("--notes", action="store_true", help="print the release notes, and build nothing")
    parser.add_argument("--only", default="", help="names of packages, by commas (default: all)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the files go (default: dist)")
    options = parser.parse_args(arguments)
    only = set(filter(None, options.only.split(",")))
    packages = [each for each in find_packages() if not only or each.name in only]
    if unknown := only - {each.name for each in packages}:
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    notes = release_notes(packages)
    if options.notes:
        print(notes, end="")
        return 0
    pythons = find_pythons(options.pythons.split(","))
    machines = ["x86_64", "aarch64"] if options.arm64 else ["x86_64"]

    shutil.rmtree(options.dist, ignore_errors=True)
    options.dist.mkdir(parents=True)
    build(packages, pythons, machines, options.dist)
    if not options.no_compare:
        with tempfile.TemporaryDirectory() as again:
            build(packages, pythons, machines, Path(again))
            compare(options.dist, Path(again))
    check(options.dist)
    install(packages, options.dist)
    bill_of_materials(packages, options.dist)
    (options.dist / f"lmcache-core-{packages[0].version}.notes.md").write_text(notes)
    checksums(options.dist)
    say(f"{len(list(options.dist.iterdir()))} files in {options.dist}")
    return 0


def find_packages() -> list[Package]:
    """Every package that is released: all but the template and the examples."""
    found = []
    for file in [ROOT / "core/pyproject.toml", *sorted(ROOT.glob("*/lmcache-*/pyproject.toml"))]:
        project = tomllib.loads(file.read_text())["project"]
        found.append(Package(project["name"], project["version"], file.parent))
    return found


def find_pythons(versions: Iterable[str]) -> dict[str, Path]:
    """The interpreters for these versions, from the path or from pyenv. One that is missing is said, and left out."""
    found: dict[str, Path] = {}
    for version in versions:
        for candidate in _candidates(version):
            said = subprocess.run(
                [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
            )
            if said.stdout.strip() == version:
                found[version] = candidate
                break
        else:
            say(f"Python {version} is not on this machine: no wheels for it")
    if not found:
        raise SystemExit("none of these Pythons is on this machine: name one with --pythons")
    return found


def _candidates(version: str) -> Iterable[Path]:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        yield Path(sys.executable)
    if (on_path := shutil.which(f"python{version}")) is not None:
        yield Path(on_path)
    if shutil.which("pyenv") is not None:
        said = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True)
        if said.returncode == 0:
            yield Path(said.stdout.strip()) / "bin" / f"python{version}"


def build(packages: Sequence[Package], pythons: Mapping[str, Path], machines: Sequence[str], into: Path) -> None:
    """Sdists and wheels of these packages. Wheels are made from the sdists, as those of others would be."""
    with tempfile.TemporaryDirectory() as folder:
        for package in packages:
            say(f"{package.name} {package.version}")
            sdist = _sdist(package, into)
            if package.name not in WITH_C or package.name in WITHOUT_C_TOO:
                setting = WITHOUT_C_TOO.get(package.name)
                _wheel(sdist, Path(sys.executable), {setting: "off"} if setting else {}, into)
            if package.name not in WITH_C:
                continue
            first = dict(list(pythons.items())[:1])
            for version, python in (first if package.name in STABLE_ABI else pythons).items():
                for machine in machines:
                    required = {WITH_C[package.name]: "require"} if WITH_C[package.name] else {}
                    plain = Path(folder) / f"{package.name}-{version}-{machine}"
                    plain.mkdir()
                    _wheel(sdist, python, required | _compiler(machine, version), plain)
                    _name_platform(next(plain.glob("*.whl")), machine, into)


def _sdist(package: Package, into: Path) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / package.path.name
        shutil.copytree(
            package.path, source, ignore=shutil.ignore_patterns("build", "dist", "*.egg-info", "*.so", "__pycache__")
        )
        made = Path(folder) / "made"
        _run([sys.executable, "-m", "build", "--sdist", "--outdir", made, source], env=_fixed_time())
        [sdist] = made.glob("*.tar.gz")
        return without_times(sdist, into / sdist.name)


def without_times(sdist: Path, target: Path) -> Path:
    """The same sdist with sorted entries that carry one time and no owner: what setuptools leaves to chance."""
    time = int(_fixed_time()["SOURCE_DATE_EPOCH"])
    plain = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for entry in sorted(old.getmembers(), key=lambda each: each.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.pax_headers = time, 0, 0, "", "", {}
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    with target.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=time) as packed:
        packed.write(plain.getvalue())
    return target


def _wheel(sdist: Path, python: Path, settings: dict[str, str], into: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        [source] = Path(folder).iterdir()
        # `build` of the environment we run in, the interpreter of the wheel: it needs no packages of its own.
        environment = Path(folder) / "builder"
        _run([python, "-m", "venv", environment])
        _run([environment / "bin/python", "-m", "pip", "install", "-q", "setuptools>=77"])
        _run(
            [
                environment / "bin/python",
                "-m",
                "pip",
                "wheel",
                "-q",
                "--no-deps",
                "--no-build-isolation",
                "-w",
                into,
                source,
            ],
            env=_fixed_time() | settings,
        )


def _compiler(machine: str, version: str) -> dict[str, str]:
    """What makes setuptools compile with zig, for this machine and a glibc that old."""
    compile_ = f"{sys.executable} -m ziglang cc -target {MACHINES[machine]}.{GLIBC}"
    suffix = f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so"
    return {
        "CC": compile_,
        "LDSHARED": f"{compile_} -shared -O3 -s",  # or zig links its debugging runtime
        # Python's own choice without -g: a debugger's paths differ from one build to the next.
        "CFLAGS": "-DNDEBUG -fwrapv -g0 -Wno-unused-command-line-argument",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        **({"SETUPTOOLS_EXT_SUFFIX": suffix} if machine != os.uname().machine else {}),
    }


def _name_platform(wheel: Path, machine: str, into: Path) -> None:
    """The wheel under the name of the oldest glibc that it is promised to run on, if it keeps to it."""
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    _run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel], env=_fixed_time())
    [tagged] = wheel.parent.glob("*.whl")
    shutil.move(tagged, into / tagged.name)


def compare(first: Path, second: Path) -> None:
    """Raises `SystemExit` where two builds of the same differ, with the files that do."""
    names = {path.name for path in first.iterdir()} | {path.name for path in second.iterdir()}
    differ = [name for name in sorted(names) if not _same(first / name, second / name)]
    if differ:
        raise SystemExit(f"built twice, these differ: {', '.join(differ)}")
    say(f"built twice, {len(names)} files are the same")


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.read_bytes() == other.read_bytes()


def check(dist: Path) -> None:
    """The checkers of the field over everything in `dist`."""
    wheels = sorted(dist.glob("*.whl"))
    _run([sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir())])
    _run([_tool("check-wheel-contents"), *wheels])
    for wheel in wheels:
        if "manylinux" not in wheel.name:
            continue
        said = _run([_tool("auditwheel"), "show", wheel])
        kept = tag_that_holds(said)
        say(f"{wheel.name}: runs from {kept} on")
        if "abi3" in wheel.name:
            _run([_tool("abi3audit"), "--strict", wheel])


def tag_that_holds(said: str) -> str:
    """The oldest manylinux of which auditwheel says that a wheel keeps to it. Raises `SystemExit` for a newer glibc."""
    words = said.replace('"', " ").replace("'", " ").replace(",", " ").split()
    newest = tuple(map(int, GLIBC.split(".")))
    for word in words:
        if word.startswith("manylinux_") and tuple(map(int, word.split("_")[1:3])) <= newest:
            return word.rstrip(".")
    raise SystemExit(f"a wheel needs a newer glibc than {GLIBC}:\n{said}")


def install(packages: Sequence[Package], dist: Path) -> None:
    """Each package by itself, then all together, from `dist` alone as far as they are ours."""
    for chosen in [*([package] for package in packages), list(packages)]:
        with tempfile.TemporaryDirectory() as folder:
            _run([sys.executable, "-m", "venv", folder])
            python = Path(folder) / "bin/python"
            names = [f"{package.name}=={package.version}" for package in chosen]
            _run([python, "-m", "pip", "install", "-q", "--find-links", dist, "-c", ROOT / "constraints.txt", *names])
            modules = ", ".join(package.name.replace("-", "_") for package in chosen)
            code = f"import {modules}"
            _run([python, "-P", "-c", f"{code}\n{SMOKE}"])
            _run([Path(folder) / "bin/lmcache-core", "--version"])
    say(f"{len(packages)} packages install alone and together")


def bill_of_materials(packages: Sequence[Package], dist: Path) -> None:
    """What comes along with everything of ours, as CycloneDX, with the hash of each file that pip took."""
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "venv", "--without-pip", folder])  # pip is nothing that we bring
        python, report = Path(folder) / "bin/python", Path(folder) / "report.json"
        names = [f"{package.name}=={package.version}" for package in packages]
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--report", report]
        _run([*pip, "--find-links", dist, "-c", ROOT / "constraints.txt", *names])
        file = dist / f"lmcache-core-{packages[0].version}.cdx.json"
        _run([_tool("cyclonedx-py"), "environment", "--output-reproducible", "-o", file, python])
        bill = with_hashes(json.loads(file.read_text()), json.loads(report.read_text()))
        file.write_text(json.dumps(bill, indent=2) + "\n")


def with_hashes(bill: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """A CycloneDX bill, each component with the SHA-256 of the file that it was installed from, by pip's report. Raises
    `SystemExit` for a component without one."""
    hashes = {
        (canonical(each["metadata"]["name"]), each["metadata"]["version"]): each["download_info"]["archive_info"][
            "hashes"
        ]
        for each in report["install"]
    }
    for component in bill["components"]:
        named = canonical(component["name"]), component["version"]
        if "sha256" not in hashes.get(named, {}):
            raise SystemExit(f"no hash for {component['name']} {component['version']} in the bill of materials")
        component["hashes"] = [{"alg": "SHA-256", "content": hashes[named]["sha256"]}]
    return bill


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def release_notes(packages: Sequence[Package]) -> str:
    """What the changelogs say of this version: of all packages, then of each. `SystemExit` where one is silent."""
    version = packages[0].version
    parts = [f"# lmcache-core {version}\n\n", section(ROOT / "CHANGELOG.md", version)]
    for package in packages:
        parts.append(f"\n## {package.name}\n\n{section(package.path / 'CHANGELOG.md', version)}")
    return "".join(parts)


def section(changelog: Path, version: str) -> str:
    """The entries of one version, without its heading."""
    found = re.search(
        rf"^## {re.escape(version)}(?: [^\n]*)?\n+(?P<entries>.*?)(?=^## |\Z)",
        changelog.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    if found is None or not found["entries"].strip():
        raise SystemExit(f"{changelog.relative_to(ROOT)} says nothing of {version}")
    return found["entries"].rstrip() + "\n"


def checksums(dist: Path) -> None:
    """`SHA256SUMS`, as `sha256sum -c` reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(dist.iterdir())]
    (dist / "SHA256SUMS").write_text("".join(lines))


def _fixed_time() -> dict[str, str]:
    """The time of the last commit, which stands for the time of everything that is built from it."""
    said = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return {"SOURCE_DATE_EPOCH": said.stdout.strip() or "1700000000"}


def _tool(name: str) -> Path:
    return Path(sys.executable).parent / name


def _run(command: Sequence[str | Path], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def say(words: str) -> None:
    print(f"release: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
