"""What a release is checked for is found: `tools/release.py` against files that are wrong on purpose."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("release", ROOT / "tools/release.py")
assert _SPEC is not None
assert _SPEC.loader is not None
tool: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["release"] = tool
_SPEC.loader.exec_module(tool)


def test_every_package_is_released_and_neither_template_nor_examples() -> None:
    names = {each.name for each in tool.find_packages()}
    some = {
        "lmcache-core",
        "lmcache-fs",
        "lmcache-l0",
        "lmcache-core-vllm",
        "lmcache-lab",
        "lmcache-hosts",
        "lmcache-testing",
        "lmcache-tools",
    }
    assert some <= names
    assert len({each.version for each in tool.find_packages()}) == 1, "they are released together"
    ours = {path.parent.name for path in ROOT.glob("*/lmcache-*/pyproject.toml")}
    assert names == ours | {"lmcache-core"}


def test_two_builds_that_differ_by_a_byte_or_a_file_are_told_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "a.whl").write_bytes(b"same")
    tool.compare(first, second)
    (second / "a.whl").write_bytes(b"sane")
    with pytest.raises(SystemExit, match=r"built twice, these differ: a\.whl"):
        tool.compare(first, second)
    (second / "a.whl").write_bytes(b"same")
    (second / "b.whl").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"these differ: b\.whl"):
        tool.compare(first, second)


def test_a_source_archive_says_nothing_of_when_and_by_whom_it_was_packed(tmp_path: Path) -> None:
    packed = []
    for number, order in enumerate([("p/a", "p/b"), ("p/b", "p/a")]):
        archive = tmp_path / f"{number}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name in order:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.uid, entry.uname = 1, 1000 + number, 1000 + number, f"user{number}"
                tar.addfile(entry, io.BytesIO(name[-1].encode()))
        packed.append(tool.without_times(archive, tmp_path / f"out{number}.tar.gz").read_bytes())
    assert packed[0] == packed[1]


def test_a_wheel_for_a_newer_glibc_than_promised_is_refused() -> None:
    said = 'consistent with the following platform tag: "manylinux_2_17_x86_64", aka manylinux2014'
    assert tool.tag_that_holds(said) == "manylinux_2_17_x86_64"
    assert tool.tag_that_holds(f'"manylinux_2_34_x86_64" {said}') == "manylinux_2_17_x86_64"
    with pytest.raises(SystemExit, match=r"needs a newer glibc than 2\.28"):
        tool.tag_that_holds('the following platform tag: "manylinux_2_34_x86_64"')


def test_the_release_notes_have_what_every_changelog_says_of_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--notes"]) == 0
    notes = capsys.readouterr().out
    [version] = {each.version for each in tool.find_packages()}
    assert notes.startswith(f"# lmcache-core {version}\n")
    for package in tool.find_packages():
        entries = tool.section(package.path / "CHANGELOG.md", version)
        assert entries.startswith("### ")
        assert f"\n## {package.name}\n\n{entries}" in notes
    assert "unreleased" not in notes


def test_a_changelog_that_says_nothing_of_the_version_ends_the_release(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## 0.2.0 (2027-01-01)\n\n### Fixed\n\n- This.\n\n## 0.1.0\n\n### Added\n\n- That.\n"
    )
    assert tool.section(changelog, "0.2.0") == "### Fixed\n\n- This.\n"
    assert tool.section(changelog, "0.1.0") == "### Added\n\n- That.\n"
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md says nothing of 0\.3\.0"):
        tool.section(changelog, "0.3.0")


def test_every_component_of_the_bill_has_the_hash_of_its_file() -> None:
    bill = {"components": [{"name": "zope.interface", "version": "7.0"}, {"name": "lmcache-fs", "version": "0.1.0"}]}
    report = {
        "install": [
            {
                "metadata": {"name": name, "version": version},
                "download_info": {"archive_info": {"hashes": {"sha256": name * 2}}},
            }
            for name, version in [("zope_interface", "7.0"), ("lmcache-fs", "0.1.0")]
        ]
    }
    said = [component["hashes"] for component in tool.with_hashes(bill, report)["components"]]
    assert said == [[{"alg": "SHA-256", "content": name * 2}] for name in ("zope_interface", "lmcache-fs")]
    with pytest.raises(SystemExit, match=r"no hash for zope\.interface 7\.0"):
        tool.with_hashes(bill, {"install": report["install"][1:]})


@pytest.mark.parametrize(
    "package", ["core", "contrib/lmcache-l0", "plugins/lmcache-blend", "plugins/lmcache-fp8", "plugins/lmcache-quant"]
)
def test_a_python_without_its_global_lock_is_refused_when_it_builds(package: str) -> None:
    code = (
        "import sysconfig, runpy\n"
        "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / package, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs a Python with its global lock: use python3.13, not python3.13t" in done.stderr


def test_a_python_without_its_global_lock_is_refused_when_it_imports() -> None:
    code = "import sys; sys.version += ' free-threading build'; import lmcache_core"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: lmcache-core needs a Python with its global lock" in done.stderr
