"""The common interface of the two transports for payloads; both give the same answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from lmcache_s3.errors import Answer
from lmcache_s3.settings import S3Settings

KIND_HEADER = "x-amz-meta-lmcache-kind"


class Condition(NamedTuple):
    """`kind`: what the object is, kept beside it (empty: not given). `if_absent`: store only if nothing is there."""

    kind: str = ""
    if_absent: bool = False


class Span(NamedTuple):
    """Bytes `start` to before `stop` of an object."""

    start: int
    stop: int

    @property
    def header(self) -> str:
        return f"bytes={self.start}-{self.stop - 1}"


class Transport(ABC):
    """Moves payloads. Raises `LinkError` if no answer came; every answer is a value. Thread-safe. Buffers are not kept,
    and buffers that are sent are not written to.
    """

    @abstractmethod
    def put(self, name: str, buffers: Sequence[memoryview], condition: Condition, deadline: float) -> Answer: ...

    @abstractmethod
    def get(self, name: str, buffers: Sequence[memoryview], span: Span | None, deadline: float) -> Answer:
        """Fill the buffers. `nbytes` above their sum: the object is larger, and was not read."""

    @abstractmethod
    def head(self, name: str, deadline: float) -> Answer: ...

    @abstractmethod
    def close(self) -> None: ...


def put_headers(settings: S3Settings, condition: Condition) -> dict[str, str]:
    headers = {
        KIND_HEADER: condition.kind,
        "If-None-Match": "*" if condition.if_absent else "",
        "x-amz-server-side-encryption": settings.server_side_encryption or "",
        "x-amz-server-side-encryption-aws-kms-key-id": settings.kms_key_id or "",
        "x-amz-storage-class": settings.storage_class or "",
    }
    return {name: value for name, value in headers.items() if value}
