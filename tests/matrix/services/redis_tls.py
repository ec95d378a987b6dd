"""One Redis server with TLS only, and an ACL user with just the rights that the adapter needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import redis

from services.certificates import Certificates
from services.redis_standalone import RedisDaemon, RedisStandalone
from services.service import free_port

USER = "cache"
PASSWORD = "correct horse/battery@staple"  # with what a URL has to quote
RIGHTS = (
    "~lmcache:* resetchannels -@all +get +getrange +set +touch +unlink +strlen +scan +object|idletime +dbsize +info "
    "+ping +hello +select"
)


class RedisTls(RedisStandalone):
    """TLS and an ACL user; the default user keeps its rights, for the tests' second door."""

    name = "redis-tls"

    def start(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "tls")
        port = free_port()
        self.server = RedisDaemon(
            folder,
            *("--port", "0", "--tls-port", str(port), "--tls-cert-file", str(self.certificates.cert)),
            *("--tls-key-file", str(self.certificates.key), "--tls-ca-cert-file", str(self.certificates.ca)),
            *("--tls-auth-clients", "no"),
            port=port,
            tls={"ssl": True, "ssl_ca_certs": str(self.certificates.ca)},
        )
        self.server.start()
        self._make_user()

    def restart(self) -> None:
        super().restart()
        self._make_user()

    def adapter_settings(self) -> dict[str, object]:
        if self.endpoint is not None:
            return {"url": self.endpoint}
        more = {"tls": True, "tls_ca": self.certificates.ca, "username": USER, "password": PASSWORD}
        return {**super().adapter_settings(), **more}

    def secrets(self) -> Sequence[str]:
        return [PASSWORD, quote(PASSWORD, safe="")] if self.endpoint is None else super().secrets()

    def _make_user(self) -> None:
        with self.door() as door:
            assert isinstance(door, redis.Redis)
            door.execute_command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", *RIGHTS.split())
