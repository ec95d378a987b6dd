"""boto3's connections, limited to the budget of their call, and to one answer for each request. boto3 bounds each wait,
and its time-outs are fixed when a client is made: a service that sends one byte a second is never late. And its reader
treats the first answer above 100 as final, even an interim one.
"""

from __future__ import annotations

import http.client
import logging
import socket
import time
from typing import Any

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from lmcache_core.tiers import budget
from lmcache_s3.transport.wire import HEAD_BYTES_MAX, INTERIM_MAX

_log = logging.getLogger(__name__)
_CONNECT_MAX_S = 60.0  # if boto3 has no limit


class _Response(http.client.HTTPResponse):
    """Reads on until the final answer."""

    def _read_status(self) -> Any:
        for _ in range(INTERIM_MAX):
            found = super()._read_status()  # type: ignore[misc]  # private, and only so can answers be skipped
            if not 101 < found[1] < 200:
                return found
            nbytes = 0
            while (line := self.fp.readline(HEAD_BYTES_MAX)) not in (b"\r\n", b"\n", b""):
                nbytes += len(line)
                if nbytes > HEAD_BYTES_MAX:
                    raise http.client.HTTPException("the head of an interim answer is too long")
        raise http.client.HTTPException(f"{INTERIM_MAX} interim answers came, and no final one")


class _Budgeted:
    """A mixin for connections of urllib3."""

    response_class = _Response

    def _new_conn(self) -> socket.socket:
        me: Any = self
        limit_s = me.timeout if isinstance(me.timeout, int | float) else _CONNECT_MAX_S
        try:
            deadline = time.monotonic() + min(limit_s, budget.left_s())
            sock = budget.connect(me._dns_host.strip("[]"), me.port, deadline)
        except socket.gaierror as error:
            raise NameResolutionError(me.host, me, error) from error
        except TimeoutError as error:
            raise ConnectTimeoutError(me, f"no connection to {me.host} in time") from error
        except OSError as error:
            raise NewConnectionError(me, f"no connection to {me.host}: {error}") from error
        sock.settimeout(limit_s)
        return sock


class _HttpConnection(_Budgeted, AWSHTTPConnection):  # type: ignore[misc]  # botocore has no types
    pass


class _HttpsConnection(_Budgeted, AWSHTTPSConnection):  # type: ignore[misc]
    def connect(self) -> None:
        if self.ssl_context is not None:
            self.ssl_context.sslsocket_class = budget.BudgetTlsSocket
        super().connect()


class _HttpPool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _HttpConnection


class _HttpsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _HttpsConnection


def keep_to_budget(client: Any) -> bool:
    """Make a client use connections of this module. False: botocore's internals have changed, and it keeps its own
    time-outs for each wait."""
    try:
        pools = client._endpoint.http_session._pool_classes_by_scheme
        pools.update(http=_HttpPool, https=_HttpsPool)
    except AttributeError as error:
        _log.warning("botocore has changed inside (%s): a slow service can hold its calls past their deadlines", error)
        return False
    return True
