"""Host names and origins in HTTP's syntax (RFC 9110, 7.2; RFC 6454)."""

# A web page can point its own name at any address (DNS rebinding), but the browser still sends that
# name as Host. An address in digits is never looked up, hence never rebound.

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Self

import attrs

AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\\\s,]+)(?::(\d{0,5}))?", re.IGNORECASE)
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.IGNORECASE)
DOMAIN = re.compile(r"(?:\*?\.)?[\w-]+(?:\.[\w-]+)*", re.ASCII)
PORTS = {"http": 80, "https": 443}
# Domains without a public registry: no web page has a name below these.
PRIVATE_SUFFIXES = ("local", "internal", "home.arpa", "lan", "localhost", "test")


@attrs.frozen
class Host:
    """A name or an address in lower case, with an optional port."""

    name: str
    port: int | None = None

    @classmethod
    def parse(cls, authority: str) -> Self | None:
        """Parse `name[:port]`; None if the syntax is wrong."""
        match = AUTHORITY.fullmatch(authority)
        if match is None:
            return None
        name, port = match.groups()
        name = name.lower().removesuffix(".")
        return cls(name, int(port) if port else None) if name else None

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The IP address; None for a name."""
        try:
            found = ip_address(self.name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return None
        return getattr(found, "ipv4_mapped", None) or found

    @property
    def is_loopback(self) -> bool:
        """localhost and names below (RFC 6761, 6.3), 127.0.0.0/8, ::1."""
        if self.address is not None:
            return self.address.is_loopback
        return self.name == "localhost" or self.name.endswith(".localhost")

    @property
    def is_private(self) -> bool:
        """Whether no web page can own the name: no dot, or a domain without a registry."""
        return "." not in self.name or any(
            self.name.endswith(f".{suffix}") for suffix in PRIVATE_SUFFIXES
        )

    def within(self, pattern: str) -> bool:
        """Match a name, `.domain` (with all below), `*.domain` (only those below), or `*`."""
        if pattern == "*":
            return True
        if pattern.startswith("*."):
            return self.name.endswith(pattern[1:])
        return self.name == pattern.removeprefix(".") or (
            pattern.startswith(".") and self.name.endswith(pattern)
        )


@attrs.frozen
class Origin:
    scheme: str
    host: Host

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an Origin header; None if the syntax is wrong, and for `null`."""
        match = ORIGIN.fullmatch(text)
        host = None if match is None else Host.parse(match[2])
        if match is None or host is None:
            return None
        scheme = match[1].lower()
        return cls(scheme, Host(host.name, _port(scheme, host)))

    def is_of(self, host: Host) -> bool:
        """Compare without the scheme: a proxy may speak TLS before this server."""
        return self.host == Host(host.name, _port(self.scheme, host))


def _port(scheme: str, host: Host) -> int | None:
    return PORTS.get(scheme) if host.port is None else host.port


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a server on `address`."""
    host = Host.parse(f"[{address}]" if ":" in address else address)
    return host is not None and host.is_loopback


def host_pattern(text: str) -> str:
    """Check a pattern for `Host.within`. Raises `ValueError`."""
    pattern = text.lower().removesuffix(".")
    host = Host.parse(pattern)
    is_address = host is not None and host.port is None and host.address is not None
    if text == "*" or DOMAIN.fullmatch(pattern) or is_address:
        return pattern
    raise ValueError(
        f"{text!r} is no host; write NAME without scheme and port, .DOMAIN for it and all below "
        "it, or *"
    )


def origin_pattern(text: str) -> str:
    """Normalize an origin as browsers do; `*` is kept. Raises `ValueError`."""
    if text == "*":
        return text
    origin = Origin.parse(text.removesuffix("/"))
    if origin is None or "*" in origin.host.name:
        raise ValueError(
            f"{text!r} is no origin; write SCHEME://HOST[:PORT] as in http://localhost:5173, or *"
        )
    return str_of(origin)


def str_of(origin: Origin) -> str:
    """The origin as browsers send: without the scheme's default port."""
    port = origin.host.port
    behind = "" if port in (None, PORTS.get(origin.scheme)) else f":{port}"
    return f"{origin.scheme}://{origin.host.name}{behind}"
