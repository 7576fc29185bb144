"""The commands of a group's processes: one for each rank on this machine, or `mlx.launch` for
several hosts."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import attrs

SECRET_FILE = "TROUPER_RANK_SECRET_FILE"  # noqa: S105 - a name
"""Environment variable of --rank-secret-file."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@attrs.frozen
class ProcessSpec:
    """The command of one process. `name`: the prefix of its lines; "" if they have one already."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = attrs.field(repr=False)


class RankLauncher(Protocol):
    """Processes that start and end together."""

    def processes(self) -> AbstractContextManager[list[ProcessSpec]]:
        """Return the processes of one start of the group; files that they need exist as long as the
        context."""

    def code_in(self, line: str) -> int | None:
        """Return a rank's exit code, if this line of output reports one."""


@attrs.frozen
class LocalRanks:
    """Ranks on this machine. Backend `ring` or `nccl`."""

    ranks: int
    backend: str
    command: tuple[str, ...]

    @contextmanager
    def processes(self) -> Iterator[list[ProcessSpec]]:
        with (
            tempfile.NamedTemporaryFile("w", prefix="trouper-ranks-", suffix=".json") as hosts,
            tempfile.NamedTemporaryFile("w", prefix="trouper-ranks-", suffix=".secret") as secret,
        ):
            secret.write(secrets.token_hex())
            secret.flush()
            own = {SECRET_FILE: secret.name} if self.ranks > 1 else {}
            ports = _free_ports(self.ranks)
            json.dump([[f"127.0.0.1:{port}"] for port in ports], hosts)
            hosts.flush()
            yield [
                ProcessSpec(
                    str(rank),
                    self.command,
                    own | os.environ | self._variables(rank, hosts.name, ports[0]),
                )
                for rank in range(self.ranks)
            ]

    def _variables(self, rank: int, hosts: str, port: int) -> dict[str, str]:
        """Return the variables that mlx.launch sets. A single rank needs no group."""
        if self.ranks == 1:
            return {}
        if self.backend == "nccl":
            return {
                "MLX_RANK": str(rank),
                "MLX_WORLD_SIZE": str(self.ranks),
                "NCCL_HOST_IP": "127.0.0.1",
                "NCCL_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": _devices(self.ranks)[rank],
            }
        threads = str(
            max(1, (os.cpu_count() or 1) // self.ranks)
        )  # All ranks together use no more threads than the machine has cores.
        thread_limits = {name: threads for name in THREADS if name not in os.environ}
        return {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts, **thread_limits}

    def code_in(self, line: str) -> int | None:  # noqa: ARG002  Processes have theirs.
        return None


@attrs.frozen
class Hosts:
    """Ranks that mlx.launch starts. It reports their exit codes in its output, and ends with 0
    whatever they are."""

    ranks: int
    hostfile: Path | None
    backend: str | None
    command: tuple[str, ...]

    @contextmanager
    def processes(self) -> Iterator[list[ProcessSpec]]:
        flags = (
            ["--hostfile", str(self.hostfile)]
            if self.hostfile is not None
            else ["-n", str(self.ranks)]
        )
        flags += ["--backend", self.backend] if self.backend is not None else []
        python = (sys.executable, "-P", "-m", "trouper.cli.mpi_delegate")
        environment = os.environ | {"PYTHONSAFEPATH": "1"}
        yield [ProcessSpec("", (*python, *flags, "--", *self.command), environment)]

    def code_in(self, line: str) -> int | None:
        match = re.search(r"Node with rank \d+ exited with code (-?\d+)", line)
        return int(match[1]) if match else None


def _free_ports(count: int) -> list[int]:
    """Return free ports, all bound at once so that none is returned twice."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _devices(ranks: int) -> Sequence[str]:
    """Return a GPU for each rank, of those that are visible."""
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return visible if len(visible) >= ranks else [str(rank) for rank in range(ranks)]
