"""The nodes of a cluster in etcd, by the JSON interface that every etcd of version 3.4 or later has on its client port.

An entry is a key under a lease of ten seconds, which its node keeps alive. There is no library between: six calls of
HTTP with JSON are less than what the clients on PyPI bring along.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import threading
import time
from typing import Any, TypeVar

import msgspec

from lmcache_core.errors import SettingsError, TierError, printable
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.tiers.budget import BudgetTlsSocket, connect, within
from lmcache_peer.directory import Directory, NodeEntry, another_is_registered, entry_of
from lmcache_peer.limits import DIRECTORY_CALL_S, DIRECTORY_TTL_S, ENTRY_BYTES_MAX, ERROR_SHOWN_CHARS, NODES_MAX
from lmcache_peer.settings import ClusterSettings

_ANSWER_BYTES_MAX = NODES_MAX * ENTRY_BYTES_MAX


# --- answers: bytes are base64 in them, and whole numbers may be text; what is 0 or empty is left out -----------
class _Nothing(msgspec.Struct):
    """That it was done."""


class _Row(msgspec.Struct):
    key: bytes
    value: bytes = b""


class _Rows(msgspec.Struct):
    kvs: list[_Row] = []


class _Lease(msgspec.Struct):
    id: int = msgspec.field(name="ID")


class _TimeLeft(msgspec.Struct):
    ttl_s: int = msgspec.field(name="TTL", default=0)


class _KeptAlive(msgspec.Struct):
    result: _TimeLeft = msgspec.field(default_factory=_TimeLeft)


class _Refusal(msgspec.Struct):
    error: str


A = TypeVar("A")


class EtcdDirectory(Directory):
    """A key with a lease for each node. Thread-safe; connects when it is first used, and asks the member that answered
    last first."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Raises `SettingsError` for certificates that cannot be read."""
        self._members = [HostPort.parse(each, port_min=1) for each in settings.etcd_nodes]
        self._context = _context(settings)
        self._prefix = f"lmcache-peer/{settings.cluster}/node/".encode()
        self._lock = threading.Lock()
        self._connections: dict[HostPort, http.client.HTTPConnection] = {}
        self._lease: int | None = None
        self._registered: NodeEntry | None = None

    def register(self, entry: NodeEntry) -> None:
        """As with Redis, whoever started last has the name."""
        found = self._range(self._key(entry.node))
        other = found[0] if found else None
        if self._registered == entry and other is not None and other.boot != entry.boot:
            raise another_is_registered(other)
        if self._lease is None or not self._kept_alive(self._lease):
            self._lease, other = self._ask("lease/grant", {"TTL": int(DIRECTORY_TTL_S)}, _Lease).id, None
        if other != entry:
            value = _text(msgspec.msgpack.encode(entry))
            query = {"key": _text(self._key(entry.node)), "value": value, "lease": str(self._lease)}
            self._ask("kv/put", query, _Nothing)
        self._registered = entry

    def _kept_alive(self, lease: int) -> bool:
        """Whether it was there to be renewed: an etcd that has lost its data knows nothing of it."""
        return self._ask("lease/keepalive", {"ID": str(lease)}, _KeptAlive).result.ttl_s > 0

    def leave(self, entry: NodeEntry) -> None:
        """What another node has put in the place of this entry is under that node's lease, and stays."""
        with contextlib.suppress(TierError):
            if self._lease is not None:
                self._ask("lease/revoke", {"ID": str(self._lease)}, _Nothing)
        self._lease = self._registered = None

    def entries(self) -> list[NodeEntry]:
        return self._range(self._prefix, self._prefix[:-1] + bytes([self._prefix[-1] + 1]))

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    # --- keys -----------------------------------------------------------------------------------------------
    def _key(self, node: str) -> bytes:
        return self._prefix + node.encode()

    def _range(self, key: bytes, end: bytes = b"") -> list[NodeEntry]:
        """What is no entry, or stands under another's name, is skipped."""
        query: dict[str, Any] = {"key": _text(key), "limit": NODES_MAX}
        rows = self._ask("kv/range", query | ({"range_end": _text(end)} if end else {}), _Rows).kvs
        found = [(row.key, entry_of(row.value)) for row in rows]
        return [entry for key, entry in found if entry is not None and self._key(entry.node) == key]

    # --- calls ----------------------------------------------------------------------------------------------
    def _ask(self, what: str, query: dict[str, Any], kind: type[A]) -> A:
        """The first answer that a member gives; each has its part of the time. Raises `TierError`."""
        deadline, body = time.monotonic() + DIRECTORY_CALL_S, json.dumps(query).encode()
        why = "no member was asked"
        with self._lock:
            for number, member in enumerate(list(self._members)):
                share = (deadline - time.monotonic()) / (len(self._members) - number)
                try:
                    with within(time.monotonic() + share, _ANSWER_BYTES_MAX):
                        answer = self._answer(member, what, body, kind, time.monotonic() + share)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    why = f"{member}: {str(error) or type(error).__name__}"
                    self._drop(member)
                else:
                    self._members.remove(member)
                    self._members.insert(0, member)
                    return answer
        raise TierError(f"the directory does not answer: {printable(why[:ERROR_SHOWN_CHARS])}")

    def _answer(self, member: HostPort, what: str, body: bytes, kind: type[A], deadline: float) -> A:
        status, content = self._exchange(member, what, body, deadline)
        if status != http.client.OK and what != "lease/revoke":  # there may be nothing left to revoke
            raise OSError(f"{what} was answered with status {status}: {_refusal(content)}")
        return _decoded(content, kind)

    def _exchange(self, member: HostPort, what: str, body: bytes, deadline: float) -> tuple[int, bytes]:
        """A connection that was idle may have ended long ago: then once more, over a new one."""
        while True:
            connection = self._connections.get(member)
            fresh = connection is None
            if connection is None:
                connection = self._connections[member] = _Connection(member, self._context, deadline)
            try:
                connection.request("POST", f"/v3/{what}", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                content = response.readline() if what == "lease/keepalive" else response.read()
                if what == "lease/keepalive":  # a stream of answers, of which there is one
                    self._drop(member)
                return response.status, content
            except (ConnectionError, http.client.BadStatusLine):
                self._drop(member)
                if fresh:
                    raise

    def _drop(self, member: HostPort) -> None:
        if (connection := self._connections.pop(member, None)) is not None:
            connection.close()


class _Connection(http.client.HTTPConnection):
    """Its waits stay within the calling thread's budget, the connecting within `deadline`."""

    def __init__(self, member: HostPort, context: ssl.SSLContext | None, deadline: float) -> None:
        super().__init__(member.host, member.port)
        self._member, self._context, self._deadline = member, context, deadline

    def connect(self) -> None:
        sock = connect(self._member.host, self._member.port, self._deadline)
        if self._context is None:
            self.sock = sock
            return
        try:
            self.sock = self._context.wrap_socket(sock, server_hostname=self._member.host)
        except BaseException:
            sock.close()
            raise


def _context(settings: ClusterSettings) -> ssl.SSLContext | None:
    if settings.etcd_ca_file is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(settings.etcd_ca_file))
        if settings.etcd_cert_file is not None:
            context.load_cert_chain(str(settings.etcd_cert_file), settings.etcd_key_file)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsError(f"etcd_ca_file, etcd_cert_file, etcd_key_file: {error.strerror or error}") from error
    context.sslsocket_class = BudgetTlsSocket
    return context


def _decoded(content: bytes, kind: type[A]) -> A:
    """Raises `ValueError`."""
    try:
        return msgspec.json.decode(content, type=kind, strict=False)
    except RecursionError:
        raise ValueError("an answer is nested too deeply") from None


def _refusal(content: bytes) -> str:
    """Why. What is not etcd's is shown as it is."""
    with contextlib.suppress(ValueError):
        return _decoded(content, _Refusal).error
    return content.decode(errors="replace")


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
