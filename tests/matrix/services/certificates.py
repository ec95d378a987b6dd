"""Certificates for services that speak TLS: made by openssl, for two days."""

from __future__ import annotations

import subprocess
from pathlib import Path

from services.service import find_binary


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


def openssl(*words: str | Path) -> None:
    program = find_binary("openssl", "Debian: apt-get install openssl")
    subprocess.run([program, *map(str, words)], check=True, capture_output=True)
