"""Which requests come from a program on the server's own machine.

Without keys nothing else tells the operator of a server from its users. A reverse proxy on the same
machine has an address of
loopback, too, but most proxies say for whom they ask, keep the public name as `Host`, or ask by
HTTP/1.0 (nginx before 1.29.7).
One that does none of these cannot be told from a local program: behind it, keys are needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trouper.protocol.hosts import Host, is_loopback

FORWARDING = re.compile(
    r"via|forwarded|x-(?:forwarded|original|proxy|envoy|remote)(?:-.+)?|(?:cf|tailscale)-.+"
    r"|(?:x-)?(?:real|client|true-client|cluster-client|proxyuser)-ip|(?:fly|fastly)-client-ip"
)
"""Names of headers by which proxies say that they ask for somebody else."""


def is_local(client: Sequence[Any] | None, headers: Mapping[str, str], http_version: str) -> bool:
    """Whether the peer is on this machine and asks for itself. `client`: host and port, as in ASGI;
    None: they are unknown.
    `headers`: by their names in lower case."""
    if not client or not is_loopback(str(client[0])) or http_version == "1.0":
        return False
    host = Host.parse(headers.get("host") or "localhost")
    return host is not None and host.is_loopback and not any(map(FORWARDING.fullmatch, headers))
