"""Servers from which images are fetched, as `--allowed-media-domains` names them."""

from __future__ import annotations

import re
from typing import Self

import attrs

from trouper.protocol.hosts import PORTS, Host

NAME = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*", re.ASCII)
"""A host's name in lower case, or an IPv4 address."""
PATTERN = re.compile(r"(private:)?(?:(https?)://)?((?:\*\.)?[^:/*]+)(?::(\d{1,5}))?")


@attrs.frozen
class MediaDomain:
    """One entry. `pattern`: a name, or `*.name` for those below it. `private`: its addresses need
    not be public."""

    scheme: str
    pattern: str
    port: int
    private: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError`."""
        match = PATTERN.fullmatch(text.lower())
        name = "" if match is None else match[3].removeprefix("*.")
        if match is None or not NAME.fullmatch(name):
            raise ValueError(
                f"{text!r} is no server of images; write NAME or *.NAME, with http:// before it if "
                "it has no https, :PORT behind it, and private: before all of it if it is in your "
                "own network"
            )
        scheme = match[2] or "https"
        port = int(match[4]) if match[4] else PORTS[scheme]
        if not 0 < port < 2**16:
            raise ValueError(f"{text!r}: there is no port {port}")
        return cls(scheme, match[3], port, bool(match[1]))

    def covers(self, scheme: str, host: str, port: int) -> bool:
        return (scheme, port) == (self.scheme, self.port) and Host(host).within(self.pattern)

    def __str__(self) -> str:
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        before = "private:" if self.private else ""
        return f"{before}{self.scheme}://{self.pattern}{port}"


def media_domain(text: str) -> str:
    """Normalize an entry of the setting. Raises `ValueError`."""
    return str(MediaDomain.parse(text))
