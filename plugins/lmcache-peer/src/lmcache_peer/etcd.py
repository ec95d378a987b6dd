"""The nodes of a cluster in etcd, by the JSON interface that every etcd of version 3.4 or later has on its client port.

An entry is a key under a lease of ten seconds, which its node keeps alive. There is no library between: six calls of
HTTP with JSON are less than what the clients on PyPI bring along.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import json
import ssl
import threading
import time
from typing import Any

import msgspec

from lmcache_core.errors import SettingsError, TierError, printable
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.tiers.budget import BudgetTlsSocket, connect, within
from lmcache_peer.directory import Directory, NodeEntry, another_is_registered
from lmcache_peer.limits import DIRECTORY_CALL_S, DIRECTORY_TTL_S, ENTRY_BYTES_MAX, ERROR_SHOWN_CHARS, NODES_MAX
from lmcache_peer.settings import ClusterSettings

_ANSWER_BYTES_MAX = NODES_MAX * ENTRY_BYTES_MAX


class EtcdDirectory(Directory):
    """A key with a lease for each node. Thread-safe; connects when it is first used, and asks the member that answered
    last first."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Raises `SettingsError` for certificates that cannot be read."""
        self._members = [HostPort.parse(each, port_min=1) for each in settings.etcd_nodes]
        self._context = _context(settings)
        self._prefix = f"lmcache-peer/{settings.cluster}/node/".encode()
        self._decoder = msgspec.msgpack.Decoder(NodeEntry)
        self._lock = threading.Lock()
        self._connections: dict[HostPort, http.client.HTTPConnection] = {}
        self._lease: str | None = None
        self._registered: NodeEntry | None = None

    def register(self, entry: NodeEntry) -> None:
        """As with Redis, whoever started last has the name."""
        found = self._range(self._key(entry.node))
        other = found[0] if found else None
        if self._registered == entry and other is not None and other.boot != entry.boot:
            raise another_is_registered(other)
        if self._lease is None or not self._kept_alive(self._lease):
            granted = self._ask("lease/grant", {"TTL": int(DIRECTORY_TTL_S)})
            self._lease, other = str(granted.get("ID")), None
        if other != entry:
            value = _text(msgspec.msgpack.encode(entry))
            self._ask("kv/put", {"key": _text(self._key(entry.node)), "value": value, "lease": self._lease})
        self._registered = entry

    def _kept_alive(self, lease: str) -> bool:
        """Whether it was there to be renewed: an etcd that has lost its data knows nothing of it."""
        answer = self._ask("lease/keepalive", {"ID": lease}).get("result", {})
        return isinstance(answer, dict) and int(answer.get("TTL", 0)) > 0

    def leave(self, entry: NodeEntry) -> None:
        """What another node has put in the place of this entry is under that node's lease, and stays."""
        with contextlib.suppress(TierError):
            if self._lease is not None:
                self._ask("lease/revoke", {"ID": self._lease})
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
        answer = self._ask("kv/range", query | ({"range_end": _text(end)} if end else {}))
        found = []
        rows = answer.get("kvs", [])
        for row in rows if isinstance(rows, list) else []:
            with contextlib.suppress(msgspec.MsgspecError, ValueError, KeyError, TypeError, binascii.Error):
                entry = self._decoder.decode(base64.b64decode(row["value"]))
                if self._key(entry.node) == base64.b64decode(row["key"]):
                    found.append(entry)
        return found

    # --- calls ----------------------------------------------------------------------------------------------
    def _ask(self, what: str, query: dict[str, Any]) -> dict[str, Any]:
        """The first answer that a member gives; each has its part of the time."""
        deadline, body = time.monotonic() + DIRECTORY_CALL_S, json.dumps(query).encode()
        why = "no member was asked"
        with self._lock:
            for number, member in enumerate(list(self._members)):
                share = (deadline - time.monotonic()) / (len(self._members) - number)
                try:
                    with within(time.monotonic() + share, _ANSWER_BYTES_MAX):
                        answer = self._answer(member, what, body, time.monotonic() + share)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    why = f"{member}: {str(error) or type(error).__name__}"
                    self._drop(member)
                else:
                    self._members.remove(member)
                    self._members.insert(0, member)
                    return answer
        raise TierError(f"the directory does not answer: {printable(why[:ERROR_SHOWN_CHARS])}")

    def _answer(self, member: HostPort, what: str, body: bytes, deadline: float) -> dict[str, Any]:
        status, content = self._exchange(member, what, body, deadline)
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError(f"{what} was answered with {type(answer).__name__}")
        if status != http.client.OK and what != "lease/revoke":  # there may be nothing left to revoke
            raise OSError(f"{what} was answered with status {status}: {answer.get('error', '')}")
        return answer

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


_MAY_BE_GONE = frozenset(
    {"lease/keepalive", "lease/revoke"}
)  # a lease that is not there: no answer to lose a member by


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


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
