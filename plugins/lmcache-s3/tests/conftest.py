"""Adapters on moto, a real S3 server in a process of its own (it checks no signature; the matrix's gateway does)."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import botocore.loaders
import pytest

from lmcache_core.tiers.contract import AdapterContext, LoadItem, Outcome, StoreItem
from lmcache_core.tiers.tier.parallel import adapter_context
from lmcache_s3.adapter import S3Adapter
from lmcache_s3.settings import S3Settings

# A module beside this file; pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
# The servers that misbehave are services of the matrix.
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "matrix"))

from s3_front import Front

ACCESS_KEY, SECRET_KEY = "TESTACCESSKEY0000001", "test-secret-that-nobody-may-see-0001"
_SERVER = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections that last, as every real service has them
    def log_request(self, *words): pass

whole, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()
def one_by_one(environ, start_response):
    with turn:  # moto's tables are not for threads: a put beside a delete is answered 500
        return list(whole(environ, start_response))

server = make_server("127.0.0.1", 0, one_by_one, threaded=True, request_handler=Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session", autouse=True)
def _models_are_read_once() -> Iterator[None]:
    """boto3 reads its description of S3 for each session: 0.1 s for each adapter that a test opens."""
    shared = botocore.loaders.create_loader()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(botocore.loaders, "create_loader", lambda search_path_string=None: shared)
        yield


class Bucket:
    """A bucket of a test's own, seen past the adapter: the second door."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.name = f"test-{uuid4().hex[:12]}"
        self.boto: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        self.boto.create_bucket(Bucket=self.name)

    def settings(self, **more: Any) -> S3Settings:
        given = {
            "bucket": self.name,
            "endpoint_url": self.endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            **more,
        }
        return S3Settings(**given)

    def names(self) -> list[str]:
        return [one["Key"] for one in self.boto.list_objects_v2(Bucket=self.name).get("Contents", [])]


class Tier:
    """An adapter with short words for one object."""

    def __init__(self, settings: S3Settings, context: AdapterContext | None = None) -> None:
        self.adapter = S3Adapter(settings, context or adapter_context("cold", 4))

    @property
    def deadline(self) -> float:
        return time.monotonic() + 60

    def store(self, key: bytes, *parts: bytes) -> Outcome:
        return self.adapter.store([StoreItem(key, [memoryview(part) for part in parts])], self.deadline)[0]

    def load(self, key: bytes, *sizes: int) -> tuple[Outcome, bytes]:
        parts = [bytearray(size) for size in sizes]
        outcome = self.adapter.load([LoadItem(key, [memoryview(part) for part in parts])], self.deadline)[0]
        return outcome, b"".join(parts)

    def exists(self, *keys: bytes) -> Sequence[bool]:
        return self.adapter.exists(keys, self.deadline)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stdin.close()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/moto-api/")
            connection.getresponse().read()
            return
        except OSError:
            assert time.monotonic() < deadline, "moto did not answer"
            time.sleep(0.01)
        finally:
            connection.close()


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the environment nor the home directory of whoever runs the tests plays a part."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def bucket(moto_endpoint: str) -> Iterator[Bucket]:
    bucket = Bucket(moto_endpoint)
    yield bucket
    bucket.boto.close()


@pytest.fixture
def tier() -> Iterator[Callable[..., Tier]]:
    """Makes adapters; closes them."""
    with ExitStack() as stack:

        def make(settings: S3Settings, context: AdapterContext | None = None) -> Tier:
            made = Tier(settings, context)
            stack.callback(made.adapter.close)
            return made

        yield make


@pytest.fixture
def front(moto_endpoint: str) -> Iterator[Front]:
    """An HTTP front before moto that misbehaves when told to."""
    front = Front(moto_endpoint)
    yield front
    front.close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nobody listens on, and nobody can take meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
