"""Two network namespaces joined by a link of a given delay and rate: `python -m
benchmarks.slow_link`. Linux, as root.

Each namespace has a TUN device, and a process carries their packets: a packet arrives once those
before it have been sent at the rate, and the delay has passed. Kernels without netem have TUN, and
a loopback cannot be slowed for some sockets only.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
NAMESPACES = ("trouper-slow-0", "trouper-slow-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@attrs.define
class Direction:
    """Packets on their way from one device to the other."""

    source: int
    target: int
    delay_s: float
    bytes_per_s: float
    _free_at: float = 0.0
    _packets: deque[tuple[float, bytes]] = attrs.field(factory=deque)

    def take(self) -> None:
        packet = os.read(self.source, 65536)
        self._free_at = max(self._free_at, time.monotonic()) + len(packet) / self.bytes_per_s
        self._packets.append((self._free_at + self.delay_s, packet))

    def deliver(self) -> float | None:
        """Deliver what has arrived. Return the seconds until the next, None: none is under way."""
        while self._packets:
            remaining = self._packets[0][0] - time.monotonic()
            if remaining > 0:
                return remaining
            os.write(self.target, self._packets.popleft()[1])
        return None


def carry(first: int, second: int, delay_s: float, bits_per_s: float) -> None:
    """Carry packets between two TUN devices until the process ends."""
    directions = {
        source: Direction(source, target, delay_s, bits_per_s / 8)
        for source, target in ((first, second), (second, first))
    }
    while True:
        waits = [wait for each in directions.values() if (wait := each.deliver()) is not None]
        readable, _, _ = select.select(directions, [], [], min(waits, default=None))
        for source in readable:
            directions[source].take()


def tun(number: int) -> int:
    """Make the device of a namespace; the descriptor stays its other end."""
    name, namespace = f"slow{number}", NAMESPACES[number]
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    _ip("link", "set", name, "netns", namespace)
    _ip("-n", namespace, "address", "add", f"{ADDRESSES[number]}/24", "dev", name)
    _ip("-n", namespace, "link", "set", name, "mtu", str(MTU), "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    return device


@contextmanager
def slow_link(delay_ms: float, gbit_per_s: float) -> Iterator[None]:
    """`delay_ms`: each way."""
    options = [str(delay_ms), str(gbit_per_s)]
    for namespace in NAMESPACES:
        subprocess.run(["ip", "netns", "delete", namespace], stderr=subprocess.DEVNULL, check=False)
        _ip("netns", "add", namespace)
    carrier = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.slow_link", *options], stdout=subprocess.PIPE
    )
    try:
        assert carrier.stdout is not None
        carrier.stdout.readline()
        yield
    finally:
        carrier.kill()
        carrier.wait()
        for namespace in NAMESPACES:
            _ip("netns", "delete", namespace)


def inside(rank: int, command: list[str]) -> list[str]:
    return ["ip", "netns", "exec", NAMESPACES[rank], *command]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    delay_ms, gbit_per_s = map(float, sys.argv[1:])
    first, second = (tun(number) for number in range(len(NAMESPACES)))
    # Ranks spin while they wait: a carrier that waits for its turn would be a slower link.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    print("ready", flush=True)
    carry(first, second, delay_ms / 1000, gbit_per_s * 1e9)


if __name__ == "__main__":
    main()
