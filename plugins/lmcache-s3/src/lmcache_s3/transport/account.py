"""boto3's side of a tier: credentials, endpoint, TLS, proxies, and its clients for control calls."""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.utils import get_environ_proxies

from lmcache_core.tiers import budget
from lmcache_s3.errors import LinkError
from lmcache_s3.settings import S3Settings
from lmcache_s3.transport.budgeted import keep_to_budget

FORGET_AGAIN_S = 2.0  # wrong credentials are read again, but not for every refused request
TIMEOUT_MAX_S = 64.0
_TALKATIVE = ("boto3", "botocore", "s3transfer", "urllib3")
T = TypeVar("T")


class DirectError(Exception):
    """Direct requests are impossible here; the message says why. Plain ones may work."""


class Proxy(NamedTuple):
    host: str
    port: int
    headers: dict[str, str]


class Endpoint(NamedTuple):
    """Where requests go, as boto3 resolved it."""

    tls: bool
    host: str
    port: int
    path: str  # the path before an object's name, quoted, with a slash at its end
    region: str
    service: str
    authority: str  # for the Host header: without the scheme's default port

    @property
    def bracketed(self) -> str:
        """The host in the form used before a port."""
        return _bracketed(self.host)


class Account:
    """One boto3 session and its clients. Made when first needed, and again after `forget`. Thread-safe. A client's
    time-outs are fixed when it is made, so there is one for each power of two of seconds; the budget of the calling
    thread enforces each call's own deadline (`budgeted`).
    """

    def __init__(self, settings: S3Settings, connections: int) -> None:
        keep_secrets_out_of_logs()
        self._settings = settings
        self._connections = connections
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[int, Any] = {}
        self._endpoint: Endpoint | None = None
        self._forgotten_at = float("-inf")

    def client(self, deadline: float) -> Any:
        """A client whose time-outs fit the deadline. Raises `LinkError` if there are no credentials."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LinkError("not started by its deadline")
        step = math.ceil(math.log2(min(max(left_s, 0.5), TIMEOUT_MAX_S)))
        with budget.locked(self._lock):
            if step not in self._clients:
                self._clients[step] = translated(lambda: self._make_client(2.0**step))
            return self._clients[step]

    def credentials(self) -> Any:
        """Frozen credentials, refreshed by botocore when they are about to expire."""
        with budget.locked(self._lock):
            session = translated(self._open)
            found = translated(session.get_credentials)
        if found is None:
            raise LinkError(NO_CREDENTIALS, retryable=False, cure=CREDENTIALS_CURE)
        return translated(found.get_frozen_credentials)

    def endpoint(self) -> Endpoint:
        """Raises `DirectError` if the service needs something that only boto3 can do."""
        known = self._endpoint
        if known is not None:
            return known
        client = self.client(time.monotonic() + TIMEOUT_MAX_S)
        # What boto3 would request, from its public API: host, path and the scope of the signature.
        arguments = {"Bucket": self._settings.bucket, "Key": "K"}
        url = translated(lambda: client.generate_presigned_url("get_object", Params=arguments, ExpiresIn=60))
        self._endpoint = endpoint_of(url)
        return self._endpoint

    def tls(self) -> ssl.SSLContext:
        """botocore's choice of certificates: the setting, AWS_CA_BUNDLE or the profile's, then its own."""
        if not self._settings.verify_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        with budget.locked(self._lock):
            bundle = self._settings.ca_bundle or translated(self._open)._session.get_config_variable("ca_bundle")
        if bundle is None:
            from botocore.httpsession import get_cert_path

            bundle = get_cert_path(True)
        try:
            return ssl.create_default_context(cafile=str(bundle))
        except (OSError, ssl.SSLError) as error:
            raise LinkError(
                f"the certificates in {bundle} cannot be read ({error})", False, cure="correct ca_bundle"
            ) from error

    def proxy(self, endpoint: Endpoint) -> Proxy | None:
        scheme = "https" if endpoint.tls else "http"
        url = self._proxy_url or get_environ_proxies(f"{scheme}://{endpoint.authority}/").get(scheme)
        if not url:
            return None
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http":
            raise DirectError(f"a proxy of scheme {parts.scheme!r} is supported only by boto3's own calls")
        headers = {}
        if parts.username is not None:
            from urllib3.util import make_headers

            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers = make_headers(proxy_basic_auth=login)
            headers = {"Proxy-Authorization": headers["proxy-authorization"]}
        return Proxy(parts.hostname or "", parts.port or 80, headers)

    def forget(self) -> bool:
        """Read credentials again for the next request: files may have changed. False: that was done just now."""
        with self._lock:
            now = time.monotonic()
            if now - self._forgotten_at < FORGET_AGAIN_S:
                return False
            self._forgotten_at = now
        self.close()  # a request in progress keeps its connection until it ends
        return True

    def close(self) -> None:
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
            self._session = None
        for client in clients:
            client.close()

    # --- under the lock -----------------------------------------------------------------------------------
    @property
    def _proxy_url(self) -> str | None:
        return self._settings.proxy.get_secret_value() if self._settings.proxy else None

    def _open(self) -> Any:
        if self._session is None:
            key, secret, token = (
                credential.get_secret_value() if credential else None
                for credential in (
                    self._settings.access_key_id,
                    self._settings.secret_access_key,
                    self._settings.session_token,
                )
            )
            self._session = boto3.Session(
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                aws_session_token=token,
                region_name=self._settings.region,
                profile_name=self._settings.profile,
            )
        return self._session

    def _make_client(self, timeout_s: float) -> Any:
        settings = self._settings
        proxies = {"http": self._proxy_url, "https": self._proxy_url} if self._proxy_url else None
        config = Config(
            connect_timeout=min(timeout_s, settings.connect_timeout_s),
            read_timeout=timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=self._connections,
            proxies=proxies,
            s3={"addressing_style": settings.addressing_style, "payload_signing_enabled": settings.sign_payload},
            # Objects carry a checksum of their own, and many S3-compatible stores do not know these.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **({} if settings.is_directory_bucket else {"signature_version": "s3v4"}),
        )
        verify: object = None if settings.verify_tls else False
        if settings.verify_tls and settings.ca_bundle:
            verify = str(settings.ca_bundle)
        client = self._open().client("s3", endpoint_url=settings.endpoint_url, verify=verify, config=config)
        keep_to_budget(client)
        return client


NO_CREDENTIALS = "no credentials were found"
CREDENTIALS_CURE = (
    "set access_key_id and secret_access_key, a profile, AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or give this machine a role"
)


def translated(call: Callable[[], T]) -> T:
    """The call's result; boto3's exceptions become a `LinkError`."""
    try:
        return call()
    except BotoCoreError as error:
        raise link_error(error) from error
    except ValueError as error:  # for an endpoint that is not a URL, or an unreadable profile
        raise LinkError(f"boto3 rejects the settings: {error}", retryable=False) from error


def link_error(error: BotoCoreError) -> LinkError:
    """boto3's exception as ours."""
    from botocore import exceptions

    if isinstance(error, exceptions.NoCredentialsError):
        return LinkError(NO_CREDENTIALS, retryable=False, cure=CREDENTIALS_CURE)
    if isinstance(error, exceptions.SSLError):
        return LinkError(str(error), retryable=False, cure="give the service's certificates as ca_bundle")
    # Failed connections, and missing credentials from an endpoint, may work later.
    passing = (
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        exceptions.CredentialRetrievalError,
        exceptions.MetadataRetrievalError,
    )
    return LinkError(f"{type(error).__name__}: {error}", retryable=isinstance(error, passing))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def endpoint_of(url: str) -> Endpoint:
    """The endpoint behind a presigned URL for the object K. Raises `DirectError` for one we cannot sign for."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    scope = query.get("X-Amz-Credential", [""])[0].rsplit("/", 4)
    ours = query.get("X-Amz-Algorithm") == ["AWS4-HMAC-SHA256"] and "X-Amz-S3session-Token" not in query
    if not ours or len(scope) != 5 or not parts.path.endswith("/K") or parts.hostname is None:
        raise DirectError("the service asks for another signature than AWS4-HMAC-SHA256")
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    host = _bracketed(parts.hostname)
    authority = host if port == (443 if tls else 80) else f"{host}:{port}"
    return Endpoint(tls, parts.hostname, port, parts.path[:-1], scope[2], scope[3], authority)


def keep_secrets_out_of_logs() -> None:
    """Below WARNING these libraries log whole requests: session tokens, presigned URLs, the headers for a proxy. So
    they stay at WARNING, whatever the log level of the rest."""
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
