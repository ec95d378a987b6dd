"""The conformance kit, for both transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import pytest
from s3_front import Fault, Front

from lmcache_core.tiers.contract import AdapterContext, L2Adapter
from lmcache_core.tiers.tier.parallel import adapter_context as parallel_context
from lmcache_s3.adapter import S3Adapter
from lmcache_s3.names import Names
from lmcache_s3.settings import S3Settings
from lmcache_testing import Backdoor, L2AdapterContract, StallingProxy

from .conftest import Bucket


class BucketDoor(Backdoor):
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._names = Names("lmcache")

    def read(self, key: bytes) -> bytes | None:
        try:
            found = self._bucket.boto.get_object(Bucket=self._bucket.name, Key=self._names.of(key))
        except self._bucket.boto.exceptions.NoSuchKey:
            return None
        return bytes(found["Body"].read())

    def write(self, key: bytes, content: bytes) -> None:
        self._bucket.boto.put_object(Bucket=self._bucket.name, Key=self._names.of(key), Body=content)

    def remove(self, key: bytes) -> None:
        self._bucket.boto.delete_object(Bucket=self._bucket.name, Key=self._names.of(key))


class S3Contract(L2AdapterContract):
    component = "s3"
    transport: ClassVar[str]
    quick_scan_pages_objects: ClassVar[int | None] = 60  # the server of these tests takes 5 ms for one

    @pytest.fixture
    def proxy(self, front: Front) -> Iterator[StallingProxy]:
        with StallingProxy("127.0.0.1", front.port) as proxy:
            yield proxy

    @pytest.fixture
    def settings(self, request: pytest.FixtureRequest, bucket: Bucket, front: Front) -> S3Settings:
        behind = {"stall", "outage"} & set(request.fixturenames)  # tests without trouble need no proxy
        url = f"http://127.0.0.1:{request.getfixturevalue('proxy').port}" if behind else front.url
        made = bucket.settings(transport=self.transport, endpoint_url=url)
        assert isinstance(made, S3Settings)
        return made

    @pytest.fixture
    def stall(self, proxy: StallingProxy) -> AbstractContextManager[None]:
        return proxy.stall()

    @pytest.fixture
    def outage(self, proxy: StallingProxy) -> AbstractContextManager[None]:
        return proxy.outage()

    @pytest.fixture
    def lock(self, front: Front) -> AbstractContextManager[None]:
        return self._slowed_down(front, "PUT")

    @pytest.fixture
    def busy(self, front: Front) -> AbstractContextManager[None]:
        return self._slowed_down(front, "PUT", "GET", "HEAD", "POST", "DELETE")

    @contextmanager
    def _slowed_down(self, front: Front, *methods: str) -> Iterator[None]:
        front.rule = lambda seen: Fault(status=503, code="SlowDown") if seen.method in methods else None
        try:
            yield
        finally:
            front.rule = None

    @pytest.fixture
    def adapter(self, settings: S3Settings, adapter_context: AdapterContext) -> Iterator[L2Adapter]:
        with S3Adapter(settings, adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, settings: S3Settings) -> Callable[[], L2Adapter]:
        return lambda: S3Adapter(settings, parallel_context("again", 4))

    @pytest.fixture
    def backdoor(self, bucket: Bucket) -> Backdoor:
        return BucketDoor(bucket)

    @pytest.fixture
    def litter(self, bucket: Bucket) -> Callable[[bytes], None]:
        """Names that are spelled otherwise than ours, and one of ours under another prefix."""

        def litter(key: bytes) -> None:
            ours = Names("lmcache").of(key)
            for name in (
                "lmcache/notes",
                "lmcache/",
                ours.upper(),
                f"lmcache/{key.hex().upper()}",
                ours + ".tmp",
                ours + "0",
                f"other/{ours}",
                "cafe",
            ):
                bucket.boto.put_object(Bucket=bucket.name, Key=name, Body=b"somebody's")

        return litter

    @pytest.fixture
    def wipe(self, bucket: Bucket) -> Callable[[], None]:
        def wipe() -> None:
            for name in bucket.names():
                bucket.boto.delete_object(Bucket=bucket.name, Key=name)

        return wipe

    @pytest.fixture
    def leftovers(self, bucket: Bucket) -> Callable[[], list[object]]:
        """Uploads that nobody ended, and names that are no objects."""

        def leftovers() -> list[object]:
            uploads = bucket.boto.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])
            names = Names("lmcache")
            return [*uploads, *(name for name in bucket.names() if names.key(name) is None)]

        return leftovers

    @pytest.fixture
    def unreachable(self, bucket: Bucket, closed_port: int) -> Iterator[L2Adapter]:
        settings = bucket.settings(transport=self.transport, endpoint_url=f"http://127.0.0.1:{closed_port}")
        with S3Adapter(settings, parallel_context("down", 2)) as adapter:
            yield adapter

    @pytest.fixture
    def hang(self, front: Front, settings: S3Settings) -> AbstractContextManager[None]:
        return front.hanging()


class TestDirect(S3Contract):
    transport = "direct"


class TestPlain(S3Contract):
    transport = "plain"
