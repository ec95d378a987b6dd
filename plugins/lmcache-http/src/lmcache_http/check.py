"""What `lmcache-core check` looks at: the tokens, and where the helper will listen."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from lmcache_core.plugins.components import Finding
from lmcache_core.protocol.hostport import HostPort
from lmcache_http.guard import Guard
from lmcache_http.settings import HttpSettings


def check(settings: HttpSettings) -> Sequence[Finding]:
    """Findings for `[http]`."""
    findings = [_listening(settings)]
    try:
        Guard(settings)
    except (OSError, ValueError) as error:
        findings.append(Finding(False, "http", str(error), "correct http.token_file and http.read_token_file"))
    for name, path in (("token_file", settings.token_file), ("read_token_file", settings.read_token_file)):
        if path is not None and path.exists() and path.stat().st_mode & stat.S_IROTH:
            findings.append(
                Finding(True, "http", f"every user here may read {path}", f"chmod 600 it: it is http.{name}")
            )
    return findings


def _listening(settings: HttpSettings) -> Finding:
    path = settings.unix_socket
    if path is None:
        return Finding.of_port("http", HostPort(settings.host, settings.port), "http.port")
    if os.access(path.parent, os.W_OK | os.X_OK):
        return Finding(True, "http", f"it can listen at {path}")
    cure = f"make {path.parent} a directory that user {os.geteuid()} may write, or move http.unix_socket"
    return Finding(False, "http", f"it cannot make a socket in {path.parent}", cure)
