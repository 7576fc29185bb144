"""The order in which connections give way to new ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from ipaddress import IPv6Address, ip_address
from typing import Protocol, TypeVar


class Held(Protocol):
    @property
    def network(self) -> str:
        """The client's address, as `network_of` returns it."""

    @property
    def idle_since(self) -> float | None:
        """Time of the last request's end; None during a request."""


Connected = TypeVar("Connected", bound=Held)


def in_order_of_leaving(held: Collection[Connected]) -> list[Connected]:
    """Return idle connections: those of the busiest address first, the longest idle first."""
    of = Counter(one.network for one in held)
    idle = [(-of[one.network], since, one) for one in held if (since := one.idle_since) is not None]
    return [one for *_, one in sorted(idle, key=lambda item: item[:2])]


def network_of(address: str) -> str:
    """Return the part of an address that clients cannot vary: all of IPv4, the network of IPv6."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:  # A socket that has no address.
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])
