"""What `lmcache-core check` looks at for `[peer]`: its files, the directory, and where the helper will listen."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.errors import CacheError
from lmcache_core.plugins.components import Finding
from lmcache_core.protocol.hostport import HostPort
from lmcache_peer.admission import Admission
from lmcache_peer.directory import directory_of
from lmcache_peer.settings import ServingSettings

_SUBJECT = "peer"


def check(settings: ServingSettings, server: str) -> Sequence[Finding]:
    """Findings for `[peer]`."""
    findings = [Finding.of_port(_SUBJECT, HostPort(settings.host, settings.port), "peer.port")]
    try:
        Admission(settings)
        directory = directory_of(settings, _SUBJECT)
        try:
            entries = directory.entries()
        finally:
            directory.close()
    except CacheError as error:
        cure = "correct the files and addresses of [peer]"
        return [*findings, Finding.of_error(_SUBJECT, error, cure)]
    name = settings.node_name(server)
    endpoint = settings.advertise or str(HostPort(settings.host, settings.port))
    others = [each for each in entries if each.node == name and each.endpoint != endpoint]
    if others and settings.port:
        why = f"another node is registered as {name}, at {others[0].endpoint}"
        findings.append(Finding(False, _SUBJECT, why, "set peer.node to a name of its own"))
    else:
        findings.append(Finding(True, _SUBJECT, f"node {name} of cluster {settings.cluster!r}"))
    return findings
