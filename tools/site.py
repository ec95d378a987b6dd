"""Builds the documentation site into `build/site/`, and looks at every page of it.

    python tools/site.py [--into DIR] [--serve]

The pages under docs/ are the source, with the README of each package beside them. What can be read off the code is
written from the code: the command line, the settings, the reasons for misses, and (by mkdocstrings) the public names. A
link that leads nowhere, a page that no menu has, and a page that asks a foreign host for anything fail the build.

What a web server shows is `build/site-versions/`, or DIR: a folder for each version that was ever built into it, a list
of them for the selector in each page's header, and a front page that leads to the newest.

Run it by `nox -s site`, which brings the tools.
"""

from __future__ import annotations

import argparse
import contextlib
import html.parser
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PAGES = BUILD / "site-pages"
SITE = BUILD / "site"
VERSIONS = BUILD / "site-versions"

MERMAID = "mermaid@12.3.0"

# What the pages say about the code: page → its title and the modules whose public names it shows.
API = {
    "client": (
        "Client",
        [
            "lmcache_core.client.client",
            "lmcache_core.client.asynchronous",
            "lmcache_core.client.results",
            "lmcache_core.kernel.answers",
            "lmcache_core.client.find.lookups",
            "lmcache_core.client.move.leases",
            "lmcache_core.client.promises",
            "lmcache_core.client.find.group_lookups",
            "lmcache_core.client.why.explaining",
            "lmcache_core.client.engine_blocks",
            "lmcache_core.client.link.address",
            "lmcache_core.client.link.event_stream",
        ],
    ),
    "pages": (
        "An engine's pages",
        [
            "lmcache_core.client.move.regions",
            "lmcache_core.client.move.pages",
            "lmcache_core.client.move.page_jobs",
            "lmcache_core.client.move.copying",
        ],
    ),
    "names": ("Keys, namespaces, layouts", ["lmcache_core.tokens", "lmcache_core.pool.layout"]),
    "server": ("Server and errors", ["lmcache_core.server.server", "lmcache_core.errors"]),
    "settings": (
        "Settings",
        [
            "lmcache_core.settings.compose",
            "lmcache_core.settings.model",
            "lmcache_core.settings.sizes",
            "lmcache_core.settings.paths",
        ],
    ),
    "plugins": (
        "Hooks and components",
        ["lmcache_core.plugins.hookspecs", "lmcache_core.plugins.components", "lmcache_core.plugins.loader"],
    ),
    "tiers": (
        "Adapters",
        [
            "lmcache_core.tiers.contract",
            "lmcache_core.tiers.budget",
            "lmcache_core.tiers.streams",
            "lmcache_core.tiers.blocking",
        ],
    ),
    "policies": (
        "Policies",
        ["lmcache_core.policies", "lmcache_core.policies.contracts", "lmcache_core.policies.lru"],
    ),
    "serdes": ("Serdes", ["lmcache_core.serde.contract"]),
    "sockets": ("Sockets for others", ["lmcache_core.protocol.zmtp", "lmcache_core.protocol.hostport"]),
    "events": (
        "Events, their subscribers, tracers",
        ["lmcache_core.observe.events", "lmcache_core.observe.subscriber", "lmcache_core.observe.tracer"],
    ),
    "beside": (
        "Companions, operations, helpers",
        ["lmcache_core.server.companion", "lmcache_core.server.operation", "lmcache_core.server.helper"],
    ),
    "testing": ("The conformance kit", ["lmcache_testing"]),
    "benches": (
        "Commands and benches",
        ["lmcache_core.cli.lazy", "lmcache_core.cli.bench", "lmcache_core.cli.bench.harness"],
    ),
    "l0": ("L0", ["lmcache_l0"]),
    "transformers": ("transformers", ["lmcache_transformers"]),
}

_LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--into", type=Path, default=VERSIONS, metavar="DIR", help="versions of it (default: %(default)s)"
    )
    parser.add_argument("--serve", action="store_true", help="serve them on http://127.0.0.1:8000 once it is built")
    options = parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    homes = page_homes()
    for source, page in homes.items():
        write(page, "".join(relinked(source, page, homes)))
    for picture in (ROOT / "docs").rglob("*.png"):
        home = PAGES / picture.relative_to(ROOT / "docs")
        home.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, home)
    for name, text in reference().items():
        write(Path("reference") / name, text)
    vendor_mermaid()
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=True)
    faults = [*unlisted(), *faults_of_pages()]
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{SITE.relative_to(ROOT)}: {sum(1 for _ in SITE.rglob('*.html'))} pages, {len(faults)} faults")
    if not faults:
        publish(SITE, options.into, version())
    if options.serve and not faults:
        from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

        os.chdir(options.into)
        ThreadingHTTPServer(("127.0.0.1", 8000), SimpleHTTPRequestHandler).serve_forever()
    return 1 if faults else 0


# --- pages that people wrote ----------------------------------------------------------------------------------
def page_homes() -> dict[Path, Path]:
    """Each file that becomes a page → where it lies in the site."""
    homes = {path: path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))}
    homes[ROOT / "docs/README.md"] = Path("contents.md")
    homes[ROOT / "docs/internals/index.md"] = Path("internals/the-index.md")  # the name index.md is for a room's front
    homes[ROOT / "README.md"] = Path("index.md")
    for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"):
        homes[ROOT / f"{name}.md"] = Path("project") / f"{name.lower()}.md"
    for readme in sorted(ROOT.glob("*/*/README.md")):
        homes[readme] = Path("packages") / f"{readme.parent.name}.md"
    homes[ROOT / "core/README.md"] = Path("packages/lmcache-core.md")
    for changes in [ROOT / "core/CHANGELOG.md", *sorted(ROOT.glob("*/lmcache-*/CHANGELOG.md"))]:
        name = "lmcache-core" if changes.parent.name == "core" else changes.parent.name
        homes[changes] = Path("project/changes") / f"{name}.md"
    return homes


def relinked(source: Path, page: Path, homes: dict[Path, Path]) -> Iterator[str]:
    """The text, with links to other pages as the site has them. A link to code becomes its path."""

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match.group()
        found = (source.parent / path).resolve()
        if found.is_dir():
            found = found / "README.md"
        home = homes.get(found)
        if home is not None:
            return f"[{label}]({Path(os.path.relpath(home, page.parent)).as_posix()}{hash_}{anchor})"
        there = (source.parent / path).resolve().relative_to(ROOT)
        return label if label.strip("`") == str(there) else f"{label} (`{there}`)"

    def image(match: re.Match[str]) -> str:
        label, target = match.groups()
        found = (source.parent / target).resolve()
        home = found.relative_to(ROOT / "docs")
        (PAGES / home).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, PAGES / home)
        return f"![{label}]({Path(os.path.relpath(home, page.parent)).as_posix()})"

    fenced, text = False, ""  # lines outside code blocks, together: a link may be broken across two
    for line in source.read_text(encoding="utf-8").splitlines(keepends=True):
        fence = bool(_FENCE.match(line.lstrip()))
        if fence or fenced:
            yield _IMAGE.sub(image, _LINK.sub(link, text)) + line
            fenced, text = fenced ^ fence, ""
        else:
            text += line
    yield _IMAGE.sub(image, _LINK.sub(link, text))


# --- pages that the code writes -------------------------------------------------------------------------------
def reference() -> dict[str, str]:
    """The pages under reference/, by name."""
    pages = {f"api-{name}.md": api_page(title, modules) for name, (title, modules) in API.items()}
    return pages | {"cli.md": cli_page(), "settings.md": settings_page(), "reasons.md": reasons_page()}


def api_page(title: str, modules: list[str]) -> str:
    """Every public name of some modules, for mkdocstrings to fill in."""
    parts = [f"# {title}\n"]
    for module in modules:
        parts.append(f"\n::: {module}\n    options:\n      members: {json.dumps(public_names(module))}\n")
    return "".join(parts)


def public_names(module: str) -> list[str]:
    """What a module exports, or defines without an underscore."""
    loaded = import_module(module)
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    return [name for name, each in vars(loaded).items() if name[0] != "_" and getattr(each, "__module__", "") == module]


def cli_page() -> str:
    """The help of every command, as it prints it."""
    from lmcache_core.cli.main import build_parser
    from lmcache_core.plugins.loader import load_plugins

    os.environ["COLUMNS"] = "100"
    parser = build_parser(load_plugins())
    parts = ["# Command line\n\nEach command says this with `--help`.\n"]
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        if name in {each.dest for each in commands._choices_actions}:
            parts.append(f"\n## {name}\n\n```text\n{helped(name)}```\n")
            for below in (each for each in command._actions if isinstance(each, argparse._SubParsersAction)):
                for inner in (each.dest for each in below._choices_actions):
                    parts.append(f"\n### {name} {inner}\n\n```text\n{helped(name, inner)}```\n")
    return "".join(parts)


def helped(*words: str) -> str:
    """What a command prints for `--help`."""
    from lmcache_core.cli.main import main as command_line

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        command_line([*words, "--help"])
    text = out.getvalue().rstrip()
    if not text:
        raise SystemExit(f"`lmcache-core {' '.join(words)} --help` prints nothing")
    return text + "\n"


def settings_page() -> str:
    """Every setting with its type, default and meaning, each with an anchor of its name."""
    from lmcache_core.cli.init import default_text
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.settings.compose import prepare
    from lmcache_core.settings.sources import dotted, read_flags

    tiers = ("--l2.disk.type", "fs", "--l2.redis.type", "redis", "--l2.s3.type", "s3")
    schema, _, _ = prepare(load_plugins(), [read_flags(tiers)])
    lines = [
        "# Settings\n\nEach can be given in `lmcache.toml`, as a flag (`--l1.size_bytes 64GiB`) or in the environment"
        " (`LMCACHE_CORE_L1__SIZE_BYTES=64GiB`). `lmcache-core init --tiers disk,redis,s3` writes a file with all of"
        " them. The tiers here are called `disk`, `redis` and `s3`: their names are yours to choose.\n"
    ]
    tables: dict[tuple[str, ...], list[Any]] = {}
    for setting in schema.values():
        tables.setdefault(setting.path[:-1], []).append(setting)
    for at, settings in tables.items():
        heading = f"`[{'.'.join(at)}]`" if at else "Outside of any table"
        lines.append(f"\n## {heading}\n\n| setting | type | default | |\n|---|---|---|---|\n")
        for each in settings:
            name, default = dotted(each.path), default_text(each).replace(str(Path.home()), "~")
            cells = (
                f'<a id="{name}"></a>`{name}`',
                each.type_text,
                f"`{default}`" if default else "needed" if each.required else "",
                each.description,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(lines)


def reasons_page() -> str:
    """Every reason for a miss, in the words of `explain`."""
    from lmcache_core.client.why import explaining

    rows = [f"| `{reason}` | {sentence} |\n" for reason, sentence in explaining.sentences().items()]
    return (
        "# Reasons for a miss\n\nAs `lmcache-core explain` and `client.explain` say them;"
        " [what helps](../operating/why-did-it-miss.md) has a page of its own.\n\n| reason | sentence |\n|---|---|\n"
    ) + "".join(rows)


# --- versions -------------------------------------------------------------------------------------------------
def version() -> str:
    """Of all packages: they are released together."""
    return str(tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def publish(site: Path, into: Path, name: str) -> None:
    """Put a built site beside those of other versions. `versions.json` is what the theme's selector reads."""
    shutil.rmtree(into / name, ignore_errors=True)
    shutil.copytree(site, into / name)
    names = sorted((page.parent.name for page in into.glob("[!.]*/index.html")), key=_in_order, reverse=True)
    told = [{"version": each, "title": each, "aliases": ["latest"] if each == names[0] else []} for each in names]
    (into / "versions.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (into / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>lmcache-core</title><meta http-equiv="refresh" '
        f'content="0; url={names[0]}/"><a href="{names[0]}/">lmcache-core {names[0]}</a>\n',
        encoding="utf-8",
    )


def _in_order(name: str) -> tuple[list[int], bool, str]:
    """1.10 after 1.9, and a release after its candidates."""
    release = re.match(r"[\d.]*", name)[0]  # type: ignore[index]  # it may be empty
    return [int(part) for part in re.findall(r"\d+", release)], release == name, name


# --- what is fetched ------------------------------------------------------------------------------------------
def vendor_mermaid() -> None:
    """Mermaid beside the pages, so that no reader's browser asks anybody else for it."""
    target = PAGES / "assets/mermaid.min.js"
    kept = BUILD / f"{MERMAID}.min.js"
    if not kept.exists():
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(BUILD), MERMAID], check=True, stdout=-3)
        archive = BUILD / (MERMAID.replace("@", "-") + ".tgz")
        with tarfile.open(archive) as packed:
            member = packed.extractfile("package/dist/mermaid.min.js")
            assert member is not None
            kept.write_bytes(member.read())
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(kept, target)


# --- what is looked at ----------------------------------------------------------------------------------------
class _Page(html.parser.HTMLParser):
    """The ids of a page, where its links lead, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.ids |= {said[name] for name in ("id", "name") if said.get(name)}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        elif tag == "link" and not {"canonical", "prev", "next"} & set(said.get("rel", "").split()):
            self.loads.append(said.get("href", ""))
        elif "src" in said:
            self.loads.append(said["src"])


def faults_of_pages() -> Iterator[str]:
    """Links that lead nowhere, and what would be asked of a foreign host."""
    pages = {path: parsed(path) for path in sorted(SITE.rglob("*.html"))}
    for path, page in pages.items():
        here = path.relative_to(SITE)
        for load in page.loads:
            if re.match(r"(https?:)?//", load):
                yield f"{here} loads {load}"
            elif load.endswith(".svg") and not (path.parent / load).exists():
                yield f"{here} shows {load}, which is not there"
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target) or target.startswith("//"):
                continue
            found = (
                SITE / target[1:] if target.startswith("/") else (path.parent / target).resolve() if target else path
            )
            if found.is_dir():
                found = found / "index.html"
            if not found.exists():
                yield f"{here} links to {link}, which is not there"
            elif anchor and found in pages and anchor not in pages[found].ids:
                yield f"{here} links to {link}: no such place on that page"
    for sheet in SITE.rglob("*.css"):
        for load in re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)", sheet.read_text(encoding="utf-8")):
            yield f"{sheet.relative_to(SITE)} loads {load}"


def parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def unlisted() -> Iterator[str]:
    """Pages that the menu of mkdocs.yml leaves out, and menu entries without a page."""
    menu = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    there = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")}
    yield from (f"mkdocs.yml has no place for {page}" for page in sorted(there - menu))
    yield from (f"mkdocs.yml names {page}, which is not there" for page in sorted(menu - there))


def write(page: Path, text: str) -> None:
    (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
    (PAGES / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
