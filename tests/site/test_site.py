"""The built site in a real browser: it draws, finds, changes colours and versions, and asks nobody else."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect, sync_playwright

VERSIONS = Path(__file__).parents[2] / "build/site-versions"
SITE = Path(__file__).parents[2] / "build/site"
OLDER = "0.0.1"
PATIENCE_MS = 60_000  # a net under waits for what the page does
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip

# The theme draws diagrams where no page looks; these look there. TEXT_PX: the size of each diagram's smallest text.
OPENED = """const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function(options) { return attach.call(this, {...options, mode: "open"}) }"""
DRAWN = """() => [...document.querySelectorAll(".mermaid")].map(each => each.shadowRoot?.querySelector("svg"))"""
TEXT_PX = f"""() => ({DRAWN})().flatMap(drawn => [...drawn.querySelectorAll("text, foreignObject p")]
  .filter(each => each.textContent.trim())
  .map(each => parseFloat(getComputedStyle(each).fontSize) * drawn.getScreenCTM().a))"""


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Nothing: what is asked for is noted by the browser's side."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The versions that were built, and an older one beside them."""
    folder = tmp_path_factory.mktemp("site") / "versions"
    shutil.copytree(VERSIONS, folder)
    told = json.loads((folder / "versions.json").read_text())
    shutil.copytree(folder / told[0]["version"], folder / OLDER)
    (folder / "versions.json").write_text(json.dumps([*told, {"version": OLDER, "title": OLDER, "aliases": []}]))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def address(root: str) -> str:
    """Of the newest version."""
    return f"{root}/{json.loads((VERSIONS / 'versions.json').read_text())[0]['version']}"


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """Every address that the browser asked for."""
    return []


@pytest.fixture(scope="module")
def page(address: str, asked: list[str]) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        page = browser.new_page(color_scheme="light")
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page.on("request", lambda request: asked.append(request.url))
        yield page
        browser.close()


def test_the_front_page_has_the_two_commands(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("h1").first).to_contain_text("lmcache-core")
    expect(page.locator("pre", has_text="nox -s demo").first).to_be_visible()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("shm-size", "operating/server/"),
        ("circuit breaker", "operating/"),
        ("disabled", "operating/"),
        ("shutdown", "operating/"),
        ("helper process", "operating/helpers/"),
        ("third-party", "plugins/"),
    ],
)
def test_search_finds_what_operators_look_for(page: Page, address: str, words: str, found: str) -> None:
    """Among the first three results."""
    page.goto(address)
    page.wait_for_load_state("networkidle")  # before its script is there nobody hears a key
    page.keyboard.press("/")
    page.keyboard.type(words)
    first = ":is([aria-posinset='1'], [aria-posinset='2'], [aria-posinset='3'])"
    expect(page.locator(f"[role='option']{first}[href*='{address}/{found}']").first).to_be_attached()


def test_each_setting_has_an_anchor(page: Page, address: str) -> None:
    page.goto(f"{address}/reference/settings/#l1.size_bytes")
    for name in ("l1.size_bytes", "l2.disk.path", "chunk_tokens"):
        expect(page.locator(f"[id='{name}']")).to_be_attached()


def test_a_page_with_a_diagram_shows_it_drawn(page: Page, address: str) -> None:
    page.goto(f"{address}/internals/links/")
    drawn = page.locator("div.mermaid")  # the theme puts the drawing into a closed shadow root
    expect(drawn.first).to_be_visible()
    page.wait_for_function("document.querySelector('div.mermaid').getBoundingClientRect().height > 100")


def test_the_text_of_every_diagram_can_be_read(page: Page, address: str) -> None:
    with_diagrams = [path.parent for path in SITE.rglob("index.html") if 'class="mermaid"' in path.read_text()]
    assert len(with_diagrams) > 5
    browser = page.context.browser
    assert browser is not None
    theirs = browser.new_page(viewport={"width": 1280, "height": 800})
    theirs.add_init_script(OPENED)
    for folder in with_diagrams:
        theirs.goto(f"{address}/{folder.relative_to(SITE)}/")
        theirs.wait_for_function(f"({DRAWN})().every(Boolean)")
        assert min(theirs.evaluate(TEXT_PX)) >= 12, folder
    theirs.close()


def test_the_public_names_stand_in_the_reference_with_what_they_take(page: Page, address: str) -> None:
    page.goto(f"{address}/reference/api-client/")
    for name in ("connect", "store", "retrieve", "lookup", "close"):
        expect(page.locator(f"[id='lmcache_core.client.client.Client.{name}']").first).to_be_attached()


def test_light_and_dark_follow_the_reader(page: Page, address: str) -> None:
    colours = set()
    browser = page.context.browser
    assert browser is not None
    for scheme in ("light", "dark"):
        theirs = browser.new_page(color_scheme=scheme)  # a choice once made is remembered
        theirs.goto(address)
        colours.add(theirs.evaluate("getComputedStyle(document.body).backgroundColor"))
        theirs.close()
    assert len(colours) == 2


def test_the_front_leads_to_the_newest_version(page: Page, root: str, address: str) -> None:
    page.goto(root)
    page.wait_for_url(f"{address}/")


def test_a_page_says_its_version_and_leads_to_the_others(page: Page, address: str) -> None:
    page.goto(f"{address}/internals/links/")
    shown = page.locator(".md-version__current")
    expect(shown).to_have_text(address.rsplit("/", 1)[1])
    expect(page.locator(f".md-version a[href*='/{OLDER}/']")).to_be_attached()


def test_the_picture_of_the_demo_is_shown(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("img[src$='demo.svg']")).to_be_visible()
    assert page.evaluate("document.querySelector(\"img[src$='demo.svg']\").naturalWidth") > 100


def test_nothing_was_asked_of_a_foreign_host(asked: list[str], address: str) -> None:
    assert asked, "the pages above were loaded"
    assert {urlsplit(each).netloc for each in asked if each.startswith("http")} == {urlsplit(address).netloc}
