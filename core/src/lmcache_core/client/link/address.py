"""What a client needs to find and to trust a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lmcache_core.errors import UsageError

__all__ = ["CurveKeys"]


class Secret:
    """Bytes that never show in a repr, a log or an error."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def get(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"


@dataclass(frozen=True)
class CurveKeys:
    """CURVE keys of a client, Z85-encoded as pyzmq makes them, and the server's public key."""

    server_public: bytes
    public: bytes
    secret: Secret = field(repr=False)

    @classmethod
    def from_files(cls, server_public: Path, client_secret: Path) -> CurveKeys:
        """Read key files as `zmq.auth.create_certificates` writes them. Raises `UsageError`."""
        from zmq.auth import load_certificate

        try:
            server, _ = load_certificate(server_public)
            public, secret = load_certificate(client_secret)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read CURVE keys: {error}; make them with zmq.auth.create_certificates") from error
        if secret is None:
            raise UsageError(f"{client_secret} has no secret key: use the file that ends in .key_secret")
        return cls(server, public, Secret(secret))
