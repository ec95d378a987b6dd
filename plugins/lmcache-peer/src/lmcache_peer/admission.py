"""Who may ask and who may answer: TLS with certificates of the cluster's own authority, or a secret that both ends
prove to know without sending it."""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lmcache_core.errors import SettingsError, printable
from lmcache_core.tiers.budget import connect
from lmcache_core.tiers.streams import left_s
from lmcache_peer.channel import Channel
from lmcache_peer.errors import PeerError
from lmcache_peer.limits import NONCE_BYTES
from lmcache_peer.messages import VERSION, Challenge, Hello, Refused, Welcome

if TYPE_CHECKING:
    from lmcache_core.protocol.hostport import HostPort
    from lmcache_peer.settings import ClusterSettings

_SECRET_BYTES_MIN = 16
_greeting: msgspec.msgpack.Decoder[Challenge | Refused] = msgspec.msgpack.Decoder(Challenge | Refused)
_answer: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


class Admission:
    """What one node shows to others, and wants to see. Raises `SettingsError` for files that cannot be used."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._cluster = settings.cluster
        self._secret = b"" if settings.secret_file is None else _secret_in(settings.secret_file)
        self._server_side = self._client_side = None
        self.encrypted = settings.tls_cert_file is not None
        if self.encrypted:
            self._server_side = _context(settings, ssl.PROTOCOL_TLS_SERVER)
            self._client_side = _context(settings, ssl.PROTOCOL_TLS_CLIENT)

    def call(self, node: str, at: HostPort, deadline: float) -> tuple[Channel, Challenge]:
        """Connect to a peer as `node`. Raises `OSError`, `PeerError` and `LyingPeerError`."""
        sock: socket.socket = connect(at.host, at.port, deadline)
        try:
            if self._client_side is not None:
                sock.settimeout(left_s(deadline))
                sock = self._client_side.wrap_socket(sock)
            channel = Channel(sock)
            return channel, self._introduce(channel, node, deadline)
        except BaseException:
            sock.close()
            raise

    def _introduce(self, channel: Channel, node: str, deadline: float) -> Challenge:
        greeting = channel.receive(_greeting, deadline)
        if isinstance(greeting, Refused):
            raise PeerError(f"it refuses us: {printable(greeting.why)}")
        if greeting.version != VERSION:
            raise PeerError(f"it speaks version {greeting.version} of the protocol, and this node {VERSION}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel.send(Hello(VERSION, node, nonce, self._proof(b"reader", greeting, node, nonce)), deadline)
        answer = channel.receive(_answer, deadline)
        if isinstance(answer, Refused):
            raise PeerError(f"it refuses us: {printable(answer.why)}")
        if not hmac.compare_digest(answer.proof, self._proof(b"owner", greeting, node, nonce)):
            raise PeerError("it does not know the secret of this cluster")
        return greeting

    def answer(self, sock: socket.socket, node: str, boot: int, deadline: float) -> tuple[Channel, str]:
        """Admit whoever has connected; returns the channel, and the other node's name. Raises the same."""
        try:
            if self._server_side is not None:
                sock.settimeout(left_s(deadline))
                sock = self._server_side.wrap_socket(sock, server_side=True)
            channel = Channel(sock)
            return channel, self._examine(channel, node, boot, deadline)
        except BaseException:
            sock.close()
            raise

    def _examine(self, channel: Channel, node: str, boot: int, deadline: float) -> str:
        challenge = Challenge(VERSION, node, boot, secrets.token_bytes(NONCE_BYTES))
        channel.send(challenge, deadline)
        hello = channel.receive(_hello, deadline)
        if hello.version != VERSION:
            why = f"this node speaks version {VERSION} of the protocol"
        elif not hmac.compare_digest(hello.proof, self._proof(b"reader", challenge, hello.node, hello.nonce)):
            why = f"no proof of the secret of cluster {self._cluster!r}: secret_file must be the same on all nodes"
        else:
            channel.send(Welcome(self._proof(b"owner", challenge, hello.node, hello.nonce)), deadline)
            return hello.node
        channel.send(Refused(why), deadline)
        raise PeerError(why)

    def _proof(self, role: bytes, challenge: Challenge, reader: str, nonce: bytes) -> bytes:
        if not self._secret:
            return b""
        parts = (role, self._cluster.encode(), challenge.node.encode(), challenge.boot.to_bytes(8, "little"),
                 challenge.nonce, reader.encode(), nonce)  # fmt: skip
        whole = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, whole, "sha256")


def _secret_in(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"cannot read secret_file {path}: {error.strerror}") from error
    if mode & 0o007:
        raise SettingsError(f"secret_file {path} is open to every user of this machine", cure=f"chmod 600 {path}")
    if len(secret) < _SECRET_BYTES_MIN:
        raise SettingsError(
            f"secret_file {path} has {len(secret)} bytes, and a secret takes {_SECRET_BYTES_MIN}",
            cure="write one with `openssl rand -hex 32`, the same on all nodes",
        )
    return secret


def _context(settings: ClusterSettings, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The authority is the cluster's own: whoever has a certificate of it is a node, under whatever address.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(settings.tls_ca_file)
        context.load_cert_chain(str(settings.tls_cert_file), settings.tls_key_file)
    except OSError as error:  # ssl.SSLError is one
        files = f"{settings.tls_ca_file}, {settings.tls_cert_file} and {settings.tls_key_file}"
        raise SettingsError(f"TLS cannot use {files}: {error.strerror or error}") from error
    return context


def by(seconds: float) -> float:
    """The deadline so many seconds from now."""
    return time.monotonic() + seconds
