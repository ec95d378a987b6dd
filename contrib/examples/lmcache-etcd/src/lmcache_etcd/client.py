"""etcd's key-value API over its JSON gateway, as far as a tier needs it. Each call keeps its deadline."""

from __future__ import annotations

import base64
import http.client
import json
import threading
from typing import Any

from lmcache_core.tiers import budget

_ANSWER_BYTES_MAX = 128 << 20
OUT_OF_SPACE, COMPACTED = 8, 11  # gRPC's RESOURCE_EXHAUSTED and OUT_OF_RANGE


class EtcdError(Exception):
    """It cannot be reached, does not answer, or refuses the call (`code`: of gRPC; None for the others)."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class Etcd:
    """Calls from any thread, each over a connection of its own while it lasts."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def call(self, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """What etcd answers to a POST. Raises `EtcdError`."""
        content = json.dumps(body).encode()
        with budget.within(deadline):
            connection = None
            try:
                connection = self._taken(deadline)
                connection.request("POST", f"/v3/{path}", content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read(_ANSWER_BYTES_MAX)
                answer = json.loads(text)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                self._drop_idle()  # they lead to the same server
                if not isinstance(error, (OSError, ValueError, http.client.HTTPException)):
                    raise
                raise EtcdError(f"{self._host}:{self._port}: {error or type(error).__name__}") from error
        self._give_back(connection)
        if not isinstance(answer, dict):
            raise EtcdError(f"it answered {text[:60]!r} to {path}")
        if response.status != http.client.OK:
            code = answer.get("code")
            raise EtcdError(str(answer.get("error", response.status)), code if isinstance(code, int) else None)
        return answer

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def _taken(self, deadline: float) -> http.client.HTTPConnection:
        budget.left_s()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.sock = budget.connect(self._host, self._port, deadline)
        return connection

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def text(raw: bytes | memoryview) -> str:
    """Bytes as the gateway takes them."""
    return base64.b64encode(raw).decode()


def raw(value: str) -> bytes:
    """Bytes as the gateway gives them."""
    return base64.b64decode(value)
