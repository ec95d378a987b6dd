"""The routes over a real server in a process of its own, and who may use them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError

from lmcache_core.client.client import Client
from lmcache_core.kernel.answers import Reason
from lmcache_core.pool.layout import Layout
from lmcache_core.server.pool.traffic import BEHIND
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace
from lmcache_http.check import check
from lmcache_http.guard import Guard, RefusedError, Right
from lmcache_http.metrics import text_of
from lmcache_http.node import LIVE_S
from lmcache_http.probes import PROBES, REQUESTS_MAX, RequestLimit
from lmcache_http.readiness import why_not_ready
from lmcache_http.refusals import Message, Receive, Scope, Send
from lmcache_http.settings import HttpSettings
from lmcache_http.ui import page_files
from lmcache_testing import HelperContract, PluginPackageContract
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import WAIT_S, until

SPACE = Namespace("model", Layout("uint8", (4096,)))
KEYS = [bytes([number + 1]) * 32 for number in range(4)]


class TestPackage(PluginPackageContract):
    distribution = "lmcache-http"
    heavy = ("fastapi", "uvicorn", "starlette", "prometheus_client")


class TestHttp(HelperContract):
    component = "http"

    @pytest.fixture
    def helper_settings(self, tmp_path: Path) -> Json:
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
        argv = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--name", self.name]
        argv += [
            "--runtime_dir",
            str(self.run),
            "--state_dir",
            str(tmp_path / "state"),
            "--l1.size_bytes",
            "16MiB",
            "--l1.backing",
            "memfd",
        ]
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
            return reply.status, json.loads(text) if is_json and text else text
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


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("correct-horse\n")
    return path


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("open"))
    yield served
    served.end()


@pytest.fixture
def served(open_server: Served) -> Iterator[Served]:
    """A server without any option that tests share; each finds it awake."""
    until(lambda: open_server.get("/readyz")[0] == 200)
    yield open_server
    open_server.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, token: Path) -> Iterator[Served]:
    """A server with a token that tests share."""
    served = Served(tmp_path_factory.mktemp("guarded"), "--http.token_file", str(token))
    yield served
    served.end()


CHANGER = "Bearer correct-horse"


def test_status_metrics_config_and_tiers_are_served_over_http(served: Served) -> None:
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


def test_processes_are_measured_under_the_standard_names(served: Served) -> None:
    """By `GET /metrics`; the command is no child of the server and cannot know which processes its pids name."""
    figures = served.get("/status")[1]
    pids = {"server": served.process.pid, "http": figures["helpers"]["http"]["pid"]}
    text = served.get("/metrics")[1]
    assert set(re.findall(r"^# TYPE (process_\w+) (\w+)$", text, re.MULTILINE)) >= {
        ("process_cpu_seconds_total", "counter"),
        ("process_resident_memory_bytes", "gauge"),
        ("process_open_fds", "gauge"),
        ("process_max_fds", "gauge"),
        ("process_start_time_seconds", "gauge"),
    }
    found = {(name, of): float(value) for name, of, value in re.findall(r'^(\w+){process="(\w+)"} (.*)$', text, re.M)}
    for of, pid in pids.items():
        soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert found["process_max_fds", of] == soft
        assert found["process_open_fds", of] == pytest.approx(len([*Path(f"/proc/{pid}/fd").iterdir()]), abs=5)
        assert found["process_start_time_seconds", of] == pytest.approx(time.time(), abs=600)
        assert found["process_cpu_seconds_total", of] > 0
        assert found["process_resident_memory_bytes", of] > 1 << 20
    with served.client() as client:
        assert "process_" not in text_of(client.status())


def test_the_past_hour_is_told_to_who_may_read(guarded: Served, served: Served) -> None:
    assert guarded.get("/history")[0] == 401
    assert served.get("/history?after=noon")[0] == 422
    until(lambda: served.get("/status")[0] == 200)
    past = served.get("/history")[1]
    assert past["times"][-1] == pytest.approx(time.time(), abs=5)
    assert all(len(line) == len(past["times"]) for chart in past["charts"] for line in chart["series"].values())
    served.process.send_signal(signal.SIGSTOP)
    assert served.get("/history")[1]["times"][: len(past["times"])] == past["times"], "while the server stands still"
    assert served.get(f"/history?after={past['times'][-1]}")[1]["times"][:1] != past["times"][-1:]


def test_health_is_the_loops_own_and_not_this_process_s(served: Served) -> None:
    """The loop stands still, and this process lives: that is no health."""
    served.process.send_signal(signal.SIGSTOP)
    for path in ("/livez", "/healthcheck", "/readyz"):
        status, told = served.get(path)
        assert status == 503, path
        assert told["detail"]
    served.process.send_signal(signal.SIGCONT)
    until(lambda: served.get("/livez")[0] == 200)
    until(lambda: served.get("/readyz")[0] == 200)


def test_a_probe_with_head_gets_the_status_of_one_with_get_and_no_body(served: Served) -> None:
    for path in PROBES:
        assert served.ask("HEAD", path)[0] == served.get(path)[0] == 200, path
    served.process.send_signal(signal.SIGSTOP)
    for path in PROBES:
        assert served.ask("HEAD", path)[0] == 503, path


def test_probes_are_answered_while_readers_wait_for_a_server_that_stands_still(
    served: Served,
) -> None:
    """More readers than there are threads wait for the server, and a probe waits for none of them."""
    served.process.send_signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        readers = []
        for _ in range(60):
            reader = OverSocket(served.socket)
            stack.callback(reader.close)
            reader.request("GET", "/tiers")
            readers.append(reader.sock)
        for path in sorted(PROBES):
            assert served.get(path)[0] == 503
        answered, _, _ = select.select(readers, [], [], 0)
        assert len(answered) < len(readers), "a probe came after the readers"
        served.process.send_signal(signal.SIGCONT)


def test_requests_beyond_the_limit_are_refused_and_probes_are_not() -> None:
    asyncio.run(_requests_beyond_the_limit())


async def _requests_beyond_the_limit() -> None:
    held, answers = asyncio.Event(), []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await held.wait()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    limit = RequestLimit(waits)
    tasks = [
        asyncio.create_task(limit({"type": "http", "path": "/status"}, receive, send)) for _ in range(REQUESTS_MAX)
    ]
    await asyncio.sleep(0)
    await limit({"type": "http", "path": "/status"}, receive, send)
    assert answers == [429]
    probes = [asyncio.create_task(limit({"type": "http", "path": path}, receive, send)) for path in PROBES]
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(*tasks, *probes)
    await limit({"type": "http", "path": "/status"}, receive, send)
    assert answers == [429]


def test_figures_of_a_server_that_stands_still_are_refused_before_a_scraper_gives_up(served: Served) -> None:
    paths = ("/status", "/metrics")
    for path in paths:
        until(lambda path=path: served.get(path)[0] == 200)
    served.process.send_signal(signal.SIGSTOP)
    for path in paths:  # what is a second old is told until then
        refused = until(lambda path=path: (found := served.get(path))[0] == 503 and found)
        assert f"within {LIVE_S:g} s" in refused[1]["detail"]  # a scraper waits ten
    served.process.send_signal(signal.SIGCONT)
    for path in paths:
        until(lambda path=path: served.get(path)[0] == 200)


def test_objects_are_explained_pinned_and_cleared(guarded: Served) -> None:
    with guarded.client() as client:
        until(lambda: client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE).stored == 4)
        space = f"{SPACE.id:016x}"
        about = {"namespace": space, "keys": [KEYS[0].hex(), "ff" * 32], "dtype": "uint8", "shape": [4096]}
        status, told = guarded.ask("POST", "/explain", about, authorization=CHANGER)
        assert status == 200
        assert [each["hit"] for each in told] == [True, False]
        assert guarded.ask("POST", "/pin", about, authorization=CHANGER) == (200, ["GRANTED", "MISS"])
        assert client.status()["l1"]["pinned_objects"] == 1
        status, told = guarded.ask("POST", "/clear-cache", {"namespace": space}, authorization=CHANGER)
        assert (status, told["objects"]) == (200, 4)
        assert client.lookup(KEYS, namespace=SPACE).hits == 0
        client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE)
        assert guarded.ask("POST", "/clear", authorization=CHANGER)[1]["objects"] >= 3
    wrong = guarded.ask("POST", "/clear", {"namespace": "no id"}, authorization=CHANGER)
    assert (wrong[0], "16 hexadecimal" in wrong[1]["detail"]) == (400, True)
    assert guarded.ask("POST", "/clear", {"names": "x"}, authorization=CHANGER)[0] == 422
    assert guarded.ask("POST", "/tiers/cold", {"action": "drain"}, authorization=CHANGER)[0] == 400


def test_a_prompt_is_explained_in_a_namespace_named_by_its_label(served: Served) -> None:
    space = Namespace("llama", Layout("uint8", (2, 64), "KT"), "v2", (1, 4), "a secret", label="llama/fp16")
    prompt = list(range(64))
    served.ask("GET", "/status")  # figures without this namespace are kept for a second
    with served.client() as client:
        keys = chunk_keys(prompt, space, 16)
        until(lambda: client.store(keys[:2], [bytes(128)] * 2, namespace=space).stored == 2)
        about = {"namespace": "llama/fp16", "tokens": prompt, "chunk_tokens": 16, "model": "llama"}
        about |= {"weights_version": "v2", "kv_shard": "1/4", "tenant_salt": "a secret"}
        status, rows = served.ask("POST", "/explain", about)
        assert status == 200, rows
        assert [(row["key"], row["hit"]) for row in rows] == [(key.hex(), at < 2) for at, key in enumerate(keys)]
        assert [row["where"] for row in rows[:2]] == [["l1"]] * 2
        assert "never stored" in rows[2]["why"]
        by_id = {"namespace": f"{space.id:016x}", "keys": [keys[0].hex()]}
        assert served.ask("POST", "/explain", by_id)[1] == rows[:1]
        described = {"dtype": "uint8", "shape": [2, 64], "memory_format": "KT"}
        assert served.ask("POST", "/explain", {**by_id, **described})[1] == rows[:1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"namespace": "nobody's"}, r"the server knows no namespace \"nobody's\": it knows "),
        ({"namespace": "1234"}, "knows no namespace 0000000000001234, so give its dtype and shape, too; it knows "),
        (
            {"namespace": "twins"},
            r"2 namespaces have the label 'twins': give the id of one: twins \(\w{16}, uint8\[64\]\)",
        ),
        ({"tokens": None}, "give either keys or token ids"),
        ({"keys": ["ff" * 32]}, "give either keys or token ids"),
        ({"keys": ["ff"], "tokens": None}, "'ff' is not a key: give its 64 hexadecimal digits"),
        ({"model": ""}, "give its model, too"),
        ({"model": "other"}, r"is that of namespace \w{16}, and not of \w{16}: compare model, weights version"),
        ({"tokens": [1, 2]}, "2 tokens are less than one chunk of 16, so none of them are cached"),
        ({"tokens": [1] * 16 * 129}, "2,064 tokens are 129 chunks of 16, .* give the first 2,048 tokens"),
        ({"tokens": [1, -2]}, r"body.tokens.1: Input should be greater than or equal to 0"),
        ({"kv_shard": "5/4"}, "kv_shard"),
        ({"kv_shard": "half"}, "kv_shard"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_invalid_requests_to_explain_are_refused_with_a_reason(served: Served, wrong: dict[str, Any], why: str) -> None:
    spaces = [Namespace(model, Layout("uint8", (64,)), label="twins") for model in ("one", "two")]
    single = Namespace("single", Layout("uint8", (64,)), label="single")
    about = {"namespace": "single", "tokens": [1] * 32, "chunk_tokens": 16, "model": "single"}
    with served.client() as client:
        for space in (*spaces, single):
            client.register_layout(space)
        assert served.ask("POST", "/explain", about)[0] == 200
        status, told = served.ask("POST", "/explain", {**about, **wrong})
    assert status in (400, 422)
    assert re.search(why, told["detail"]), told["detail"]


def test_a_port_that_is_taken_is_found_by_check_and_the_last_words_name_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (finding,) = check(HttpSettings(port=port))
        assert (finding.ok, finding.message) == (False, f"it cannot listen at 127.0.0.1:{port}: Address already in use")
        assert finding.cure.startswith("set http.port to a free port")
        command = [sys.executable, "-m", "lmcache_http", json.dumps({"port": port})]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "set http.host or http.port to a free one" in done.stderr.splitlines()[-1]
    (finding,) = check(HttpSettings(port=port))
    assert (finding.ok, finding.cure) == (True, "")
    assert check(HttpSettings(unix_socket=tmp_path / "nowhere" / "http.sock"))[0].cure.endswith("http.unix_socket")
    assert not check(HttpSettings(port=0, token_file=tmp_path / "none"))[1].ok


def test_check_looks_twice_at_a_token_that_every_user_may_read(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    found = check(HttpSettings(port=0, token_file=token))[1]
    assert (found.ok, found.message) == (True, f"every user here may read {token}")
    assert found.cure == "chmod 600 it: it is http.token_file"
    token.chmod(0o600)
    assert len(check(HttpSettings(port=0, token_file=token))) == 1


def test_the_helper_says_when_and_where_it_listens() -> None:
    command = [sys.executable, "-m", "lmcache_http", json.dumps({"port": 0})]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as helper:
        assert helper.stderr is not None
        assert helper.stderr.readline().startswith("lmcache-http: listening at http://127.0.0.1:")
        helper.terminate()


def test_namespaces_are_shown_by_their_labels(serve: Callable[..., Served]) -> None:
    served = serve()
    space = Namespace("model", Layout("uint8", (4096,)), label="llama-3-8b/bf16")
    with served.client() as client:
        until(lambda: client.register_layout(space))
        row = served.get("/status")[1]["namespaces"][f"{space.id:016x}"]
        assert row == {"label": "llama-3-8b/bf16", "layout": "uint8[4096]", "sessions": 1}
        about = f'label="llama-3-8b/bf16",layout="uint8[4096]",namespace="{space.id:016x}"'
        assert f"lmcache_core_namespace_info{{{about}}} 1.0" in served.get("/metrics")[1]


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
            ("l0/switch", {"enabled": 1 << 70}, "cannot be sent"),
            ("l1/switch", {"enabled": True}, "no companion 'l1'"),
        ):
            status, told = served.ask("POST", f"/companions/{path}", body, **right)
            assert (status, said in told["detail"]) == (400, True), told
        cache.close()


def test_without_a_token_nothing_is_changed(served: Served) -> None:
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


def test_a_malformed_request_is_refused_with_a_reason(guarded: Served) -> None:

    def said(body: bytes, path: str = "/clear") -> tuple[int, str]:
        connection = OverSocket(guarded.socket)
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
        assert (status, "cannot be sent" in told) == (400, True), odd
    assert said(b'{"action": "burn"}', "/tiers/cold")[0] == 422
    assert said(b" " * (1 << 20)) == (413, "the body is larger than 262,144 bytes")
    many = b"{" + b",".join(b'"k%d":1' % number for number in range(100)) + b"}"
    status, told = said(many)
    assert (status, told.endswith("and 95 more")) == (422, True)
    assert guarded.get("/livez")[0] == 200


def test_a_body_without_a_length_is_cut_off_where_it_is_too_long(guarded: Served) -> None:
    connection = OverSocket(guarded.socket)
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
def test_a_body_that_is_too_long_is_refused_before_it_has_come(served: Served, head: bytes, sent: bytes) -> None:
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


def test_the_schema_is_for_who_may_read(guarded: Served) -> None:
    assert guarded.get("/openapi.json")[0] == 401
    assert (
        guarded.get("/openapi.json", host="evil.example", authorization=CHANGER)[0] == 200
    )  # a Unix socket has no host
    schema = guarded.get("/openapi.json", authorization=CHANGER)[1]
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

    def next(self) -> Json | None:
        """The next event; None at the stream's end."""
        while line := self.reply.readline():
            if line.startswith(b"data: "):
                told: Json = json.loads(line[6:])
                return told
        return None

    def until(self, name: str) -> Json:
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
        assert (told["dropped"], told["subscribers"]["stream"]["disabled"]) == (0, "")

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


def test_a_server_without_a_stream_says_how_to_have_one(served: Served) -> None:
    status, told = served.get("/events")
    assert (status, "[subscribers.stream]" in told["detail"]) == (404, True)


def test_streams_are_for_who_may_read(serve: Callable[..., Served], token: Path) -> None:
    assert serve(*STREAM, "--http.token_file", str(token)).get("/events")[0] == 401


# --- the page -------------------------------------------------------------------------------------------------


def test_the_page_needs_no_token_and_tells_nothing_of_the_server(guarded: Served) -> None:
    status, page = guarded.get("/ui")
    assert status == 200
    assert guarded.name not in page
    parts = re.findall(r'(?:src|href)="(ui/[^"]+)"', page)
    assert "ui/main.js" in parts
    for name in parts:
        assert guarded.get(f"/{name}")[0] == 200, name
    for name in ("ui/none.js", "ui/../app.py", "ui/%2e%2e/app.py", "ui/uplot/"):
        assert guarded.get(f"/{name}")[0] == 404, name
    assert guarded.get("/status")[0] == 401
    connection = OverSocket(guarded.socket)
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


def test_the_page_explains_every_counted_reason() -> None:
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


def told(populated: int = 10, draining: bool = False, **breakers: str) -> Json:
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
