"""The one form of TCP addresses that people write: `HOST:PORT`, where an IPv6 address stands in brackets.

Every setting and argument that names a TCP address is read here, and every ZMQ socket gets its address from here, since
ZMQ takes IPv6 only where an option says so.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from typing import TYPE_CHECKING, NamedTuple, Self

from lmcache_core.errors import UsageError

if TYPE_CHECKING:
    import zmq

__all__ = ["PORT_MAX", "HostPort", "bare_host", "is_base_url", "same_host"]

PORT_MAX = 65535
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]:([0-9]{1,5})")
_PLAIN = re.compile(r"([^\s:/\[\]@]+):([0-9]{1,5})")


class HostPort(NamedTuple):
    """A host, without brackets, and a port. Its text is `HOST:PORT` with brackets again."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, port_min: int = 0) -> Self:
        """Raises `UsageError` with a cure. The text is not in the message: it may hold a password."""
        match = _BRACKETED.fullmatch(text) or _PLAIN.fullmatch(text)
        if match is None or not port_min <= int(match[2]) <= PORT_MAX:
            cure = f"write HOST:PORT with a port from {port_min} to {PORT_MAX}, as in 127.0.0.1:5555"
            raise UsageError("it is not an address", cure=f"{cure} or, for IPv6, [::1]:5555")
        if text.startswith("["):
            try:
                ipaddress.IPv6Address(match[1])
            except ValueError:
                message = "what stands in brackets is no IPv6 address"
                raise UsageError(message, cure="write it as in [::1]:5555") from None
        return cls(match[1], int(match[2]))

    def why_taken(self) -> str:
        """Why a server cannot listen there; empty if it can. Binds and lets go, so nobody can connect meanwhile."""
        host = None if self.host == "*" else self.host
        errors: list[OSError] = []
        try:
            found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            return error.strerror or str(error)
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                    if family == socket.AF_INET6:
                        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    sock.bind(address)
            except OSError as error:
                errors.append(error)
        absent = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # one of two families that this machine does not have
        real = [each for each in errors if each.errno not in absent] or (errors if len(errors) == len(found) else [])
        return real[0].strerror or str(real[0]) if real else ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def bare_host(host: str) -> str:
    """A host as sockets take it: an IPv6 address may be written with brackets, as in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def same_host(host: str) -> str:
    """A form in which hosts are compared: without brackets, lower case, IPv6 as short as it can be."""
    host = bare_host(host.strip()).lower()
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def is_base_url(url: str) -> bool:
    """Whether it is `http://HOST[:PORT]` or `https://…`, with a path at most: no credentials, query or fragment."""
    match = re.fullmatch(r"https?://([^\s/?#@]+)(/[^\s?#]*)?", url)
    if match is None:
        return False
    authority = match[1] if re.search(r":[0-9]*$", match[1]) and not match[1].endswith("]") else f"{match[1]}:80"
    try:
        HostPort.parse(authority)
    except ValueError:
        return False
    return True


def needs_ipv6(endpoint: str, *, resolve: bool = False) -> bool:
    """Whether a ZMQ endpoint can be reached over IPv6 only: an address in brackets, or with `resolve` also a name that
    has no other address. `resolve` asks the name service, which may take long: only for a server's start."""
    if not endpoint.startswith("tcp://"):
        return False
    try:
        host, port = HostPort.parse(endpoint.removeprefix("tcp://"))
    except ValueError:
        return False
    if ":" in host:
        return True
    if not resolve or host == "*" or _is_ipv4(host):
        return False
    try:
        families = {family for family, *_ in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:  # ZMQ tells of it, or asks again later
        return False
    return families == {socket.AF_INET6}


def allow_ipv6(sock: zmq.Socket[bytes], endpoint: str, *, resolve: bool = False) -> None:
    """Make the socket take this endpoint, before it is bound or connected."""
    if needs_ipv6(endpoint, resolve=resolve):
        sock.ipv6 = True


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
