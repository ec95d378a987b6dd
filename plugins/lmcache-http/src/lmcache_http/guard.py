"""Who may ask for what: tokens, and protection against other sites in a browser.

Another site's page cannot read or change anything here: its requests carry its own `Origin`, and a page that makes its
own name point to this address (DNS rebinding) sends a `Host` that is not ours. Changes always need a token: on loopback
every user of the machine can connect, while the server itself serves only its own user.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from lmcache_core.protocol.hostport import same_host
from lmcache_core.textfiles import read_text_file
from lmcache_http.settings import HttpSettings


class Right(Enum):
    """What a request needs."""

    NONE = "none"  # probes: whether it lives, and is ready
    READ = "read"
    CHANGE = "change"


class RefusedError(Exception):
    """A request is turned away: the status, and what to do."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class Guard:
    """Reads the tokens once, at the start: OSError or ValueError if a file has none."""

    def __init__(self, settings: HttpSettings) -> None:
        self._change = _token(settings.token_file)
        self._read = _token(settings.read_token_file)
        loopback = {"localhost", "127.0.0.1", "::1"}
        self._hosts = {same_host(host) for host in (*loopback, settings.host, *settings.allowed_hosts)}
        self._any_host = settings.unix_socket is not None

    def check(self, headers: Mapping[str, str], right: Right) -> None:
        """Raise `RefusedError` unless the request may go on."""
        host = headers.get("host", "")
        if not self._any_host and _name_of(f"//{host}") not in self._hosts:
            raise RefusedError(421, "this Host is not allowed: add it to http.allowed_hosts")
        origin = headers.get("origin")
        if origin is not None and (self._any_host or not _is_from(origin, host)):
            raise RefusedError(403, "requests from pages of another origin are refused")
        if right is not Right.NONE:
            self._check_token(headers.get("authorization", ""), right)

    def refusals(self, headers: Mapping[str, str]) -> dict[Right, str]:
        """The rights that the request's token does not give, and why not. The rest of the request was already
        checked."""
        found: dict[Right, str] = {}
        for right in (Right.READ, Right.CHANGE):
            try:
                self._check_token(headers.get("authorization", ""), right)
            except RefusedError as error:
                found[right] = error.detail
        return found

    def _check_token(self, authorization: str, right: Right) -> None:
        scheme, _, given = authorization.partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else ""
        if right is Right.CHANGE and self._change is None:
            raise RefusedError(403, "changes need a token: set http.token_file, and send its token")
        if self._change is None and self._read is None:
            return
        if _same(token, self._change) or (right is Right.READ and _same(token, self._read)):
            return
        if right is Right.CHANGE and _same(token, self._read):
            raise RefusedError(403, "this token allows only reading")
        why = "this token is not valid" if token else "a token is needed"
        raise RefusedError(401, f"{why}: send that of http.token_file or http.read_token_file as a bearer token")


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = read_text_file(path).strip()
    if not token:
        raise ValueError(f"{path} contains no token")
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"the token in {path} has characters that a header cannot carry: use ASCII letters and digits")
    return token


def _same(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def _is_from(origin: str, host: str) -> bool:
    """Whether a page of this origin came from where its request goes: the same name and port. The scheme may differ,
    as behind a proxy that ends TLS."""
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def _name_of(url: str) -> str:
    try:
        return same_host(urlsplit(url).hostname or "")
    except ValueError:
        return ""
