"""Every way to run, test and measure this repository. `nox -l` is its table of contents.

A session installs into an environment of its own: core and the packages that it is `over`, what these need, and groups
of pyproject.toml (`test`, unless it names others). constraints.txt pins all of it, for every pip that a session starts;
how is in tools/. Arguments after `--` go to the session's command.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tools import environments, former, next_python, sanitized
from tools.packages import ALL, CORE, PACKAGES, ROOT, folders, group, medium_group, strangers
from tools.sessions import Claim, over, pytest

nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
# By the environment, so that no call of pip can forget it. (PIP_BUILD_CONSTRAINT cannot stand here: a pip that builds
# without isolation refuses it.)
os.environ["PIP_CONSTRAINT"] = str(environments.CONSTRAINTS)

NOT_SLOW = ("-m", "not slow")
OWN_SESSIONS = """contrib/deploy contrib/examples contrib/lmcache-core-vllm/tests/engine core/tests/native
    tests/compatibility tests/conformance tests/containers tests/crash tests/fuzz tests/matrix tests/simulation
    tests/site tests/soak plugins/lmcache-redis plugins/lmcache-s3"""
ELSEWHERE = [f"--ignore={path}" for path in OWN_SESSIONS.split()]
BENCHES = ["rpc", "copy", "pages", "prompt", "alloc", "l2", "policy", "serde", "hash", "hooks"]
HOSTS = ["lmcache", "mlperf", "sglang", "vllm"]
MATRIX = ["disk", "block", "redis", "redis-tls", "redis-sentinel", "redis-cluster", "mooncake", "s3-moto", "s3-radosgw"]


@nox.session
def quick(session: nox.Session) -> None:
    """The tests at a path, over the checkout as it stands: `-- core/tests/kernel -k promise`. Seconds from the second
    run on, which installs nothing unless a requirement or a C source has changed."""
    environments.install_editable(session)
    session.run("python", "-m", "pytest", "--timeout=300", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on real input: a trained model answers a second question about a page of ours without computing the
    page again, whatever is killed meanwhile. `-- --model none` needs no torch, `-- --json` is for machines."""
    environments.install_demo(session)
    session.run("lmcache-core", "demo", *(session.posargs or ["--document", "docs/glossary.md"]))


@over(*ALL, extras="[cli,torch]", tests_of=("core", *ALL))
def tests(session: nox.Session) -> None:
    """Everything quick that needs no daemon, with torch and the C extension. Arguments go to pytest."""
    session.run("python", "-m", "pytest", *ELSEWHERE, *(session.posargs or ["-q", "--timeout=300", *NOT_SLOW]))


@nox.session
def newest(session: nox.Session) -> None:
    """`tests` over the newest of everything but torch, where warnings are failures: what will break. By flag."""
    environments.install_newest(session, *ALL, extras="[cli,torch]")
    strict = [f"-Werror::{each}" for each in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")]
    pytest(session, *ELSEWHERE, *strict, *(session.posargs or NOT_SLOW))


@over(tests_of=("core",), native="off")
def core(session: nox.Session) -> None:
    """Core alone, as a node image without a compiler has it: no torch, no tier, no extra, no C extension."""
    builds = [f"--ignore=core/{each}" for each in sanitized.BUILDS]  # they are the same with or without
    pytest(session, *NOT_SLOW, *builds, *(session.posargs or ["core/tests"]), env={"LMCACHE_CORE_NATIVE": "off"})


@over("blend", "fp8", "quant", tests_of=("core",), tools=("setuptools>=77",), native="require")
def native(session: nox.Session) -> None:
    """The C extension: how it is built, its C programs, Python against C; then again under a sanitizer, and those of
    blend, fp8 and quant. `-- quick` leaves the sanitizer out."""
    pytest(session, "-p", "no:cacheprovider", "core/tests/native", env={"LMCACHE_CORE_NATIVE": "require"})
    if "quick" not in session.posargs:
        sanitized.run_tests(session, "python", "-m", "pytest", "-q", "--timeout=300", "-p", "no:cacheprovider")


@nox.session
@nox.parametrize("name", sorted(PACKAGES), ids=sorted(PACKAGES))
def plugin(session: nox.Session, name: str) -> None:
    """One package from its wheel, with its own tests; an adapter's score card. `-- --kit=full` does more of the kit."""
    package = name.removeprefix("lmcache-")
    environments.install(session, package, groups=("test", *medium_group(package)), tests_of=(package,))
    card = f"--kit-card={ROOT / 'build/cards' / name}.json"
    pytest(session, card, str(PACKAGES[name] / "tests"), *session.posargs)


@over("fs", "http", groups=("test", "fuzz"), native="require")
def fuzz(session: nox.Session) -> None:
    """Garbage on the wire (`-- --frames 1000000` for long), damaged segments, every route of HTTP.
    The kernel against a plain model is in `tests`."""
    long = any(each.startswith("--frames") for each in session.posargs)
    pytest(session, "tests/fuzz", *session.posargs, timeout_s=3600 if long else 300)
    pytest(session, "plugins/lmcache-http/tests/test_fuzz.py")


@nox.session
def vllm(session: nox.Session) -> None:
    """The vLLM connector on real engines with small random models, in three minutes; `-- all` for every test.
    Its environment has 3.5 GB and is kept between runs. Where it cannot be built in ten minutes, nothing is tested."""
    if environments.has_vllm(session):
        ours = ("fs", "fp8", "redis", "otel", "http", "hints", "blend", "transformers", "core-vllm", "bench")
        environments.install(session, *ours, native="require")
        every = "all" in session.posargs
        chosen = [each for each in session.posargs if each != "all"] or ([] if every else NOT_SLOW)
        tested = ["contrib/lmcache-core-vllm/tests", "contrib/lmcache-bench/tests/test_engine_dict.py"]
        tested += ["plugins/lmcache-hints/tests/test_encoders.py"]
        pytest(session, *tested, *chosen, timeout_s=600, env=environments.sglang_wheel(session))
        if every:
            session.run("lmcache-core", "bench", "engine", "--quick")


@nox.session
@nox.parametrize("name", HOSTS, ids=HOSTS)
def host(session: nox.Session, name: str) -> None:
    """Our tiers in another host's own classes, with kills, hangs and damage. vLLM's environment has 3.5 GB; in it,
    objects go from one host to the other. LMCACHE_CORE_MLPERF names the folder of MLPerf's benchmark."""
    variables = environments.install_host(session, name)
    if variables is not None:
        across = ["contrib/lmcache-hosts/tests/hosts/test_across.py"] if name == "vllm" else []
        tests = [f"contrib/lmcache-hosts/tests/hosts/test_{each}{name}.py" for each in ("", "judged_")] + across
        pytest(session, *tests, *session.posargs, env=variables)


@nox.session
def transformers(session: nox.Session) -> None:
    """The transformers bridge with every model that there is; `-- 5.19.0` for another version than the newest.
    What needs no walk over all models is in `tests`. Another version may have other models: see `proven.py`."""
    environments.install_transformers(session)
    walk = {"LMCACHE_TRANSFORMERS_WALK": "1"}
    pytest(session, "contrib/lmcache-transformers/tests", timeout_s=1800, env=walk)


@over("policies", native="require")
def simulation(session: nox.Session) -> None:
    """Clients, wire, server and kernel in one process and virtual time; `-- --schedules 100000`.
    A schedule that breaks something is printed as short as it can be, and `-- --replay SCHEDULE` runs it again."""
    if not session.posargs:
        pytest(session, "tests/simulation", timeout_s=600)
    jobs = str(len(os.sched_getaffinity(0)))
    session.run("python", "tests/simulation/run.py", "--jobs", jobs, *session.posargs)


@over(*ALL, extras="[cli]", groups=("site", "test"))
def site(session: nox.Session) -> None:
    """The documentation as a site, links checked; it and the page at `/ui` in Chromium. `-- --serve` shows the site."""
    session.run("python", "tools/site.py", *session.posargs)
    if shutil.which("chromium"):
        pytest(session, "tests/site")
    else:
        session.warn("no chromium here: the site was built and its links checked, and no browser has seen it")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format; proselint: the pages; the form of commit messages."""
    session.install("-q", *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", *map(str, sorted(ROOT.glob("*/*/README.md")))]
    session.run("proselint", "check", "--config", "proselint.json", *pages)
    session.run("python", "tools/commit_message.py")


@over(*ALL, extras="[cli]", groups=("types", "test"))
def types(session: nox.Session) -> None:
    """mypy, strict, over every package."""
    for path in [CORE, *folders(*ALL)]:
        session.run("mypy", str(path / "src"))


@over(*ALL, extras="[cli,torch]", groups=())
def bench(session: nox.Session) -> None:
    """The benches named as arguments, or all of them, quickly."""
    for name in session.posargs or BENCHES:
        session.run("lmcache-core", "bench", name, "--quick")


@nox.session
def compatibility(session: nox.Session) -> None:
    """The former release beside this one, as client, as server, and in its pool; `-- --former REF` for another one
    than the newest tag."""
    sides, arguments = former.both_sides(session, session.posargs)
    session.install("-q", *strangers(group("test")))
    pytest(session, "tests/compatibility", "--noconftest", *arguments, env=sides)


@over(groups=("test", "deploy"))
def image(session: nox.Session) -> None:
    """The container image, built by Debian's buildah, measured and run: needs buildah, mmdebstrap and Python 3.11."""
    inside = ("http", "fs", "redis", "s3", "crypto", "policies", "kv-events", "tools")
    wheels = environments.download(session, *inside, extras="[cli]", others=group("image"))
    env = {"LMCACHE_CORE_IMAGE_WHEELS": str(wheels)}
    pytest(session, "-rP", "contrib/deploy/tests/test_image.py", *session.posargs, timeout_s=1800, env=env)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """What needs a GPU, over the Python that runs nox, which has torch: tests, `bench gpu`, and one report."""
    why_not = session.run(sys.executable, "tools/gpu.py", "--why-not", silent=True, external=True)
    if why_not and not session.posargs:
        session.skip(str(why_not).strip())
    session.run(sys.executable, "tools/gpu.py", *session.posargs, external=True)


@nox.session
@nox.parametrize("backend", MATRIX, ids=MATRIX)
def matrix(session: nox.Session, backend: str) -> None:
    """End to end, and in trouble, over a real service; one that cannot start is a failure.
    `nox -s "matrix(redis)" -- --endpoint redis://…` tests a service of your own."""
    medium = backend.partition("-")[0]
    tier = "fs" if medium == "disk" else medium
    environments.install(session, tier, extras="[cli]", groups=("test", *medium_group(medium)))
    pytest(session, "tests/matrix", "--backend", backend, *session.posargs, env={"LMCACHE_CORE_MATRIX": "1"})


@nox.session
def examples(session: nox.Session) -> None:
    """Adapters for third-party media (contrib/examples), each on its real medium; a missing one is reported."""
    packages = environments.install_examples(session)
    pytest(session, *(str(path / "tests") for path in packages), *session.posargs)


# Sessions of one command: what each proves or makes, and the command.
Claim("crash", "kill -9 for workers and servers, at every step of what they do.").by_tests(
    "tests/crash", over="fs mock", native="require"
)
Claim("deploy", "The systemd unit, the manifests, and server and engines in namespaces, as containers are.").by_tests(
    "contrib/deploy", "tests/containers", over="fs http peer redis", groups=("test", "deploy")
)
Claim("docs", "What the docs say is so: examples run, links lead somewhere, hook signatures are the code's.").by_tests(
    "tests/docs", "core/tests/plugins", over=" ".join(ALL), extras="[cli]"
)
Claim("conformance", "The kit against every component of ours, and against ones that are wrong on purpose.").by_tests(
    "tests/conformance", over=" ".join(ALL), extras="[cli,torch]", tests_of=ALL
)
Claim("lowest", "Core's tests over the oldest versions that its metadata allows, with new tools for tests.").by_tests(
    *NOT_SLOW, "core/tests", installs=environments.install_floors
)
Claim("jax", "Views of the L0 table in jax: by flag, as jax takes two minutes to install and 600 MB.").by_tests(
    "-k", "jax", "contrib/lmcache-l0/tests/test_calls.py", over="l0", groups=("test", "numpy", "jax"), native="require"
)
Claim("oracle", "Policies and optimum hit what libcachesim's do, on the same references: by flag, a minute.").by_tests(
    "plugins/lmcache-policies/tests/test_oracle.py", over="policies lab", groups=("test", "oracle")
)
Claim("next_python", "Core's tests under Python 3.14 in a chroot: needs root, debootstrap.").by(next_python.run_tests)
Claim("audit", "Known faults, as PyPI has them, of what comes along with our packages; by flag.").by(environments.audit)
Claim("soak", "Four workers, three tiers, random kills, every byte checked; `-- --seconds N` is longer.").by_script(
    "tests/soak/run.py", over="fs mock", native="require"
)
Claim("mutants", "Small faults put in, one at a time: what no test notices. Hours: tests/mutants/run.py.").by_script(
    "tests/mutants/run.py", over="fs redis s3", tests_of=("core", "fs", "redis", "s3"), native="require"
)
Claim("pictures", "The picture of the demo's table that README shows, of a run on this machine.").by_script(
    "tools/pictures.py", "demo", over="fs transformers", extras="[cli,demo]", quiet=False
)
Claim("badges", "README's badges: core's tests, what the tests cover, the kit's card of our adapters.").by_script(
    "tools/badges.py", over=" ".join(ALL), extras="[cli,torch]", groups=("test", "coverage"), tests_of=("core", *ALL)
)
Claim("constraints", "constraints.txt and constraints-vllm.txt anew, by flag: the newest of what we install.").by_tool(
    "tools/constraints.py", needs="constraints"
)
Claim("release", "A release in dist/: built twice, compared, checked, installed; `-- --help` for the choices.").by_tool(
    "tools/release.py", needs="release"
)
Claim("outside", "As a third party: core and the kit from wheels with no checkout; what core writes is green.").by_tool(
    "tools/outside.py", needs="build"
)
