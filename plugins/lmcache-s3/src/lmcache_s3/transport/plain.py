"""The plain transport: boto3's own calls. It copies, and works wherever boto3 does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from lmcache_s3.errors import Answer, LinkError
from lmcache_s3.settings import S3Settings
from lmcache_s3.transport.account import Account, link_error, translated
from lmcache_s3.transport.payloads import Condition, Span, Transport

_READ_BYTES = 1 << 20


class PlainTransport(Transport):
    """`put_object` and `get_object`."""

    def __init__(self, settings: S3Settings, account: Account) -> None:
        self._settings = settings
        self._account = account

    def put(self, name: str, buffers: Sequence[memoryview], condition: Condition, deadline: float) -> Answer:
        arguments: dict[str, Any] = {"Body": b"".join(buffers), "ContentType": "application/octet-stream"}
        if condition.kind:
            arguments["Metadata"] = {"lmcache-kind": condition.kind}
        if condition.if_absent:
            arguments["IfNoneMatch"] = "*"
        settings = self._settings
        if settings.server_side_encryption:
            arguments["ServerSideEncryption"] = settings.server_side_encryption
        if settings.kms_key_id:
            arguments["SSEKMSKeyId"] = settings.kms_key_id
        if settings.storage_class:
            arguments["StorageClass"] = settings.storage_class
        return called(lambda: self._account.client(deadline).put_object(**self._place(name), **arguments))[1]

    def get(self, name: str, buffers: Sequence[memoryview], span: Span | None, deadline: float) -> Answer:
        arguments = {"Range": span.header} if span else {}
        result, answer = called(lambda: self._account.client(deadline).get_object(**self._place(name), **arguments))
        if result is None:
            return answer
        body, declared = result["Body"], result.get("ContentLength")
        length = None if declared is None else int(declared)  # a service may send a body up to its end
        try:
            if length is not None and length > sum(view.nbytes for view in buffers):
                return answer._replace(nbytes=length)
            return answer._replace(nbytes=translated(lambda: _read(body, length, buffers, deadline)))
        finally:
            body.close()

    def head(self, name: str, deadline: float) -> Answer:
        return called(lambda: self._account.client(deadline).head_object(**self._place(name)))[1]

    def close(self) -> None:
        """Nothing to close: the account owns the clients."""

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self._settings.bucket, "Key": name}


def _read(body: Any, length: int | None, buffers: Sequence[memoryview], deadline: float) -> int:
    """The bytes of the body, and one more if it is longer than the buffers."""
    got = 0
    for view in buffers:
        at = 0
        while at < view.nbytes and got != length:
            if time.monotonic() >= deadline:
                raise LinkError(f"{got:,} of {length or 'unknown'} bytes came in time")
            piece = body.read(min(_READ_BYTES, view.nbytes - at))
            if not piece:
                if length is None:
                    return got
                raise LinkError(f"the connection ended after {got:,} of {length:,} bytes")
            view[at : at + len(piece)] = piece
            at += len(piece)
            got += len(piece)
    return got if length is not None else got + len(body.read(1))


def called(call: Callable[[], Any]) -> tuple[Any, Answer]:
    """The result of a boto3 call (None if it was refused) and the service's answer."""
    try:
        result = call()
    except ClientError as error:
        about = error.response.get("ResponseMetadata", {})
        details = error.response.get("Error", {})
        headers = {name.lower(): value for name, value in about.get("HTTPHeaders", {}).items()}
        status, code = int(about.get("HTTPStatusCode", 0)), str(details.get("Code", ""))
        if code == str(status) or code.isdigit():
            code = ""  # botocore's text for an answer without a body
        return None, Answer(status, headers, 0, code, str(details.get("Message", "")))
    except BotoCoreError as error:
        raise link_error(error) from error
    except (HTTPError, OSError) as error:  # of urllib3, while the body of a refusal is read
        raise LinkError(f"{type(error).__name__}: {error}") from error
    except LinkError:
        raise
    except Exception as error:  # boto3 meets an answer that it does not expect
        raise LinkError(f"boto3 cannot read the answer ({type(error).__name__}: {error})") from error
    about = result["ResponseMetadata"]
    headers = {name.lower(): value for name, value in about["HTTPHeaders"].items()}
    return result, Answer(int(about["HTTPStatusCode"]), headers)
