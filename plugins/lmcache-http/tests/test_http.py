"""The routes over a real server in a process of its own, and who may use them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError

from lmcache_core.client.client import Client
from lmcache_core.kernel.answers import Reason
from lmcache_core.pool.layout import Layout
from lmcache_core.server.traffic import BEHIND
from lmcache_core.testing import HelperContract, PluginPackageContract
from lmcache_core.testing.waiting import WAIT_S, until
from lmcache_core.tokens.namespace import Namespace
from lmcache_http.guard import Guard, RefusedError, Right
from lmcache_http.node import LIVE_S
from lmcache_http.readiness import why_not_ready
from lmcache_http.settings import HttpSettings
from lmcache_http.ui import page_files

SPACE = Namespace("model", Layout("uint8", (4096,)))
KEYS = [bytes([number + 1]) * 32 for number in range(4)]


class TestPackage(PluginPackageContract):
    distribution = "lmcache-http"
    heavy = ("fastapi", "uvicorn", "starlette", "prometheus_client")


class TestHttp(HelperContract):
    component = "http"

    @pytest.fixture
    def helper_settings(self, tmp_path: Path) -> dict[str, Any]:
        return {"unix_socket": str(tmp_path / "http")}


class OverSocket(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


class Served:
    """A server with its HTTP interface, and how to ask both."""

    def __init__(self, tmp_path: Path, *options: str) -> None:
        self.name, self.run = f"h{uuid4().hex[:10]}", tmp_path / "run"
        self.socket = tmp_path / "http"
        argv = [
            sys.executable,
            "-m",
            "lmcache_core.cli.main",
            "serve",
            "--name",
            self.name,
            "--runtime_dir",
            str(self.run),
        ]
        argv += ["--state_dir", str(tmp_path / "state"), "--l1.size_bytes", "16MiB", "--l1.backing", "memfd"]
        argv += ["--http.unix_socket", str(self.socket), *options]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        until(self._answers)

    def _answers(self) -> bool:
        try:
            return self.get("/livez")[0] == 200
        except OSError:
            return False

    def client(self) -> Client:
        return Client.connect(self.name, runtime_dir=self.run)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = OverSocket(self.socket)
        try:
            sent = None if body is None else json.dumps(body)
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, sent, {"content-type": "application/json", **given})
            reply = connection.getresponse()
            text = reply.read().decode()
            is_json = (reply.getheader("content-type") or "").startswith("application/json")
            return reply.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.ask("GET", path, **headers)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(*options: str) -> Served:
        made.append(Served(tmp_path, *options))
        return made[-1]

    yield start
    for each in made:
        each.end()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("correct-horse\n")
    return path


CHANGER = "Bearer correct-horse"


def test_it_says_what_the_commands_say(serve: Callable[..., Served]) -> None:
    served = serve()
    until(lambda: served.get("/readyz")[0] == 200)
    status, told = served.get("/status")
    assert (status, told["server"]["name"], told["troubles"]) == (200, served.name, [])
    assert told["helpers"]["http"]["restarts"] == 0
    status, text = served.get("/metrics")
    assert status == 200
    assert "lmcache_core_info{" in text
    assert f'="{served.name}"' in text
    assert served.get("/config")[1]["name"] == served.name
    assert served.get("/tiers") == (200, [])
    assert "GET /livez" in served.get("/docs")[1]
    assert "http" not in served.get("/")[1].replace("lmcache_http", "")  # no address of anybody


def test_health_is_the_loops_own_and_not_this_process_s(serve: Callable[..., Served]) -> None:
    """The loop stands still, and this process lives: that is no health."""
    served = serve()
    served.process.send_signal(signal.SIGSTOP)
    for path in ("/livez", "/healthcheck", "/readyz"):
        status, told = served.get(path)
        assert status == 503, path
        assert told["detail"]
    served.process.send_signal(signal.SIGCONT)
    until(lambda: served.get("/livez")[0] == 200)
    until(lambda: served.get("/readyz")[0] == 200)


@pytest.mark.parametrize("path", ["/status", "/metrics"])
def test_figures_of_a_server_that_stands_still_are_refused_before_a_scraper_gives_up(
    serve: Callable[..., Served], path: str
) -> None:
    served = serve()
    until(lambda: served.get(path)[0] == 200)
    served.process.send_signal(signal.SIGSTOP)
    refused = until(lambda: (found := served.get(path))[0] == 503 and found)  # what is a second old is told until then
    assert f"within {LIVE_S:g} s" in refused[1]["detail"]  # a scraper waits ten
    served.process.send_signal(signal.SIGCONT)
    until(lambda: served.get(path)[0] == 200)


def test_objects_are_explained_pinned_and_cleared(serve: Callable[..., Served], token: Path) -> None:
    served = serve("--http.token_file", str(token))
    with served.client() as client:
        until(lambda: client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE).stored == 4)
        space = f"{SPACE.id:016x}"
        about = {"namespace": space, "keys": [KEYS[0].hex(), "ff" * 32], "dtype": "uint8", "shape": [4096]}
        status, told = served.ask("POST", "/explain", about, authorization=CHANGER)
        assert status == 200
        assert [each["hit"] for each in told] == [True, False]
        assert served.ask("POST", "/pin", about, authorization=CHANGER) == (200, ["GRANTED", "MISS"])
        assert client.status()["l1"]["pinned_objects"] == 1
        status, told = served.ask("POST", "/clear-cache", {"namespace": space}, authorization=CHANGER)
        assert (status, told["objects"]) == (200, 4)
        assert client.lookup(KEYS, namespace=SPACE).hits == 0
        client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE)
        assert served.ask("POST", "/clear", authorization=CHANGER)[1]["objects"] >= 3
    wrong = served.ask("POST", "/clear", {"namespace": "no id"}, authorization=CHANGER)
    assert (wrong[0], "16 hexadecimal" in wrong[1]["detail"]) == (400, True)
    assert served.ask("POST", "/clear", {"names": "x"}, authorization=CHANGER)[0] == 422
    assert served.ask("POST", "/tiers/cold", {"action": "drain"}, authorization=CHANGER)[0] == 400


def test_quotas_are_set_changed_and_ended(serve: Callable[..., Served], token: Path) -> None:
    served = serve("--http.token_file", str(token))
    right = {"authorization": "Bearer correct-horse"}
    id_ = f"{SPACE.id:016x}"
    body = {"namespaces": [id_], "stores": {"l1": {"limit_bytes": 8192}}}
    assert served.ask("PUT", "/quota/chat", body)[0] == 401
    assert served.ask("PUT", "/quota/chat", body, **right)[0] == 200
    with served.client() as client:
        until(lambda: _stored(client) == 2)
    found = served.get("/quota/chat", **right)[1]
    assert found["namespaces"] == [id_]
    assert found["stores"]["l1"] == {"used_bytes": 8192, "reserved_bytes": None, "limit_bytes": 8192}
    limit = 'tenant_limit_bytes{store="l1",tenant="chat"} 8192.0'
    metrics = until(lambda: _with(served.get("/metrics", **right)[1], limit))
    assert 'tenant_used_bytes{store="l1",tenant="chat"} 8192.0' in metrics
    more_than_it_may = {"stores": {"l1": {"limit_bytes": 1, "reserved_bytes": 2}}}
    assert served.ask("PUT", "/quota/chat", more_than_it_may, **right)[0] == 400
    assert served.ask("PUT", "/quota/chat", {"stores": {"\ud800": {}}}, **right)[0] == 422
    assert served.ask("DELETE", "/quota/chat", **right)[0] == 200
    assert served.get("/quota/chat", **right)[0] == 404
    assert served.ask("DELETE", "/quota/chat", **right)[0] == 400


def _stored(client: Client) -> int:
    """How many of four objects are there, once all were offered."""
    client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE)
    return [s.name for s in client.lookup(KEYS, namespace=SPACE, prefix=False).statuses].count("GRANTED")


def _with(text: str, part: str) -> str | None:
    return text if part in text else None


def test_reading_and_changing_are_two_rights(serve: Callable[..., Served], token: Path, tmp_path: Path) -> None:
    reader = tmp_path / "reader"
    reader.write_text("battery-staple")
    served = serve("--http.token_file", str(token), "--http.read_token_file", str(reader))
    assert served.get("/status")[0] == 401
    assert served.get("/status", authorization="Bearer battery")[0] == 401
    assert served.get("/status", authorization="Bearer battery-staple")[0] == 200
    assert served.get("/status", authorization=CHANGER)[0] == 200
    assert served.ask("POST", "/clear", authorization="Bearer battery-staple")[0] == 403
    assert served.ask("POST", "/clear")[0] == 401
    assert served.ask("POST", "/clear", authorization=CHANGER)[0] == 200
    assert served.get("/livez")[0] == 200

    def rights(**headers: str) -> tuple[bool, bool]:
        status, told = served.get("/rights", **headers)
        assert status == 200
        assert set(told["why_not"]) == {name for name in ("read", "change") if not told[name]}
        return told["read"], told["change"]

    assert rights() == (False, False)
    assert rights(authorization="Bearer battery-staple") == (True, False)
    assert rights(authorization=CHANGER) == (True, True)
    with served.client() as client:
        told = client.status()["helpers"]["http"]
    command = Path(f"/proc/{told['pid']}/cmdline").read_text() + Path(f"/proc/{told['pid']}/environ").read_text()
    assert "correct-horse" not in command
    assert "battery-staple" not in command


def test_a_server_s_own_table_is_switched_and_its_promotions_are_scraped(
    serve: Callable[..., Served], token: Path, tmp_path: Path
) -> None:
    l0 = pytest.importorskip("lmcache_l0", reason="lmcache-l0 is not installed")
    sizes = ("--l0.hash_slots", "100", "--l0.folder", str(tmp_path), "--l0.promote_after", "1")
    served = serve("--http.token_file", str(token), *sizes)
    right = {"authorization": CHANGER}
    assert served.ask("POST", "/companions/l0/switch", {"enabled": True})[0] == 401
    with Client.connect(served.name, runtime_dir=served.run, use_index=False) as client:
        cache = l0.ServedCache(client, "features")
        until(lambda: cache.set("k", b"v").name in ("STORED", "EXISTS"))
        cache.get("k")
        assert not cache.l0.enabled
        assert served.ask("POST", "/companions/l0/switch", {"enabled": True}, **right) == (200, {"enabled": True})
        assert cache.l0.enabled
        promoted = 'companion_counts_total{companion="l0",what="promoted"} 1.0'
        metrics = until(lambda: cache.get("k") and _with(served.get("/metrics", **right)[1], promoted))
        assert 'companion_figures{companion="l0",what="enabled"} 1.0' in metrics
        assert served.ask("POST", "/companions/l0/switch", {"enabled": False}, **right) == (200, {"enabled": False})
        assert not cache.l0.enabled
        assert served.get("/status", **right)[1]["companions"]["l0"]["enabled"] is False
        for path, body, said in (
            ("l0/switch", {}, "switch(enabled)"),
            ("l0/switch", {"companion": "l0", "self": 1}, "switch(enabled)"),
            ("l0/switch", {"enabled": 1 << 70}, "does not accept"),
            ("l1/switch", {"enabled": True}, "no companion 'l1'"),
        ):
            status, told = served.ask("POST", f"/companions/{path}", body, **right)
            assert (status, said in told["detail"]) == (400, True), told
        cache.close()


def test_without_a_token_nothing_is_changed(serve: Callable[..., Served]) -> None:
    served = serve()
    status, told = served.ask("POST", "/clear")
    assert (status, "http.token_file" in told["detail"]) == (403, True)
    assert served.get("/status")[0] == 200


def test_it_is_back_after_it_was_killed(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.client() as client:
        os.kill(client.status()["helpers"]["http"]["pid"], signal.SIGKILL)

        def back() -> bool:
            try:
                return served.get("/livez")[0] == 200
            except OSError:
                return False

        until(back)
        assert client.status()["helpers"]["http"]["restarts"] == 1


# --- bodies ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_understood_is_answered_in_words(serve: Callable[..., Served], token: Path) -> None:
    served = serve("--http.token_file", str(token))

    def said(body: bytes, path: str = "/clear") -> tuple[int, str]:
        connection = OverSocket(served.socket)
        headers = {"content-type": "application/json", "authorization": CHANGER}
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        told = json.loads(reply.read())
        connection.close()
        assert list(told) == ["detail"]
        return reply.status, told["detail"]

    assert "JSON" in said(b"{no json")[1]
    assert said(b"\xff\xfe{}")[0] in (400, 422)
    assert said(b"[" * 100_000)[0] in (400, 422)
    assert said(b"[]") == (422, "body: Input should be a valid dictionary or object to extract fields from")
    assert said(b'{"tiers": "words"}')[1].startswith("body.tiers: ")
    assert said(b'{"settings": {"a": 1' + b"0" * 5000 + b'}, "action": "add"}', "/tiers/cold")[0] == 400
    for odd in (b"1" + b"0" * 30, b'"\\ud800"'):
        status, told = said(b'{"action": "add", "settings": {"a": ' + odd + b"}}", "/tiers/cold")
        assert (status, "does not accept" in told) == (422, True), odd
    assert said(b'{"action": "burn"}', "/tiers/cold")[0] == 422
    assert said(b" " * (1 << 20)) == (413, "the body is larger than 262,144 bytes")
    many = b"{" + b",".join(b'"k%d":1' % number for number in range(100)) + b"}"
    status, told = said(many)
    assert (status, told.endswith("and 95 more")) == (422, True)
    assert served.get("/livez")[0] == 200


def test_a_body_without_a_length_is_cut_off_where_it_is_too_long(serve: Callable[..., Served], token: Path) -> None:
    served = serve("--http.token_file", str(token))
    connection = OverSocket(served.socket)
    chunks = iter([b" " * 4096] * 100)
    headers = {"content-type": "application/json", "authorization": CHANGER}
    connection.request("POST", "/clear", chunks, headers, encode_chunked=False)
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())["detail"]) == (413, "the body is larger than 262,144 bytes")
    connection.close()


@pytest.mark.parametrize(
    ("head", "sent"),
    [
        (b"Content-Length: 1000000000", b""),
        (b"Content-Length: 1000000000\r\nExpect: 100-continue", b""),
        (b"Transfer-Encoding: chunked", b"60000\r\n" + b" " * 0x60000 + b"\r\n"),  # and there is more to come
    ],
)
def test_a_body_that_is_too_long_is_refused_before_it_has_come(
    serve: Callable[..., Served], head: bytes, sent: bytes
) -> None:
    served = serve()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(WAIT_S)
        asking.connect(str(served.socket))
        asking.sendall(b"POST /clear HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n" + sent)
        said = b""
        while b"larger than" not in said:
            more = asking.recv(4096)
            assert more, said
            said += more
    assert said.startswith(b"HTTP/1.1 413 ")


def test_the_schema_is_for_who_may_read(serve: Callable[..., Served], token: Path) -> None:
    served = serve("--http.token_file", str(token))
    assert served.get("/openapi.json")[0] == 401
    assert (
        served.get("/openapi.json", host="evil.example", authorization=CHANGER)[0] == 200
    )  # a Unix socket has no host
    schema = served.get("/openapi.json", authorization=CHANGER)[1]
    for path, methods in schema["paths"].items():
        for told in methods.values():
            assert {"403", "421", "500"} <= set(told["responses"]), path


# --- events ---------------------------------------------------------------------------------------------------


class Listening:
    """A stream of events, read line by line."""

    def __init__(self, served: Served) -> None:
        self._connection = OverSocket(served.socket)
        self._connection.request("GET", "/events")
        self.reply = self._connection.getresponse()
        assert self.reply.status == 200
        assert self.reply.readline() == b"retry: 1000\n"  # it is connected

    def next(self) -> dict[str, Any] | None:
        """The next event; None at the stream's end."""
        while line := self.reply.readline():
            if line.startswith(b"data: "):
                told: dict[str, Any] = json.loads(line[6:])
                return told
        return None

    def until(self, name: str) -> dict[str, Any]:
        while (event := self.next()) is not None:
            if event["event"] == name:
                return event
        raise AssertionError(f"the stream ended without {name}")

    def close(self) -> None:
        self.reply.close()
        self._connection.close()


STREAM = ("--subscribers.stream.readers_max", "8")


def test_a_store_is_seen_as_admitted_and_after_a_restart_again(serve: Callable[..., Served]) -> None:
    for _ in range(2):
        served = serve(*STREAM)
        stream = Listening(served)
        with served.client() as client:
            until(lambda client=client: client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE).stored == 4)
        assert stream.until("admitted")["keys"] == [key.hex() for key in KEYS]
        served.process.terminate()
        while stream.next() is not None:
            pass
        stream.close()
        served.process.wait(WAIT_S)


def test_who_stops_reading_is_told_how_much_it_missed_and_nobody_waits_for_it(serve: Callable[..., Served]) -> None:
    served = serve(*STREAM)
    sleeper, reader = Listening(served), Listening(served)
    with served.client() as client:
        stored = 0
        for turn in range(1000):
            keys = [bytes([turn % 256, turn // 256, number]) + bytes(29) for number in range(64)]
            stored += client.store(keys, [bytes(4096)] * 64, namespace=SPACE).stored
        assert client.lookup(KEYS, namespace=SPACE).hits == 0
        until(lambda: client.status()["events"]["queue"] == 0)
        told = client.status()["events"]
        assert (told["dropped"], told["subscribers"]["stream"]["aside"]) == (0, "")

        def store_more() -> None:
            client.clear(SPACE)
            client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE)

        missed = 0
        while not missed:  # it reads again, what waits for it first
            event = sleeper.next()
            assert event is not None
            if event["event"] == "missed":
                missed = event["events"]
            store_more()
    assert missed > 0
    assert stored > 0
    assert reader.until("admitted")
    sleeper.close()
    reader.close()


def test_a_server_without_a_stream_says_how_to_have_one(serve: Callable[..., Served]) -> None:
    status, told = serve().get("/events")
    assert (status, "[subscribers.stream]" in told["detail"]) == (404, True)


def test_streams_are_for_who_may_read(serve: Callable[..., Served], token: Path) -> None:
    assert serve(*STREAM, "--http.token_file", str(token)).get("/events")[0] == 401


# --- the page -------------------------------------------------------------------------------------------------


def test_the_page_needs_no_token_and_tells_nothing_of_the_server(serve: Callable[..., Served], token: Path) -> None:
    served = serve("--http.token_file", str(token))
    status, page = served.get("/ui")
    assert status == 200
    assert served.name not in page
    parts = re.findall(r'(?:src|href)="(ui/[^"]+)"', page)
    assert "ui/main.js" in parts
    for name in parts:
        assert served.get(f"/{name}")[0] == 200, name
    for name in ("ui/none.js", "ui/../app.py", "ui/%2e%2e/app.py", "ui/uplot/"):
        assert served.get(f"/{name}")[0] == 404, name
    assert served.get("/status")[0] == 401
    connection = OverSocket(served.socket)
    connection.request("GET", "/ui")
    reply = connection.getresponse()
    reply.read()
    connection.close()
    policy = dict(part.split(" ", 1) for part in str(reply.getheader("content-security-policy")).split("; "))
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert "unsafe" not in str(policy)


def test_the_page_names_nobody_elses_address_and_holds_no_script_or_style() -> None:
    there = page_files()
    page = there["index.html"].decode()
    assert re.findall(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page) == []
    ours = {name: content.decode() for name, content in there.items() if not name.startswith("uplot/")}
    for name, text in ours.items():
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|insertAdjacentHTML|eval\(", text) == [], name


def test_the_page_has_words_for_every_reason_that_is_counted() -> None:
    told = json.loads(page_files()["reasons.json"])
    counted = {reason.name.lower() for reason in Reason if reason not in (Reason.NONE, Reason.UNVERIFIABLE)}
    assert set(told) == counted | {"loading", BEHIND}
    assert all(each["means"] for each in told.values())


# --- the guard ------------------------------------------------------------------------------------------------


def guard(**settings: Any) -> Guard:
    return Guard(HttpSettings(**settings))


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "[::1]:8080", "kv.example"])
def test_our_own_names_are_served(host: str) -> None:
    guard(allowed_hosts=("kv.example",)).check({"host": host}, Right.READ)


@pytest.mark.parametrize("host", ["", "evil.example", "127.0.0.1.evil.example:8080", "localhost.evil", "[", "10.0.0.1"])
def test_other_names_are_not_as_dns_rebinding_has_them(host: str) -> None:
    for right in Right:
        with pytest.raises(RefusedError) as caught:
            guard().check({"host": host}, right)
        assert caught.value.status == 421


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1.evil.example", "[", "http://localhost:3000", "file://localhost"],
)
def test_pages_of_others_are_turned_away(origin: str, token: Path) -> None:
    for right in Right:
        with pytest.raises(RefusedError) as caught:
            guard(token_file=token).check({"host": "localhost", "origin": origin, "authorization": CHANGER}, right)
        assert caught.value.status == 403
    guard().check({"host": "localhost:8080", "origin": "http://localhost:8080"}, Right.READ)
    guard().check({"host": "localhost", "origin": "https://localhost"}, Right.READ)  # a proxy ends TLS


def test_other_addresses_need_a_token(token: Path, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "kv.example"):
        with pytest.raises(ValidationError, match="token_file"):
            HttpSettings(host=host)
        HttpSettings(host=host, token_file=token)
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        HttpSettings(host=host)
    HttpSettings(host="0.0.0.0", unix_socket=tmp_path / "socket")
    with pytest.raises(ValidationError, match="TLS needs both"):
        HttpSettings(tls_cert_file=token)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="no token"):
        guard(token_file=empty)
    empty.write_text("geheim-ß")
    with pytest.raises(ValueError, match="a header cannot carry"):
        guard(token_file=empty)


# --- readiness ------------------------------------------------------------------------------------------------


def told(populated: int = 10, draining: bool = False, **breakers: str) -> dict[str, Any]:
    tiers = [
        {"name": name, "reads": {"breaker": state}, "writes": {"breaker": "closed"}} for name, state in breakers.items()
    ]
    return {
        "server": {"draining": draining},
        "pool": {"population_error": "", "populated_bytes": populated},
        "l1": {"pool_bytes": 10},
        "tiers": {"tiers": tiers},
    }


def test_ready_is_populated_not_draining_and_with_the_tiers_that_are_asked_for() -> None:
    assert why_not_ready(told(), "all") == []
    assert why_not_ready(told(populated=9), "none") == ["9 of 10 bytes of the pool are populated"]
    assert why_not_ready(told(draining=True), "none") == ["the server is draining"]
    mixed, away = told(a="open", b="closed"), told(a="open", b="open")
    assert [bool(why_not_ready(mixed, which)) for which in ("none", "any", "all")] == [False, False, True]
    assert [bool(why_not_ready(away, which)) for which in ("none", "any", "all")] == [False, True, True]
