"""No secret of any package is shown: not in a log of any level, not by a command, not in an error."""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from ..conftest import Node

pytest.importorskip("lmcache_s3")
pytest.importorskip("lmcache_redis")
pytest.importorskip("lmcache_crypto")
zmq_auth = pytest.importorskip("zmq.auth")

SECRETS = {
    "the S3 access key": "AKIASECRETACCESSKEY1",
    "the S3 secret": "s3/secret+that/nobody+may/see",
    "the S3 session token": "session//token==that++nobody//may==see",
    "the proxy's password": "proxy-password-to-hide",
    "the Redis password": "redis@password:to/hide",
    "the Sentinels' password": "sentinel-password-to-hide",
    "the encryption key": "5e" * 32,
}
LEVELS = ["debug", "info", "warning", "error"]


class Refusing(http.server.BaseHTTPRequestHandler):
    """An S3, and a proxy, that refuses and repeats what it was told, as S3 itself does with a wrong signature."""

    def _refuse(self) -> None:
        token = self.headers.get("x-amz-security-token", "")
        body = (
            "<Error><Code>SignatureDoesNotMatch</Code><Message>The signature does not match</Message>"
            f"<AWSAccessKeyId>{SECRETS['the S3 access key']}</AWSAccessKeyId><Token>{token}</Token></Error>"
        ).encode()
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(403)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _refuse

    def log_message(self, *words: object) -> None:
        pass


class WrongPassword(socketserver.StreamRequestHandler):
    """A Redis that lets nobody in."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self.request.recv(4096):
                self.request.sendall(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")


class Threaded(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@pytest.fixture
def services() -> Iterator[tuple[int, int]]:
    """The ports of an S3 and of a Redis."""
    with Threaded(("127.0.0.1", 0), Refusing) as s3, Threaded(("127.0.0.1", 0), WrongPassword) as redis:
        for each in (s3, redis):
            threading.Thread(target=each.serve_forever, daemon=True).start()
        yield s3.server_address[1], redis.server_address[1]
        s3.shutdown()
        redis.shutdown()


def written(folder: Path, s3_port: int, redis_port: int) -> Path:
    """Settings with every secret that any package takes."""
    zmq_auth.create_certificates(folder, "server")
    (folder / "clients").mkdir()
    credentials = f"""
bucket = "bucket"
endpoint_url = "http://127.0.0.1:{s3_port}"
region = "eu-central-1"
access_key_id = "{SECRETS["the S3 access key"]}"
secret_access_key = "{SECRETS["the S3 secret"]}"
session_token = "{SECRETS["the S3 session token"]}"
deadline_s = 2.0
"""
    path = folder / "lmcache.toml"
    path.write_text(
        f"""
[zmq]
tcp = "127.0.0.1:0"
curve_secret_key_file = "{folder}/server.key_secret"
curve_clients_dir = "{folder}/clients"

[l2.direct]
type = "s3"
transport = "direct"
prefix = "direct"
{credentials}
[l2.plain]
type = "s3"
transport = "plain"
prefix = "plain"
proxy = "http://user:{SECRETS["the proxy's password"]}@127.0.0.1:{s3_port}"
{credentials}
[l2.keyed]
type = "redis"
url = "redis://cache:{quote(SECRETS["the Redis password"], safe="")}@127.0.0.1:{redis_port}/0"
deadline_s = 2.0
serde = [{{type = "aesgcm", keys = "{SECRETS["the encryption key"]}"}}]

[l2.watched]
type = "redis"
mode = "sentinel"
nodes = ["127.0.0.1:{redis_port}"]
password = "{SECRETS["the Redis password"]}"
sentinel_password = "{SECRETS["the Sentinels' password"]}"
deadline_s = 2.0
"""
    )
    return path


@contextlib.contextmanager
def serving(node: Node, config: Path, level: str, log: Path, environ: dict[str, str]) -> Iterator[None]:
    """A server whose log goes to a file: at debug level it would fill a pipe."""
    words = [
        "serve",
        "--name",
        node.name,
        "--runtime_dir",
        str(node.run),
        "--state_dir",
        str(node.run.parent / "state"),
    ]
    words += ["--config", str(config), "--l1.size_bytes", "16MiB", "--drain_s", "1", "--log-level", level]
    command = [sys.executable, "-m", "lmcache_core.cli.main", *words]
    with log.open("w") as file, subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=file) as server:
        try:
            assert server.stdout is not None
            assert b"ready" in server.stdout.readline(), log.read_text()
            yield
            server.terminate()
            server.wait(60)
        finally:
            server.kill()


def forms(secret: str, also: str = "") -> list[str]:
    """As a secret may be written down."""
    whole = (secret, f"user:{secret}", f"cache:{secret}", also)
    coded = [base64.b64encode(each.encode()).decode() for each in whole if each]
    return [secret, quote(secret, safe=""), quote(secret), repr(secret)[1:-1], *coded]


def assert_hidden(text: str, where: str, curve_secret: str) -> None:
    for what, secret in {**SECRETS, "the CURVE secret": curve_secret}.items():
        for form in forms(secret):
            if form in text:
                line = next(line for line in text.splitlines() if form in line)
                raise AssertionError(f"{what} stands in {where}: {line.replace(form, '<<SECRET>>')[:400]}")


@pytest.mark.parametrize("level", LEVELS)
def test_no_output_at_any_log_level_holds_a_secret(
    node: Node, tmp_path: Path, services: tuple[int, int], level: str
) -> None:
    config = written(tmp_path, *services)
    _, secret_key = zmq_auth.load_certificate(tmp_path / "server.key_secret")
    curve_secret = secret_key.decode()
    log = tmp_path / "log"
    environ = {**os.environ, "HOME": str(tmp_path), "LMCACHE_CORE_NAME": node.name}
    where = ["--runtime-dir", str(node.run)]

    def command(*words: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "lmcache_core.cli.main", *words],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return ran.stdout + ran.stderr

    with serving(node, config, level, log, environ), node.client() as client:
        stored = client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
        assert stored.stored == 1
        client.lookup([node.key("a"), node.key("b")], namespace=node.namespace, wait_s=10.0, prefix=False)
        explained = repr(client.explain([node.key("a"), node.key("b")], namespace=node.namespace))
        said = {"explain": explained, "status by the client": repr(client.status())}
        if level == "debug":
            layout = ["--model", "model", "--dtype", "uint8", "--shape", "65536"]
            said |= {
                "status": command("status", "--all", *where),
                "status --json": command("status", "--json", *where),
                "tiers list": command("tiers", "list", *where),
                "the explain command": command("explain", *where, *layout, node.key("b").hex()),
                "config": command("config", "--config", str(config)),
                "check": command("check", "--config", str(config)),
                "an error of the settings": command("check", "--config", str(config), "--l2.plain.transport", "no"),
                "plugins": command("plugins"),
            }
            said |= {f"plugins show {name}": command("plugins", "show", name) for name in ("s3", "redis", "crypto")}
            assert all(len(text) > 20 for text in said.values()), said
            asked = said["status"] + said["tiers list"]
            assert "AuthenticationError" in asked, "Redis was really asked"
            assert "SignatureDoesNotMatch" in asked or "403" in asked, "S3 was really asked"
    said["the log"] = log.read_text()
    assert level == "error" or "tier" in said["the log"]
    for name, text in said.items():
        assert_hidden(text, name, curve_secret)


def test_the_search_would_find_a_secret_in_each_of_its_forms() -> None:
    for secret in SECRETS.values():
        for form in forms(secret):
            with pytest.raises(AssertionError, match="stands in a text"):
                assert_hidden(f"x {form} y", "a text", "curve")
