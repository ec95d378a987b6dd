"""The page at `/ui` in a real browser, beside a real server: what it shows and changes, and what it does not do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from lmcache_core.client.client import Client
from lmcache_core.client.why.explaining import counted_reasons
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace
from lmcache_lab.record import start_recording, stop_recording
from lmcache_lab.recordings import read_recording
from lmcache_testing.waiting import WAIT_S, until
from lmcache_tools.size import from_live

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/operating/ui.png"
PATIENCE_MS = 60_000  # a net under waits for what the page does
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
NBYTES = 65536
PHONE = 375
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
SPACE_ID = f"{SPACE.id:016x}"
CHANGE, READ = "correct-horse", "battery-staple"
HOSTILE = "<img src=x onerror='window.hit=1'>"


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Served:
    """A server that is watched: two tokens, a tier on disk, and a stream of events. It can be started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.name = "demo"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        (folder / "change").write_text(CHANGE)
        (folder / "read").write_text(READ)
        self.disk = folder / HOSTILE.replace("/", "")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = {
            "name": self.name, "runtime_dir": self.run, "state_dir": self.folder / "state", "l1.size_bytes": "16MiB",
            "l1.backing": "memfd", "l1.eviction.type": "adaptive",
            "l2.disk.type": "fs", "l2.disk.path": self.disk, "l2.disk.capacity_bytes": "64MiB",
            "subscribers.stream.readers_max": 8, "http.port": self.port, "http.token_file": self.folder / "change",
            "http.read_token_file": self.folder / "read",
        }  # fmt: skip
        argv = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--log-level", "error"]
        argv += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)

    def ready(self) -> None:
        until(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.address}/readyz", timeout=WAIT_S).status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        request = urllib.request.Request(f"{self.address}{path}", headers={"Authorization": f"Bearer {READ}"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return str(reply.read().decode())

    def client(self, name: str = "engine") -> Client:
        return Client.connect(self.name, runtime_dir=self.run, client_name=name)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("ui"))
    served.start()
    try:
        served.ready()
        yield served
    finally:
        served.end()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """With an empty pool and an empty disk."""
    with served.client() as client:
        client.clear(tiers=True)
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """Every address that the pages asked for."""
    return []


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    """What the console said of scripts, styles and policies; not that a server was away, or wanted a token."""
    return []


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, served: Served, asked: list[str], complaints: list[str]) -> Iterator[Open]:
    """A page of a tab of its own, signed in with a token."""
    made: list[Page] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def opened(token: str = CHANGE, **options: Any) -> Page:
        page = browser.new_page(**{"color_scheme": "light", **options})
        made.append(page)
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{served.address}/ui")
        if token:
            sign_in(page, token)
            expect(page.locator("#board")).to_be_visible()
            expect(page.locator("#events")).to_have_attribute("data-connected", "true")
        return page

    yield opened
    for page in made:
        page.close()


def sign_in(page: Page, token: str) -> None:
    page.locator("#token").fill(token)
    page.get_by_role("button", name="Sign in", exact=True).click()


def tile(page: Page, name: str) -> Locator:
    return page.locator(f"#tile-{name} dd").first


def points(page: Page) -> int:
    return int(page.locator("#chart-fill").get_attribute("data-points") or 0)


def until_points(page: Page, number: int) -> None:
    """Wait until the charts have so many: here, since the page's policy lets Playwright evaluate no text in it."""
    until(lambda: points(page) >= number)


def store(client: Client, first: int, number: int) -> None:
    keys = [key(each) for each in range(first, first + number)]
    assert client.store(keys, [bytes(NBYTES)] * number, namespace=SPACE).stored == number


def test_the_recorded_hit_rate_is_that_of_metrics_top_and_page(
    open_page: Open, served: Served, client: Client, tmp_path: Path
) -> None:
    """The first of these tests: nobody has looked anything up yet."""
    start_recording(client, tmp_path / "trace")
    store(client, 0, 10)
    for asked_for in (4, 10, 17, 23):
        client.lookup([key(each) for each in range(asked_for)], namespace=SPACE)
    stop_recording(client)
    lookups = [each for each in read_recording(tmp_path / "trace")[1] if each.kind == "lookup"]
    recorded = sum(each.hits for each in lookups) / sum(len(each.keys) // 8 for each in lookups)
    assert recorded == pytest.approx(34 / 54)
    page = open_page()
    expect(tile(page, "hit-rate")).to_have_text("63.0%")
    exact = float(tile(page, "hit-rate").get_attribute("data-exact"))
    command = [sys.executable, "-m", "lmcache_core.cli.main", "top", "--json", "--name", served.name]
    done = subprocess.run([*command, "--runtime-dir", str(served.run)], capture_output=True, text=True, check=True)
    metrics = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in served.get("/metrics").splitlines()
        if line[0] != "#"
    }
    hits = sum(value for name, value in metrics.items() if name.startswith("lmcache_core_lookup_hits_total"))
    scraped = hits / metrics["lmcache_core_lookup_keys_total"]
    assert exact == json.loads(done.stdout)["hit_rate"] == round(scraped, 6) == round(recorded, 6)


def test_without_a_token_nothing_is_shown_and_with_one_that_reads_nothing_is_changed(
    open_page: Open, served: Served
) -> None:
    page = open_page(token="")
    expect(page.locator("#sign-in-why")).to_contain_text("a token is needed: send that of http.token_file")
    sign_in(page, "wrong")
    expect(page.locator("#sign-in-why")).to_contain_text("this token is not valid: send that of http.token_file")
    expect(page.locator("#board")).to_be_hidden()
    assert served.name not in page.content()
    sign_in(page, READ)
    expect(page.locator("#server-name")).to_have_text(served.name)
    expect(page.locator("#may-not")).to_have_text("this token allows only reading")
    expect(page.locator("#forms")).to_be_hidden()
    expect(page.get_by_role("button", name="Drain")).to_be_hidden()
    page.get_by_role("button", name="that allows changes").click()
    sign_in(page, CHANGE)
    expect(page.locator("#forms")).to_be_visible()
    page.reload()
    expect(page.locator("#forms")).to_be_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#sign-in")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_store_moves_the_fill_and_is_among_the_events(open_page: Open, client: Client) -> None:
    page = open_page()
    expect(tile(page, "pool")).to_have_text("0.0%")
    store(client, 0, 64)
    expect(tile(page, "pool")).to_have_text("25.0%")
    expect(page.locator("#stores tr[data-key=l1]")).to_contain_text("4.0 MiB of 16.0 MiB")
    expect(page.locator("#events td", has_text="admitted").first).to_be_visible()
    expect(page.locator("#stores tr[data-key=disk] td").nth(4)).not_to_have_text("0")
    expect(page.locator("#trouble-list")).to_have_text("none")


def test_namespaces_are_listed_by_their_labels(open_page: Open, client: Client) -> None:
    page = open_page()
    space = Namespace("labelled", Layout("uint8", (64,)), label="llama-3-8b/bf16")
    client.register_layout(space)
    row = page.locator(f"#namespaces tr[data-key='{space.id:016x}']")
    expect(row).to_contain_text("llama-3-8b/bf16")
    expect(row).to_contain_text("uint8[64]")


def test_the_charts_are_drawn_and_go_on(open_page: Open, client: Client) -> None:
    page = open_page()
    store(client, 0, 8)
    expect(page.locator("#charts figure canvas")).to_have_count(6)
    expect(page.locator("#chart-fill .u-legend")).to_contain_text("disk")
    until_points(page, 2)
    drawn = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"
    for canvas in page.locator("#charts canvas").all():
        assert canvas.evaluate(drawn)


def test_the_past_is_there_at_once_and_what_follows_is_added(open_page: Open, served: Served, client: Client) -> None:
    """Of the server's start, though nobody had this page open then; a label names the line of its namespace."""
    space = Namespace("charted", Layout("uint8", (64,)), label="llama-3-8b/bf16")
    before = len(past(served))
    for number in range(1, 3):
        client.lookup([key(each) for each in range(100)], namespace=space)
        until(lambda number=number: len(past(served)) >= before + number)
    there = past(served)
    page = open_page()
    assert points(page) >= len(there) > 2
    expect(page.locator("#chart-namespaces .u-legend")).to_contain_text("llama-3-8b/bf16")
    until_points(page, points(page) + 2)
    assert past(served)[: len(there)] == there


def test_a_page_keeps_an_hour_and_a_gap_where_its_process_was_away(open_page: Open) -> None:
    page = open_page()
    times, values, lines = page.evaluate("""async () => {
      const { History } = await import("/ui/history.js");
      const history = new History();
      const add = (times, series) => history.append({ times, charts: [{ id: "fill", series }] });
      add([1000, 1010], { l1: [0.1, 0.2], gone: [0.5, null] });
      add([1100], { l1: [0.3], disk: [0.9] });
      const { l1, disk } = history.charts[0].series;
      add([4650], { l1: [0.4] });
      return [history.times, [l1, disk], Object.keys(history.charts[0].series)];
    }""")
    assert values == [[0.1, 0.2, None, 0.3], [None, None, None, 0.9]]
    assert times == [1100, 1101, 4650]
    assert lines == ["l1", "disk"]


def past(served: Served) -> list[float]:
    served.get("/status")
    return list(json.loads(served.get("/history"))["times"])


def test_what_another_order_or_size_would_have_hit_is_that_of_the_size_command(
    open_page: Open, served: Served, client: Client
) -> None:
    page = open_page()
    for _ in range(4):  # over and over, more than the pool holds: what was used last is what to evict
        for first in range(0, 384, 64):
            keys = [key(each) for each in range(first, first + 64)]
            client.store(keys, [bytes(NBYTES)] * 64, namespace=SPACE)
            client.lookup(keys, namespace=SPACE, tiers=[])
    expected = from_live(client.status())["pools"]
    assert any(pool["gain"] > 0 for pool in expected)
    rows = page.locator("#what-if tbody tr")
    expect(rows).to_have_count(len(expected))
    for row, pool in zip(rows.all(), expected, strict=True):
        hits, gain = pool["hit_share"], 100 * pool["gain"]
        expect(row.locator("td").nth(0)).to_contain_text(f"{pool['l1_bytes'] / 2**20:.1f} MiB")
        expect(row.locator("td").nth(1)).to_have_text(pool["order"])
        expect(row.locator("td").nth(2)).to_have_text(f"{100 * hits:.1f}%")
        expect(row.locator("td").nth(3)).to_have_text("0" if abs(gain) < 0.05 else f"{gain:+.1f}".replace("-", "−"))


def test_a_reason_for_misses_says_what_it_means_and_what_helps(open_page: Open, client: Client) -> None:
    page = open_page()
    assert client.lookup([key(9999)], namespace=SPACE).hits == 0
    row = page.locator("#miss-never_stored")
    row.locator("summary").click()
    told = counted_reasons()["never_stored"]
    expect(row.locator(".means")).to_contain_text(told.means)
    expect(row.locator(".helps")).to_contain_text(told.helps)
    expect(row.locator("summary .figure")).not_to_have_text("")


def explain(page: Page, **fields: str) -> Any:
    """Fill the form and send it; the rows of the answer."""
    for name, value in fields.items():
        page.locator(f"form#explain [name={name}]").fill(value)
    page.locator("form#explain").get_by_role("button", name="Explain").click()
    return page.locator("#explanations tbody tr")


def test_a_key_is_explained_on_the_page(open_page: Open, client: Client) -> None:
    """One in pool and tier, one that was never stored, and one that a clear has taken."""
    store(client, 0, 1)
    assert all(each.stored for each in client.wait_stored([key(0)], namespace=SPACE))
    other = Namespace("cleared", SPACE.layout)
    client.store([key(0)], [bytes(NBYTES)], namespace=other)
    client.clear(other, tiers=True)
    page = open_page(token=READ)
    rows = explain(page, namespace=SPACE_ID, keys=f"{key(0).hex()}\n{key(4242).hex()}")
    expect(page.locator("#explained")).to_have_text("1 of 2 keys found")
    expect(rows.nth(0)).to_contain_text("found")
    expect(rows.nth(0)).to_contain_text("l1, disk")
    expect(rows.nth(1)).to_contain_text("never_stored")
    expect(rows.nth(1)).to_contain_text("What helps: compare namespaces")
    rows = explain(page, namespace=f"{other.id:016x}", keys=key(0).hex())
    expect(page.locator("#explained")).to_have_text("0 of 1 key found")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("cleared")
    expect(rows).to_contain_text("s ago")


def test_a_prompt_is_explained_with_the_keyboard_alone(open_page: Open, client: Client) -> None:
    """Tab leads through the form in the order in which it is read, shows where one is, and Enter sends it."""
    space = Namespace("llama", Layout("uint8", (64,)), label="llama-3-8b/bf16")
    prompt = list(range(1000, 1768))
    client.store(chunk_keys(prompt, space, 256)[:2], [bytes(64)] * 2, namespace=space)
    page = open_page()
    expect(page.locator("#known-namespaces option[value='llama-3-8b/bf16']")).to_have_count(1)
    page.locator("form#explain [name=namespace]").focus()
    page.keyboard.type("llama-3-8b/bf16")
    seen = []
    for typed in ("", ", ".join(map(str, prompt)), "llama", ""):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(FOCUSED))
        page.keyboard.insert_text(typed)
    assert [name for name, _, _ in seen] == ["keys", "tokens", "model", "SUMMARY"]
    page.keyboard.press("Enter")
    for _ in range(5):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(FOCUSED))
    page.keyboard.press("Tab")
    seen.append(page.evaluate(FOCUSED))
    fields = ["weights_version", "kv_shard", "format", "tenant_salt", "chunk_tokens", "BUTTON"]
    assert [name for name, _, _ in seen[4:]] == fields
    assert all(shown for _, shown, _ in seen), "one sees where one is"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#explained")).to_have_text("2 of 3 keys found; an engine gets the first 2")
    for name in ("tokens", "model"):
        page.locator(f"form#explain [name={name}]").focus()
        page.keyboard.press("End")
        page.keyboard.type("0")
        page.keyboard.press("Enter")
        expect(page.locator("#explained")).to_contain_text(
            "3 keys found" if name == "tokens" else "compare model, weights version"
        )


def test_tab_goes_through_the_page_in_the_order_of_reading(open_page: Open, client: Client) -> None:
    """From signing in to the last button, one sees where one is; and nothing holds the keyboard for itself."""
    store(client, 0, 1)
    page = open_page(token="")
    expect(page.locator("#token")).to_be_focused()
    page.keyboard.type(CHANGE)
    page.keyboard.press("Enter")
    expect(page.locator("#forms")).to_be_visible()
    seen = []
    while not seen or seen[-1][0] != "BODY":
        page.keyboard.press("Tab")
        seen.append(page.evaluate(FOCUSED))
        assert len(seen) < 200, seen
    stops = [name for name, _, _ in seen[:-1]]
    assert {"namespace", "keys", "tokens", "SUMMARY", "BUTTON", "tiers", "ttl_s", "store", "limit_bytes"} <= set(stops)
    assert [name for name, shown, follows in seen[:-1] if not (shown and follows)] == []


# What has the focus, whether that is seen, and whether it stands behind what had it before.
FOCUSED = """() => {
  const at = document.activeElement, { outlineStyle, outlineWidth } = getComputedStyle(at);
  const follows = !window.former || (window.former.compareDocumentPosition(at) & Node.DOCUMENT_POSITION_FOLLOWING) > 0;
  window.former = at;
  return [at.name || at.tagName, outlineStyle !== "none" && parseFloat(outlineWidth) > 0, follows];
}"""


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"namespace": HOSTILE, "keys": "ff" * 32}, "the server knows no namespace"),
        ({"namespace": SPACE_ID, "keys": HOSTILE}, "is not a key: give its 64 hexadecimal digits"),
        ({"namespace": SPACE_ID, "tokens": HOSTILE}, "is not a token id: give whole numbers"),
        ({"namespace": SPACE_ID}, "give either keys or token ids"),
        ({"namespace": SPACE_ID, "tokens": "1 2 3"}, "give its model, too"),
    ],
)
def test_what_cannot_be_explained_is_said_beside_the_form(
    open_page: Open, client: Client, fields: dict[str, str], why: str
) -> None:
    client.register_layout(SPACE)
    page = open_page()
    rows = explain(page, **fields)
    expect(page.locator("#explained")).to_contain_text(why)
    expect(rows).to_have_count(0)
    assert page.evaluate("window.hit") is None


def test_a_clear_from_the_page_clears(open_page: Open, client: Client) -> None:
    store(client, 0, 16)
    page = open_page()
    form = page.locator("form#clear")
    form.locator("[name=namespace]").fill(SPACE_ID)
    form.locator("[name=tiers]").check()
    form.get_by_role("button").click()
    expect(page.locator("#sure-text")).to_contain_text(SPACE_ID)
    page.locator("#sure").get_by_role("button", name="No").click()
    assert client.lookup([key(0)], namespace=SPACE).hits == 1
    form.get_by_role("button").click()
    page.locator("#sure").get_by_role("button", name="Yes").click()
    expect(page.locator("#said")).to_contain_text("cleared: 16 objects")
    assert client.lookup([key(0)], namespace=SPACE).hits == 0
    expect(tile(page, "pool")).to_have_text("0.0%")


def test_objects_are_pinned_from_the_page(open_page: Open, client: Client) -> None:
    store(client, 0, 1)
    page = open_page()
    form = page.locator("form#pin")
    fields = {"namespace": SPACE_ID, "keys": f"{key(0).hex()}\n{key(77).hex()}", "dtype": "uint8", "shape": str(NBYTES)}
    for name, value in fields.items():
        form.locator(f"[name={name}]").fill(value)
    form.get_by_role("button").click()
    expect(page.locator("#said")).to_have_text("pin: 1 GRANTED, 1 MISS")
    assert client.status()["l1"]["pinned_objects"] == 1


def test_quotas_are_set_changed_and_ended_from_the_page(open_page: Open, client: Client) -> None:
    page = open_page()
    form, rows = page.locator("form#quota"), page.locator("#tenants tbody tr")
    form.locator("[name=tenant]").fill("chat")
    form.locator("[name=namespaces]").fill(SPACE_ID)
    form.locator("[name=limit_bytes]").fill("1 MiB")
    form.get_by_role("button").click()
    row = rows.filter(has_text="chat").first
    expect(row).to_contain_text("1.0 MiB")
    row.get_by_role("button", name="Edit").click()
    form.locator("[name=limit_bytes]").fill("much")
    form.get_by_role("button").click()
    expect(page.locator("#said")).to_contain_text("much is not a size")
    form.locator("[name=limit_bytes]").fill("2MiB")
    form.get_by_role("button").click()
    expect(row).to_contain_text("2.0 MiB")
    store(client, 0, 16)
    expect(row).to_contain_text("50.0%")
    row.get_by_role("button", name="End").click()
    page.locator("#sure").get_by_role("button", name="Yes").click()
    expect(rows.filter(has_text="chat")).to_have_count(0)
    assert client.quotas() == [] or "chat" not in {each["tenant"] for each in client.quotas()}


def test_a_tier_is_drained_and_used_again_from_the_page(open_page: Open, client: Client) -> None:
    page = open_page()
    row = page.locator("#stores tr[data-key=disk]")
    row.get_by_role("button", name="Drain").click()
    page.locator("#sure").get_by_role("button", name="Yes").click()
    expect(row).to_contain_text("draining")
    row.get_by_role("button", name="Use again").click()
    expect(row).to_contain_text("in use")
    assert not client.status()["tiers"]["tiers"][0]["draining"]


def test_names_and_errors_of_others_are_text(
    open_page: Open, served: Served, client: Client, complaints: list[str]
) -> None:
    page = open_page()
    with served.client(HOSTILE) as other:
        other.status()
        expect(page.locator("#clients td", has_text="onerror").first).to_have_text(HOSTILE)
        expect(page.locator("#events td", has_text="onerror").first).to_be_visible()
    aside = served.disk.rename(served.folder / "aside")
    served.disk.write_text("no directory")
    try:
        store(client, 500, 1)
        expect(page.locator("#trouble-list")).to_contain_text("onerror")
        expect(page.locator("#stores tr[data-key=disk] .said-there")).to_contain_text("onerror")
    finally:
        served.disk.unlink()
        aside.rename(served.disk)
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hit") is None
    markup = "() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error instanceof TypeError; } }"
    assert page.evaluate(markup) is True
    complaints[:] = [each for each in complaints if "TrustedHTML" not in each]


def test_it_goes_on_after_a_restart_of_the_server(open_page: Open, served: Served) -> None:
    page = open_page()
    with served.client() as client:
        store(client, 100, 32)
        expect(tile(page, "pool")).not_to_have_text("0.0%")
    served.end()
    expect(page.locator("#connection")).to_contain_text("does not answer")
    served.start()
    expect(page.locator("#connection")).to_be_hidden()
    expect(tile(page, "pool")).to_have_text("0.0%")
    expect(page.locator("#events")).to_have_attribute("data-connected", "true")
    served.ready()
    with served.client() as client:
        store(client, 200, 64)
    expect(tile(page, "pool")).to_have_text("25.0%")


# What stands out of the phone, or has more inside than it shows.
CUT = """width => [...document.querySelectorAll("body *")].filter((each) => each.checkVisibility()).filter((each) => {
  const { right, width: wide } = each.getBoundingClientRect();
  const hides = getComputedStyle(each).overflowX !== "visible" && each.scrollWidth > each.clientWidth + 1;
  return right > width + 1 || (hides && wide > 0);
}).map((each) => `${each.tagName} ${each.id || each.className} ${each.textContent.slice(0, 40)}`)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(open_page: Open, client: Client, scheme: str) -> None:
    store(client, 0, 8)
    page = open_page(viewport={"width": PHONE, "height": 800}, color_scheme=scheme)
    expect(page.locator("#chart-fill canvas")).to_be_visible()
    expect(page.locator("#stores tr[data-key=disk]")).to_be_visible()
    expect(explain(page, namespace=SPACE_ID, keys=f"{key(0).hex()} {key(7000).hex()}")).to_have_count(2)
    page.locator("#explain summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    assert page.evaluate(CUT, PHONE) == []
    back, text = page.evaluate("(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))")
    brightness = [sum(map(int, colour[4:-1].split(","))) for colour in (back, text)]
    assert (brightness[0] < brightness[1]) == (scheme == "dark")
    assert abs(brightness[0] - brightness[1]) > 400


def test_a_change_of_colours_makes_the_charts_anew(open_page: Open, client: Client) -> None:
    page = open_page()
    expect(page.locator("#charts canvas")).to_have_count(6)
    page.evaluate("document.querySelector('#chart-fill .uplot').id = 'former'")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("#former")).to_have_count(0)
    expect(page.locator("#charts canvas")).to_have_count(6)


def test_the_picture_for_the_docs(open_page: Open, client: Client, tmp_path: Path) -> None:
    """Written with LMCACHE_PICTURES=1; without it only looked at."""
    page = open_page(viewport={"width": 1000, "height": 900})
    store(client, 0, 64)
    before = points(page)
    for turn in range(1, 5):
        client.lookup([key(each) for each in range(64 + 9 * turn)], namespace=SPACE)
        client.retrieve([key(each) for each in range(64)], [bytearray(NBYTES) for _ in range(64)], namespace=SPACE)
        store(client, 64 * turn, 16 * turn)
        until_points(page, before + turn)
    path = PICTURE if os.environ.get("LMCACHE_PICTURES") else tmp_path / "ui.png"
    page.screenshot(path=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < PICTURE.stat().st_size < 200_000


def test_nothing_was_asked_of_a_foreign_host_and_the_browser_had_no_complaint(
    asked: list[str], served: Served, complaints: list[str]
) -> None:
    assert asked, "the pages above were loaded"
    assert {urlsplit(each).netloc for each in asked} == {urlsplit(served.address).netloc}
    assert complaints == []
