"""The docs agree with the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.client.explaining import counted_reasons
from lmcache_core.observe.events import EVENTS

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in ROOT.rglob("*.md") if not {".nox", ".venv", "node_modules"} & set(path.parts))
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_every_page_has_a_place_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    renamed = {Path("README.md"): "contents.md", Path("internals/index.md"): "internals/the-index.md"}
    places = [renamed.get(page, page.as_posix()) for page in sorted(pages)]
    assert [place for place in places if f"- {place}\n" not in menu] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_what_helps_against_a_miss_is_what_the_code_says() -> None:
    said = {reason.word: reason.helps for reason in counted_reasons().values()}
    page = (ROOT / "docs/operating/why-did-it-miss.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| .*? \|(?: (.*?))? \|$", page, re.MULTILINE)
    told = {
        word: re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", helps)
        for words, helps in rows
        for word in re.findall(r"`(\w+)`", words)
    }
    assert {word: helps for word, helps in told.items() if word in said} == {
        word: helps for word, helps in said.items() if word != "behind_a_miss"
    }


def test_the_table_of_events_is_the_codes() -> None:
    page = (ROOT / "docs/operating/events.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|$", page, re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", fields)) for name, fields in rows}
    unseen = {"at_s", "token_ids"}  # every event has a time; tokens are for KV events alone
    assert told == {
        str(kind.__struct_config__.tag): set(kind.__struct_fields__) - unseen
        for kind in EVENTS
        if kind.__struct_config__.tag
    }


def test_the_two_commands_are_the_first_that_say_demo_and_tests() -> None:
    commands = fenced((ROOT / "README.md").read_text(), "sh")
    assert commands[0].strip().endswith("nox -s demo")
    assert commands[1].strip().endswith("nox -s tests")
    assert all(len(command.strip().splitlines()) == 1 for command in commands[:2])


def test_the_use_from_python_says_in_words_that_there_is_no_server(node: Any) -> None:
    code = fenced((ROOT / "README.md").read_text(), "python")[0].replace('"default"', f'"{node.name}"')
    code = code.replace(".connect(", f".connect(runtime_dir={str(node.run)!r}, name=")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "0 of 4 chunks read no server answers at" in done.stdout
    assert "cannot reach the lmcache-core server" in done.stderr
    assert "start one with `serve`" in done.stderr


def test_the_use_from_python_runs(node: Any) -> None:
    node.serve()
    code = fenced((ROOT / "README.md").read_text(), "python")[0].replace('"default"', f'"{node.name}"')
    code = code.replace(".connect(", f".connect(runtime_dir={str(node.run)!r}, name=")
    done = subprocess.run(
        [sys.executable, "-c", code + "\nassert found.hits == 4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_of_pages_runs(node: Any) -> None:
    node.serve()
    code = fenced((ROOT / "docs/engines/pages.md").read_text(), "python")[0]
    code = code.replace(".connect()", f".connect({node.name!r}, runtime_dir={str(node.run)!r})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 of 3 stored\n3 hits; not to be trusted: []\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_python_parse(page: Path) -> None:
    for code in fenced(page.read_text(), "python"):
        bare_signature = code.startswith("def ") and "\n " not in code
        ast.parse(code.rstrip() + ": ..." if bare_signature else code)
