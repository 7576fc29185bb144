"""Several servers behind SGLang's router, on one machine: `pip install sglang-router`, and
docs/several-machines.md says more.

python examples/replicas.py --replicas 2 --port 8000 -- --model DIR --completion-batch-size 16

What follows `--` goes to each `trouper serve`. A replica that dies is started again; the router
finds it when it is ready. One whose flags cannot be ends all of it.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec

import trio

GRACE_S = 15.0
"""A replica drains for --drain-timeout-s (10) when it is told to leave."""
AGAIN_S = 1.0
OWN_MACHINE = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks no proxy of the environment, which knows nothing of the ports of this machine."""
CANNOT_BE = 2
"""Exit code for a flag, a model or a port that cannot be: a restart mends none of these."""


def replica(port: int, flags: Sequence[str]) -> list[str]:
    """The command of one server."""
    return [
        sys.executable,
        "-c",
        "from trouper.cli import main; main()",
        "serve",
        f"--port={port}",
        *flags,
    ]


def router(
    port: int, metrics_port: int, urls: Sequence[str], policy: str = "cache_aware"
) -> list[str]:
    """The command of the router. Its own defaults are for larger servers and for the open
    network."""
    return [
        sys.executable,
        "-P",
        "-m",
        "sglang_router.launch_router",
        "--host=127.0.0.1",
        f"--port={port}",
        "--prometheus-host=127.0.0.1",
        f"--prometheus-port={metrics_port}",
        f"--policy={policy}",
        # Half of a prompt must be known to follow it, and not to a replica that has 8 requests more
        # than another.
        "--cache-threshold=0.5",
        "--balance-abs-threshold=8",
        # Ready is not the same as alive: a replica that restarts its engine, drains or is stuck
        # gets nothing new.
        "--health-check-endpoint=/readyz",
        "--health-check-interval-secs=1",
        "--health-failure-threshold=2",
        # One that died and is back is tried again soon, not after a minute.
        "--cb-timeout-duration-secs=2",
        "--worker-startup-check-interval=1",
        f"--shutdown-grace-period-secs={GRACE_S:g}",
        "--log-level=error",
        "--worker-urls",
        *urls,
    ]


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


async def leave(process: trio.Process) -> None:
    """What a cancelled child gets: time to drain."""
    process.terminate()
    with trio.move_on_after(GRACE_S):
        await process.wait()
        return
    process.kill()


async def keep(name: str, command: Sequence[str]) -> int:
    """Run it, and again whenever it ends, unless that mends nothing; return its code. A session of
    its own: Ctrl-C is for this program, which passes it on."""
    while True:
        process = await trio.run_process(
            command, check=False, start_new_session=True, deliver_cancel=leave
        )
        if process.returncode == CANNOT_BE:
            print(
                f"{name} ended with code {CANNOT_BE}; it said why above",
                file=sys.stderr,
                flush=True,
            )
            return CANNOT_BE
        print(
            f"{name} ended with code {process.returncode}; it is started again",
            file=sys.stderr,
            flush=True,
        )
        await trio.sleep(AGAIN_S)


def healthy(port: int) -> int:
    """How many replicas the router sends requests to."""
    try:
        with OWN_MACHINE.open(f"http://127.0.0.1:{port}/readiness", timeout=5) as answer:
            return int(json.load(answer)["healthy_workers"])
    except OSError:
        return 0


async def main(count: int, port: int, policy: str, flags: Sequence[str]) -> int:
    """Until a signal, or until one of them cannot be. Return the exit code."""
    code = 0
    metrics_port, *ports = free_ports(count + 1)
    urls = [f"http://127.0.0.1:{own}" for own in ports]
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:

            async def run(name: str, command: Sequence[str]) -> None:
                nonlocal code
                code = await keep(name, command)
                nursery.cancel_scope.cancel(reason=f"{name} cannot be")

            for own in ports:
                nursery.start_soon(run, f"the replica on port {own}", replica(own, flags))
            nursery.start_soon(run, "the router", router(port, metrics_port, urls, policy))
            nursery.start_soon(announce, port, urls)
            async for _ in signals:
                nursery.cancel_scope.cancel(reason="a signal")
                break
    return code


async def announce(port: int, urls: Sequence[str]) -> None:
    # The router tells nobody
    while await trio.to_thread.run_sync(healthy, port) < len(urls):  # noqa: ASYNC110
        await trio.sleep(0.2)
    print(f"http://127.0.0.1:{port}/v1 routes to {' '.join(urls)}", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Replicas behind a router.")
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument(
        "--port", type=int, default=8000, help="the router's; replicas take free ones"
    )
    arguments.add_argument(
        "--policy", default="cache_aware", help="cache_aware, round_robin, power_of_two, random"
    )
    arguments.add_argument(
        "flags", nargs="*", metavar="FLAG", help="after --: flags of each `trouper serve`"
    )
    options = arguments.parse_args()
    if find_spec("sglang_router") is None:
        arguments.error(
            "sglang-router is not installed beside this Python: pip install sglang-router"
        )
    sys.exit(trio.run(main, options.replicas, options.port, options.policy, options.flags))
