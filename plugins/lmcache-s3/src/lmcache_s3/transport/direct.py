"""The direct transport: requests signed by botocore's own signer, over connections that copy nothing."""

from __future__ import annotations

import hashlib
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest

from lmcache_s3.errors import Answer, LinkError
from lmcache_s3.settings import S3Settings
from lmcache_s3.transport.account import Account, DirectError
from lmcache_s3.transport.links import Link, Links, StaleError
from lmcache_s3.transport.payloads import Condition, Span, Transport, put_headers
from lmcache_s3.transport.wire import WireError

UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class _Signer(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """botocore's signer, which gets the payload's hash instead of the payload."""

    def payload(self, request: Any) -> str:
        return str(request.context["payload_sha256"])


class DirectTransport(Transport):
    """Sends the caller's memory and receives into it. `DirectError` at construction: use plain."""

    def __init__(self, settings: S3Settings, account: Account) -> None:
        self._settings = settings
        self._account = account
        self._endpoint = account.endpoint()
        self._proxy = account.proxy(self._endpoint)
        self._links = Links(self._endpoint, account.tls() if self._endpoint.tls else None, self._proxy)
        scheme = "https" if self._endpoint.tls else "http"
        self._base = f"{scheme}://{self._endpoint.authority}"
        self._absolute = self._proxy is not None and not self._endpoint.tls
        self._try_the_signer()

    def put(self, name: str, buffers: Sequence[memoryview], condition: Condition, deadline: float) -> Answer:
        headers = put_headers(self._settings, condition)
        headers["Content-Length"] = str(sum(view.nbytes for view in buffers))
        headers["Content-Type"] = "application/octet-stream"
        return self._exchange("PUT", name, headers, buffers, (), deadline)

    def get(self, name: str, buffers: Sequence[memoryview], span: Span | None, deadline: float) -> Answer:
        headers = {"Range": span.header} if span else {}
        return self._exchange("GET", name, headers, (), buffers, deadline)

    def head(self, name: str, deadline: float) -> Answer:
        return self._exchange("HEAD", name, {}, (), (), deadline)

    def close(self) -> None:
        self._links.close()

    # --- one request --------------------------------------------------------------------------------------
    def _exchange(
        self,
        method: str,
        name: str,
        headers: dict[str, str],
        send: Sequence[memoryview],
        into: Sequence[memoryview],
        deadline: float,
    ) -> Answer:
        signed = self._sign(method, name, headers, self._hash(method, send))
        target = self._endpoint.path + quote(name, safe="/~")
        if self._absolute:
            target = self._base + target
            signed.update(self._proxy.headers if self._proxy else {})
        try:
            try:
                return self._once(method, target, signed, send, into, deadline)
            except StaleError:
                self._links.drop_idle()
                return self._once(method, target, signed, send, into, deadline)
        except StaleError as error:
            raise LinkError(f"{self._base} closes its connections") from error
        except (OSError, WireError) as error:
            raise self._translated(error) from error

    def _once(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        send: Sequence[memoryview],
        into: Sequence[memoryview],
        deadline: float,
    ) -> Answer:
        if time.monotonic() >= deadline:
            raise LinkError("not started by its deadline")
        link: Link = self._links.take(deadline, self._settings.connect_timeout_s)
        try:
            return link.exchange(method, target, headers, send, into, deadline)
        finally:
            self._links.give(link)

    def _hash(self, method: str, send: Sequence[memoryview]) -> str:
        if method != "PUT":
            return EMPTY_SHA256
        if not self._settings.sign_payload:
            return UNSIGNED
        digest = hashlib.sha256()
        for view in send:
            digest.update(view)
        return digest.hexdigest()

    def _sign(self, method: str, name: str, headers: dict[str, str], payload_sha256: str) -> dict[str, str]:
        request = AWSRequest(method, self._base + self._endpoint.path + quote(name, safe="/~"), headers)
        request.context["payload_sha256"] = payload_sha256
        signer = _Signer(self._account.credentials(), self._endpoint.service, self._endpoint.region)
        signer.add_auth(request)
        return {"Host": self._endpoint.authority, **dict(request.headers.items())}

    def _try_the_signer(self) -> None:
        """Sign once now: if botocore's internals have changed, plain takes over before the first object moves."""
        try:
            signed = self._sign("PUT", "K", {"If-None-Match": "*"}, UNSIGNED)
        except (AttributeError, KeyError, TypeError) as error:
            raise DirectError(f"botocore's signer has changed ({type(error).__name__}: {error})") from error
        if signed.get("X-Amz-Content-SHA256") != UNSIGNED or "AWS4-HMAC-SHA256" not in signed.get("Authorization", ""):
            raise DirectError("botocore's signer has changed: it does not sign what it is told")

    def _translated(self, error: Exception) -> LinkError:
        where = self._base if self._proxy is None else f"{self._base} through {self._proxy.host}:{self._proxy.port}"
        if isinstance(error, TimeoutError):
            return LinkError(f"{where} did not answer in time")
        if isinstance(error, ssl.SSLCertVerificationError):
            message = f"the certificate of {where} is not trusted ({error.verify_message})"
            return LinkError(message, retryable=False, cure="give its authority as ca_bundle")
        if isinstance(error, ConnectionRefusedError):
            return LinkError(f"nobody listens at {where}", cure="is the service up, and endpoint_url right?")
        if isinstance(error, socket.gaierror):
            return LinkError(
                f"the name of {where} is not known ({error.strerror})", cure="correct endpoint_url or the resolver"
            )
        return LinkError(f"the connection to {where} broke ({type(error).__name__}: {error})")
