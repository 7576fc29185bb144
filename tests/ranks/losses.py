"""Ranks that are killed or stopped in the middle of streams, and how long their clients, and who
comes after, wait. `python -m tests.ranks.losses ROUNDS` measures it: it fails when a client waited
longer than it should have.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import psutil

from tests.ranks.models import save
from tests.test_process import PATIENCE_S, Client, get, stats, until
from trouper.system.ports import free_ports

LOSSES = (
    (1, signal.SIGKILL, '"error"'),
    (1, signal.SIGSTOP, "rank 1: it has been silent for 4 s (--rank-timeout-s)"),
    (0, signal.SIGKILL, ""),
)
"""A rank, what becomes of it, and what its clients hear; of rank 0 itself only that the connection
ends."""
HEARD_S = 5.0
"""Clients have their end by then: --rank-timeout-s is 4 s."""
STREAM: dict[str, Any] = {"prompt": "hello", "max_tokens": 1900, "stream": True, "ignore_eos": True}


def ready(port: int) -> bool:
    with suppress(OSError, json.JSONDecodeError):
        return get(port, "/readyz")[0] == 200
    return False


def ranks_of(launcher: psutil.Process) -> dict[int, psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for child in launcher.children(recursive=True):
        with suppress(psutil.Error, KeyError):
            # Rank 0's own children, as the process that decodes images, come later.
            found.setdefault(int(child.environ()["MLX_RANK"]), child)
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def launched(
    port: int,
    *flags: str,
    ranks: int = 2,
    patience_s: float = PATIENCE_S,
    stderr: int | None = None,
) -> Iterator[psutil.Process]:
    """The launcher of a group that is ready. `flags`: of `trouper serve`. Nothing of it is left."""
    command = [
        sys.executable,
        "-m",
        "trouper",
        "launch",
        "-n",
        str(ranks),
        "--backend",
        "ring",
        "--",
    ]
    command += ["serve", "--port", str(port), *flags]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
    ) as started:
        launcher = psutil.Process(started.pid)
        try:
            until(lambda: ready(port), patience_s)
            yield launcher
        finally:
            left = [launcher, *launcher.children(recursive=True)] if launcher.is_running() else []
            for process in left:
                with suppress(psutil.Error):
                    process.kill()


@attrs.frozen
class Loss:
    """Seconds after it: until the last client had its end, until the last of the processes was
    gone, until others serve."""

    clients: Sequence[Client]
    heard_s: float
    gone_s: float
    back_s: float


def lose(launcher: psutil.Process, port: int, rank: int, how: signal.Signals) -> Loss:
    """In the middle of streams."""
    before = ranks_of(launcher)
    clients = [Client(port, **STREAM) for _ in range(3)]
    said = stats(port)["tokens_generated"]
    until(lambda: stats(port)["tokens_generated"] > said + 10)
    began = time.monotonic()
    before[rank].send_signal(how)
    for client in clients:
        client.join(PATIENCE_S)
        assert not client.is_alive()
    heard_s = time.monotonic() - began
    until(lambda: not any(map(alive, before.values())))
    gone_s = time.monotonic() - began
    until(lambda: ready(port))
    back_s = time.monotonic() - began
    assert set(ranks_of(launcher)) == {0, 1}
    answer = Client(port, prompt="b", max_tokens=4)
    answer.join(PATIENCE_S)
    assert answer.status == 200, "the group is back"
    return Loss(clients, heard_s, gone_s, back_s)


def measured(model: Path, rank: int, how: signal.Signals) -> Loss:
    """Of a new group each time: one that is lost again and again is started later and later."""
    [port] = free_ports(1)
    with launched(port, "--model", str(model), "--no-ssd", stderr=subprocess.DEVNULL) as launcher:
        return lose(launcher, port, rank, how)


def main(rounds: int = 3) -> int:
    late = 0
    with tempfile.TemporaryDirectory() as place:
        model = save("llama", Path(place) / "llama")
        for rank, how, _ in LOSSES:
            seen = [measured(model, rank, how) for _ in range(rounds)]
            heard = [loss.heard_s for loss in seen]
            late += sum(one > HEARD_S for one in heard)
            gone, back = (
                statistics.median(getattr(loss, name) for loss in seen)
                for name in ("gone_s", "back_s")
            )
            print(
                f"rank {rank}, {how.name}, {rounds} times: clients had their end after "
                f"{statistics.median(heard):.2f} s "
                f"(at most {max(heard):.2f}), all processes were gone after {gone:.1f}, others "
                f"served after {back:.1f}",
                flush=True,
            )
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
