"""moto: an S3 of Python, up in a second. It checks no signature; the gateway does."""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from lmcache_testing import Backdoor
from services.service import Daemon, Service, ServiceError, free_port, wait_healthy

BUCKET = "lmcache-matrix"
ACCESS_KEY = "MATRIXACCESSKEY00001"
SECRET_KEY = "matrix-secret-that-nobody-may-see-0001"

_RUN = """
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

make_server("127.0.0.1", int(sys.argv[1]), one_by_one, threaded=True, request_handler=Handler).serve_forever()
"""


class BucketDoor(Backdoor):
    """The bucket, by plain boto3 calls."""

    def __init__(self, boto: Any, prefix: str) -> None:
        self._boto = boto
        self._prefix = prefix

    def read(self, key: bytes) -> bytes | None:
        try:
            found = self._boto.get_object(**self._place(key))
        except self._boto.exceptions.NoSuchKey:
            return None
        return bytes(found["Body"].read())

    def write(self, key: bytes, content: bytes) -> None:
        self._boto.put_object(**self._place(key), Body=content)

    def remove(self, key: bytes) -> None:
        self._boto.delete_object(**self._place(key))

    def _place(self, key: bytes) -> dict[str, str]:
        return {"Bucket": BUCKET, "Key": f"{self._prefix}/{key.hex()}"}


class S3Service(Service):
    """What all S3 services share: one bucket, one key, one port."""

    tier_type = "s3"
    access_key = ACCESS_KEY
    secret_key = SECRET_KEY

    def __init__(self) -> None:
        self.endpoint = ""
        self._boto: Any = None

    def adapter_settings(self) -> dict[str, object]:
        return {
            "bucket": BUCKET,
            "endpoint_url": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
        }

    def proxied(self) -> tuple[str, int] | None:
        parts = urlsplit(self.endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def settings_through(self, port: int) -> dict[str, object]:
        return {**self.adapter_settings(), "endpoint_url": f"http://127.0.0.1:{port}"}

    # --- for the conformance kit ----------------------------------------------------------------------------
    def corner(self, label: str) -> dict[str, object]:
        return {**self.adapter_settings(), "prefix": f"kit/{label}"}

    def backdoor(self, corner: dict[str, object]) -> Backdoor:
        return BucketDoor(self.boto(), str(corner["prefix"]))

    def secrets(self) -> Sequence[str]:
        return (self.secret_key,)

    def boto(self) -> Any:
        """A boto3 client of the tests' own: the second door."""
        if self._boto is None:
            self._boto = self._make_boto()
        return self._boto

    def _make_boto(self) -> object:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(proxies={}, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def make_bucket(self) -> None:
        self.boto().create_bucket(Bucket=BUCKET)

    def answers(self, path: str = "/") -> bool:
        parts = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2)
        try:
            connection.request("GET", path)
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @classmethod
    def at(cls, endpoint: str) -> S3Service:
        """A service of the user's own; the key is AWS_ACCESS_KEY_ID's, the bucket `lmcache-matrix` is made."""
        service = cls()
        service.endpoint = endpoint
        service.access_key = os.environ["AWS_ACCESS_KEY_ID"]
        service.secret_key = os.environ["AWS_SECRET_ACCESS_KEY"]
        service.make_bucket()
        return service


class Moto(S3Service):
    name = "s3-moto"
    restartable: ClassVar[bool] = False  # it keeps nothing

    def __init__(self) -> None:
        super().__init__()
        self._daemon: Daemon | None = None

    def start(self, folder: Path) -> None:
        try:
            import moto.server  # noqa: F401
        except ImportError as error:
            raise ServiceError("moto is not installed: pip install 'moto[server]'") from error
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self._daemon = Daemon([sys.executable, "-c", _RUN, str(port)], folder / "log")
        wait_healthy("moto", self.healthy, self._daemon)
        self.make_bucket()

    def healthy(self) -> bool:
        return self.answers("/moto-api/")

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.stop()
