"""The kit is a test, too: each of these deliberately wrong components has one fault, and the kit must find it."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    "wrong_adapters.py",
    "wrong_shared_adapters.py",
    "wrong_trusting_adapters.py",
    "wrong_policies.py",
    "wrong_serdes.py",
    "wrong_subscribers.py",
    "wrong_operations.py",
)


def wrong() -> dict[str, tuple[str, str]]:
    """file:class → the node to run, and the test that has to fail."""
    found = {}
    for file in FILES:
        for node in ast.parse((HERE / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                (catcher,) = (
                    line.value.value
                    for line in node.body
                    if isinstance(line, ast.Assign)
                    and isinstance(line.value, ast.Constant)
                    and isinstance(line.targets[0], ast.Name)
                    and line.targets[0].id == "caught_by"
                )
                found[f"{file.removesuffix('.py')}:{node.name}"] = (f"{HERE / file}::{node.name}", str(catcher))
    return found


WRONG = wrong()

# The components of a file run within one test, on a machine that may do much else.
pytestmark = pytest.mark.timeout(900)


def outcomes(report: Path) -> dict[tuple[str, str], set[str]]:
    """(class, test without its parameters) → what happened."""
    found: dict[tuple[str, str], set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        what = {child.tag for child in case} & {"failure", "error", "skipped"} or {"passed"}
        name = ".".join(case.get("classname", "").split(".")[-2:])
        found.setdefault((name, case.get("name", "").partition("[")[0]), set()).update(what)
    return found


def run(report: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    return subprocess.run(
        [*command, f"--junitxml={report}", "-c", os.devnull, f"--rootdir={HERE}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=report.parent,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def caught(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[tuple[str, str], set[str]]]:
    """All of a file in one run: of each class the one test that has to fail."""

    @functools.cache
    def of(module: str) -> dict[tuple[str, str], set[str]]:
        report = tmp_path_factory.mktemp("report") / "report.xml"
        chosen = (f"{node}::{test}" for name, (node, test) in WRONG.items() if name.startswith(f"{module}:"))
        done = run(report, *chosen, path=str(HERE))
        assert report.exists(), done.stdout + done.stderr
        return outcomes(report)

    return of


def test_there_are_enough_of_them_in_each_family() -> None:
    assert len(WRONG) >= 120
    families = [file.removesuffix(".py") for file in FILES]
    assert {name.partition(":")[0] for name in WRONG} == set(families)
    assert all(sum(name.startswith(f"{family}:") for name in WRONG) >= 9 for family in families)


def test_the_documentation_says_how_many_are_planted() -> None:
    text = (HERE.parents[1] / "docs/plugins/testing.md").read_text()
    rows = [line.split("|")[2:4] for line in text.partition("| kind | planted")[2].splitlines()[2:] if "|" in line]
    shown = [[int(figure) for figure in row] for row in rows[:7]]
    counted = len(WRONG) + len(FAULTS)
    assert [planted for planted, _ in shown] == [caught for _, caught in shown]
    assert sum(planted for planted, _ in shown) == counted, f"docs/plugins/testing.md: {counted} are planted"
    for page in (text, (HERE.parents[1] / "docs/internals/testing.md").read_text()):
        assert f"{counted} components" in page or f"{counted} wrong ones" in page


@pytest.mark.parametrize("name", WRONG)
def test_a_contract_test_fails_for_the_wrong_component_it_is_written_for(
    caught: Callable[[str], dict[tuple[str, str], set[str]]], name: str
) -> None:
    module, _, cls = name.partition(":")
    found = caught(module).get((f"{module}.{cls}", WRONG[name][1]))
    assert found is not None, f"{WRONG[name][1]} did not run: is that its name?"
    assert "failure" in found, f"{name} passed {WRONG[name][1]}: {found}"
    assert "error" not in found, "a fixture broke: that is no catch"


CORRECT = """
from wrong_policies import Fifo, Wrong as WrongPolicy
from wrong_serdes import Sealed, Wrong as WrongSerde
from wrong_shared_adapters import Files, Shelf, Wrong as WrongShelf, WrongFolder
from wrong_policies import First, WrongPrefetch
from wrong_operations import Wrong as WrongOperation

class TestFifo(WrongPolicy):
    faulty = Fifo

class TestSealed(WrongSerde):
    faulty = Sealed

class TestFirst(WrongPrefetch):
    faulty = First

class TestShelf(WrongShelf):
    faulty = Shelf

class TestLook(WrongOperation):
    pass

class TestFolder(WrongFolder):
    faulty = Files
"""


def test_what_the_faults_are_changes_to_is_correct(tmp_path: Path) -> None:
    """Otherwise the catches above could be the base's own faults. (The adapters' base passes the kit elsewhere.)"""
    (tmp_path / "test_correct.py").write_text(CORRECT)
    report = tmp_path / "report.xml"
    run(report, str(tmp_path / "test_correct.py"), path=str(HERE))
    failed = {test for (_, test), found in outcomes(report).items() if found & {"failure", "error"}}
    # A dictionary walks past held entries: it is the plain model of the others, not a policy to use.
    assert failed == {"test_held_entries_are_not_walked_past_again_and_again"}


# --- packages ---------------------------------------------------------------------------------------------------
SOUND = """
from lmcache_core import ComponentSpec, Kind, hookimpl
@hookimpl
def lmcache_components():
    return [ComponentSpec(Kind.SERDE, "NAME", "NAME_parts:OddSerde", settings="NAME_parts:OddSettings", summary="odd")]
"""
PARTS = """
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from lmcache_core.serde.identity import IdentitySerde
class OddSerde(IdentitySerde): pass
class OddSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    token: SecretStr | None = Field(None, description="who we are")
"""
BOUNDED = "lmcache-core>=0.1,<0.2"
FAULTS: dict[str, dict[str, str]] = {
    "test_its_entry_point_imports_nothing_heavy": {"source": "import pydantic\n" + SOUND},
    "test_every_hook_it_names_is_a_hook": {"source": SOUND + "\ndef lmcache_componets(): ...\n"},
    "test_the_loader_takes_it": {"source": SOUND.replace("@hookimpl\n", "")},
    "test_every_component_is_what_it_says": {"parts": PARTS.replace("OddSerde(IdentitySerde)", "OddSerde")},
    "test_settings_are_frozen_and_forbid_what_they_do_not_know": {"parts": PARTS.replace("frozen=True, ", "")},
    "test_secrets_are_redacted": {"parts": PARTS.replace("SecretStr |", "str |")},
    "test_it_bounds_the_core_that_it_was_written_for": {"requires": "lmcache-core>=0.1"},
}


def package(folder: Path, name: str, source: str = SOUND, parts: str = PARTS, requires: str = BOUNDED) -> str:
    """Put a distribution on the path, as pip would have left it; its contract test."""
    (folder / f"{name}.py").write_text(source.replace("NAME", name))
    (folder / f"{name}_parts.py").write_text(parts)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n")
    (info / "entry_points.txt").write_text(f"[lmcache_core]\n{name} = {name}\n")
    return f"class Test{name.title()}(PluginPackageContract):\n    distribution = {name!r}\n\n"


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The fault of each package → the contract tests that failed for it. "": no fault."""
    folder = tmp_path_factory.mktemp("packages")
    names = {catcher: f"odd{number}" for number, catcher in enumerate(["", *FAULTS])}
    tests = [package(folder, name, **FAULTS.get(catcher, {})) for catcher, name in names.items()]
    imports = "from lmcache_testing import PluginPackageContract\n\n"
    (folder / "test_packages.py").write_text(imports + "".join(tests))
    done = run(folder / "report.xml", str(folder / "test_packages.py"), path=str(folder))
    found = outcomes(folder / "report.xml")
    assert len(found) == len(names) * 7, done.stdout
    return {
        catcher: {
            test for (cls, test), what in found.items() if cls.endswith(f".Test{name.title()}") and "failure" in what
        }
        for catcher, name in names.items()
    }


@pytest.mark.parametrize("catcher", FAULTS)
def test_the_kit_catches_a_careless_package(careless: dict[str, set[str]], catcher: str) -> None:
    assert catcher in careless[catcher]


def test_a_careful_package_passes(careless: dict[str, set[str]]) -> None:
    assert careless[""] == set()


# --- overriding -------------------------------------------------------------------------------------------------
def test_a_contract_test_cannot_be_overridden_in_silence() -> None:
    from lmcache_testing import EvictionPolicyContract

    def quiet(self: object) -> None: ...

    for way in (quiet, None, pytest.mark.skip(reason="later")(quiet), pytest.mark.xfail()(quiet)):
        with pytest.raises(TypeError, match=r"overrides test_victims_are_only_named.*xfail"):
            type("TestQuiet", (EvictionPolicyContract,), {"test_victims_are_only_named": way})
    with pytest.raises(TypeError, match="overrides"):
        type("TestMixed", (type("Mixin", (), {"test_victims_are_only_named": quiet}), EvictionPolicyContract), {})


def test_a_known_failure_is_marked_with_its_reason() -> None:
    from lmcache_testing import EvictionPolicyContract

    def known(self: object) -> None: ...

    marked = pytest.mark.xfail(reason="its author knows")(known)
    made = type("TestKnown", (EvictionPolicyContract,), {"test_victims_are_only_named": marked, "test_more": known})
    assert made.__name__ == "TestKnown"
