"""Several servers behind HAProxy, with smg or without, on one machine; docs/replicas.md says more.

python examples/replicas.py --replicas 2 --port 8000 -- --model DIR --completion-batch-size 16
python examples/replicas.py --host 0.0.0.0 --first-port 8001 -- --model DIR --api-key-file FILE

HAProxy: `apt-get install haproxy` or `brew install haproxy`. For `--router smg`: `pip install smg`.
What follows `--` goes to each `trouper serve`. A replica that dies is started again; the router
takes it back when it is ready. One whose flags cannot be ends all of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase

import attrs
import trio

from trouper.protocol.settings import default_cache_dir
from trouper.system.ports import free_ports

CONFIGURATION = Path(__file__).parents[1] / "deploy" / "haproxy.cfg"
SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "x-session-affinity", "x-session-id")
"""Of Claude Code, Codex, opencode and others: a conversation's name. deploy/haproxy.cfg has them,
too."""
DRAIN_S = 60.0
GRACE_S = DRAIN_S + 20.0
"""A replica drains for `DRAIN_S` when it is told to leave; a longer --drain-timeout-s is cut."""
AGAIN_S = 1.0
OWN_MACHINE = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks no proxy of the environment, which knows nothing of the ports of this machine."""
CANNOT_BE = 2
"""Exit code for a flag, a model or a port that cannot be: a restart mends none of these."""


def replica(name: str, port: int, flags: Sequence[str]) -> list[str]:
    """The command of one server. Its files, batches and stored responses are its own, and there
    again when it is started again."""
    return [
        sys.executable,
        "-c",
        "from trouper.cli import main; main()",
        "serve",
        f"--port={port}",
        f"--batch-dir={default_cache_dir() / 'replicas' / name}",
        f"--drain-timeout-s={DRAIN_S:g}",
        *flags,
    ]


def haproxy(
    port: int,
    urls: Sequence[str],
    directory: Path,
    smg_port: int | None = None,
    host: str = "127.0.0.1",
) -> list[str]:
    """The command of HAProxy, with deploy/haproxy.cfg for these servers, named a, b, c, ..., in a
    file of `directory`."""
    lines: list[str] = []
    if smg_port is not None:
        lines += ["global", f"    setenv SMG 127.0.0.1:{smg_port}"]
    for line in CONFIGURATION.read_text("utf-8").splitlines():
        if line.startswith("    server a "):
            _, _, tracked = line.partition(" track servers/")
            lines += [
                f"    server {name} {url.removeprefix('http://')}"
                + (f" track servers/{name}" if tracked else "")
                for name, url in zip(ascii_lowercase, urls, strict=False)
            ]
        elif line.startswith("    bind "):
            lines.append(f"    bind {host}:{port}")
        # Each server says on this terminal what it answered.
        elif not line.startswith(("    server b ", "    log ", "    option httplog")):
            lines.append(line)
    path = directory / "haproxy.cfg"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return ["haproxy", "-f", str(path)]


def smg(
    port: int, metrics_port: int, urls: Sequence[str], policy: str = "cache_aware"
) -> list[str]:
    """The command of smg. Its own defaults are for larger servers and for the open network."""
    return [
        sys.executable,
        "-P",
        "-m",
        "smg.launch_router",
        "--host=127.0.0.1",
        f"--port={port}",
        "--prometheus-host=127.0.0.1",
        f"--prometheus-port={metrics_port}",
        f"--policy={policy}",
        # A conversation by its own name, else by its prompt, as the policy says.
        "--routing-key-override",
        "--routing-key-headers",
        *SESSION_HEADERS,
        # Half of a prompt must be known to follow it, and not to a replica that has half more to do
        # than the mean, and a request more.
        "--cache-threshold=0.5",
        "--balance-abs-threshold=1",
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


def ready(url: str) -> bool:
    """Whether a replica is. HAProxy believes it until its first check."""
    try:
        with OWN_MACHINE.open(f"{url}/readyz", timeout=5):
            return True
    except OSError:
        return False


@attrs.frozen(kw_only=True)
class Replicas:
    """`ports`: of the replicas, by their names. `smg_port`: None without smg."""

    host: str
    port: int
    ports: Mapping[str, int]
    flags: Sequence[str]
    smg_port: int | None
    policy: str

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports.values()]

    def router_commands(self, directory: Path) -> Mapping[str, list[str]]:
        before = haproxy(self.port, self.urls, directory, self.smg_port, self.host)
        if self.smg_port is None:
            return {"haproxy": before}
        [metrics_port] = free_ports(1)
        return {
            "smg": smg(self.smg_port, metrics_port, self.urls, self.policy),
            "haproxy": before,
        }

    async def run(self, directory: Path) -> int:
        """Run until a signal, or until one of them cannot be. Return the exit code."""
        code = 0
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:

                async def run(name: str, command: Sequence[str]) -> None:
                    nonlocal code
                    code = await keep(name, command)
                    nursery.cancel_scope.cancel(reason=f"{name} cannot be")

                for name, port in self.ports.items():
                    command = replica(name, port, [f"--host={self.host}", *self.flags])
                    nursery.start_soon(run, f"the replica {name} on port {port}", command)
                for name, command in self.router_commands(directory).items():
                    nursery.start_soon(run, name, command)
                nursery.start_soon(self._announce)
                async for _ in signals:
                    nursery.cancel_scope.cancel(reason="a signal")
                    break
        return code

    def _all_ready(self) -> bool:
        fronts = [self.port] if self.smg_port is None else [self.smg_port, self.port]
        return all(map(ready, self.urls)) and all(
            healthy(port) == len(self.ports) for port in fronts
        )

    async def _announce(self) -> None:
        # The replicas and the router tell nobody
        while not await trio.to_thread.run_sync(self._all_ready):  # noqa: ASYNC110
            await trio.sleep(0.2)
        print(f"http://127.0.0.1:{self.port}/v1 routes to {' '.join(self.urls)}", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Replicas behind HAProxy.")
    arguments.add_argument("--replicas", type=int, default=2, help="at most 26")
    arguments.add_argument(
        "--host",
        choices=("127.0.0.1", "0.0.0.0"),  # noqa: S104
        default="127.0.0.1",
        help="HAProxy's and the servers'; 0.0.0.0 opens them, and wants --api-key-file behind --",
    )
    arguments.add_argument("--port", type=int, default=8000, help="HAProxy's")
    arguments.add_argument(
        "--first-port", type=int, help="the first server's, the others' follow; without: free ones"
    )
    arguments.add_argument(
        "--router",
        choices=("haproxy", "smg"),
        default="haproxy",
        help="smg: behind HAProxy, for prompts of no named conversation",
    )
    arguments.add_argument("--policy", default="cache_aware", help="smg's")
    arguments.add_argument(
        "flags", nargs="*", metavar="FLAG", help="after --: flags of each `trouper serve`"
    )
    given = arguments.parse_args()
    if shutil.which("haproxy") is None:
        arguments.error("haproxy is not installed: apt-get install haproxy")
    if given.router == "smg" and find_spec("smg") is None:
        arguments.error("smg is not installed in this Python: pip install smg")
    names = ascii_lowercase[: given.replicas]
    first: int | None = given.first_port
    ports = free_ports(len(names)) if first is None else range(first, first + len(names))
    replicas = Replicas(
        host=given.host,
        port=given.port,
        ports=dict(zip(names, ports, strict=True)),
        flags=given.flags,
        smg_port=free_ports(1)[0] if given.router == "smg" else None,
        policy=given.policy,
    )
    with tempfile.TemporaryDirectory(prefix="replicas-") as directory:
        return trio.run(replicas.run, Path(directory))


if __name__ == "__main__":
    sys.exit(main())
