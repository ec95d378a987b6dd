"""Every command line that a page shows is one that the command takes; what is run is in `test_pages_run.py`."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from lmcache_core.cli.compose import composed
from lmcache_core.cli.main import build_parser
from lmcache_core.errors import CacheError, UsageError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.suggest import install_command

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/*.md"), ROOT / "core/README.md"})
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(lmcache-core [^`]+)`")
END = re.compile(r" (?:\|\|?|&&?|>>?|2>)(?: |$)|[;)](?: |$)")


def typed(text: str) -> list[str]:
    """What the blocks of a page have after a prompt, or in a script; without what a shell does with it."""
    lines: list[str] = []
    for language, block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if language in ("sh", "bash", "text") or line.startswith("$ "):
                lines += re.findall(r"(?:^|[|] |&& )(lmcache-core .*)", line.strip().removeprefix("$ "))
    return [END.split(line)[0].replace("$PWD", "/here") for line in lines]


def mentioned(text: str) -> list[str]:
    """What running text shows with options; it may leave out what is not its point."""
    return [" ".join(each.split()) for each in INLINE.findall(FENCED.sub("", text)) if " -" in each]


installed = cache(load_plugins)


def taken(line: str) -> None:
    """Raises `CacheError` if the command would refuse its options, or its settings."""
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "…"]
    registry = installed()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            arguments, rest = build_parser(registry).parse_known_args(words)
        except SystemExit:  # --help and --version
            return
    if getattr(arguments, "takes_settings", False):
        arguments.registry, arguments.setting_flags = registry, rest
        composed(arguments, [].append)
    elif rest:
        raise UsageError(f"unknown options: {' '.join(rest)}")


def test_commands_are_found_as_pages_write_them() -> None:
    text = "Run `lmcache-core status --json`, not `lmcache-core top`.\n```\nlmcache-core says so\n"
    text += "$ seq 0 9 | lmcache-core explain --tokens-file - && echo\n```\n"
    text += "```sh\nlmcache-core serve --name \\\n  a &\n```\n"
    assert typed(text) == ["lmcache-core explain --tokens-file -", "lmcache-core serve --name    a"]
    assert mentioned(text) == ["lmcache-core status --json"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_is_one(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no lmcache.toml
    text = page.read_text()
    for line in typed(text) + mentioned(text):
        try:
            taken(line)
        except CacheError as error:
            incomplete = line in mentioned(text) and "are required: " in str(error)
            if not incomplete and not str(error).endswith("No such file or directory"):  # a file that the page has
                pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_settings_file_is_one(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, block in FENCED.findall(page.read_text()):
        if language == "toml" and not re.search(r"^\[(?:project|build-system|tool)", block, re.MULTILINE):
            Path("lmcache.toml").write_text(block)
            try:
                taken("lmcache-core config")
            except CacheError as error:
                if "install the package that has it" not in str(error):  # of a tutorial, which test_tutorial.py runs
                    pytest.fail(f"{block}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_no_index_has_is_installed_by_its_folder_too(page: Path) -> None:
    for _, block in FENCED.findall(page.read_text()):
        for line in block.splitlines():
            if "pip install" not in line or "--no-index" in line:
                continue
            for name in {re.sub(r"\[.*", "", word.strip("'\"")) for word in line.partition("#")[0].split()}:
                if name.startswith("lmcache-"):
                    folders = install_command(name).rpartition("pip install ")[2]
                    absent = [folder for folder in folders.split() if folder not in line]
                    assert not absent, f"{line}: add # in a checkout: pip install {folders}"
