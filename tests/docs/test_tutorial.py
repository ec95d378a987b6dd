"""The tutorial's code is the template's, and the template's is tested: nothing on the page was never run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/plugins/tutorial.md"
INCLUDED = re.compile(r"<!-- include (\S+) -->\n```\w+\n(.*?)```\n", re.DOTALL)


def test_the_tutorial_includes_every_file_of_the_template_as_it_is() -> None:
    shown = dict(INCLUDED.findall(TUTORIAL.read_text()))
    template = ROOT / "contrib/adapter-template"
    code = {str(path.relative_to(ROOT)) for path in (*template.rglob("*.py"), template / "pyproject.toml")}
    assert {name for name in code if "/build/" not in name} == set(shown)
    for name, text in shown.items():
        assert text == (ROOT / name).read_text(), f"{name} has changed: python {Path(__file__).name} rewrites the page"


def test_the_wrappers_on_the_testing_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/plugins/testing.md").read_text(), re.DOTALL | re.M)
    (tmp_path / "test_page.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("page", ["tutorial", "testing", "publishing", "compatibility"])
def test_names_of_the_kit_on_the_pages_exist(page: str) -> None:
    import lmcache_core.testing as kit

    named = set(re.findall(r"`(\w+Contract|\w+Machine|\w+Adapter)`", (ROOT / f"docs/plugins/{page}.md").read_text()))
    assert named - {"SqliteAdapter"} <= set(kit.__all__)


def rewrite() -> None:
    """Put the template's files into the page again."""

    def fresh(match: re.Match[str]) -> str:
        name = match[1]
        language = "toml" if name.endswith(".toml") else "python"
        return f"<!-- include {name} -->\n```{language}\n{(ROOT / name).read_text()}```\n"

    TUTORIAL.write_text(INCLUDED.sub(fresh, TUTORIAL.read_text()))


if __name__ == "__main__":
    rewrite()
