"""The docs agree with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lmcache_core.client.why.explaining import counted_reasons
from lmcache_core.observe.events import EVENTS

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in ROOT.rglob("*.md") if not {".nox", ".venv", "build", "node_modules"} & set(path.parts))
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


def test_the_two_commands_stand_alone_in_their_blocks() -> None:
    commands = [block.strip() for block in fenced((ROOT / "README.md").read_text(), "sh") if "nox" in block]
    assert [command.rpartition(" ")[2] for command in commands] == ["demo", "tests"]
    assert not any("\n" in command for command in commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_python_parse(page: Path) -> None:
    for code in fenced(page.read_text(), "python"):
        bare_signature = code.startswith("def ") and "\n " not in code
        ast.parse(code.rstrip() + ": ..." if bare_signature else code)
