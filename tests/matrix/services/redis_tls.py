"""One Redis server with TLS only, and an ACL user with just the rights that the adapter needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import redis

from services.redis_standalone import RedisDaemon, RedisStandalone
from services.service import find_binary, free_port

USER = "cache"
PASSWORD = "correct horse/battery@staple"  # with what a URL has to quote
RIGHTS = (
    "~lmcache:* resetchannels -@all +get +set +touch +unlink +strlen +scan +object|idletime +dbsize +info +ping "
    "+hello +select"
)


class Certificates:
    """A CA, a server certificate for 127.0.0.1 that it signed, and another CA that did not."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
        self.other_ca = folder / "other-ca.pem"
        for ca, key in ((self.ca, folder / "ca.key"), (self.other_ca, folder / "other.key")):
            openssl(
                *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
                *("-subj", f"/CN={ca.stem}", "-addext", "keyUsage=critical,keyCertSign", "-keyout", key, "-out", ca),
            )
        request, names = folder / "server.csr", folder / "names.ext"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=server"),
            *("-keyout", self.key, "-out", request),
        )
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", folder / "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", names, "-out", self.cert),
        )

    def server_options(self, port: int) -> list[str]:
        return [
            *("--port", "0", "--tls-port", str(port), "--tls-cert-file", str(self.cert)),
            *("--tls-key-file", str(self.key), "--tls-ca-cert-file", str(self.ca), "--tls-auth-clients", "no"),
        ]


def openssl(*words: str | Path) -> None:
    program = find_binary("openssl", "Debian: apt-get install openssl")
    subprocess.run([program, *map(str, words)], check=True, capture_output=True)


class RedisTls(RedisStandalone):
    """TLS and an ACL user; the default user keeps its rights, for the tests' second door."""

    name = "redis-tls"

    def start(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "tls")
        port = free_port()
        self.server = RedisDaemon(
            folder,
            *self.certificates.server_options(port),
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

    def secrets(self) -> list[str]:
        return [PASSWORD]

    def _make_user(self) -> None:
        with self.door() as door:
            assert isinstance(door, redis.Redis)
            door.execute_command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", *RIGHTS.split())
