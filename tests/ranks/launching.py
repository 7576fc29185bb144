"""Ranks as processes: started as `mlx.launch --backend ring` starts them, always ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trouper.system.ports import free_ports

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1200


@contextmanager
def environments(count: int) -> Iterator[list[dict[str, str]]]:
    """What a launcher sets for each of so many ranks on this machine; for one rank nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
        json.dump([[f"127.0.0.1:{port}"] for port in free_ports(count)], hosts)
        hosts.flush()
        own = {"MLX_HOSTFILE": hosts.name, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        yield [
            {**os.environ, **(own if count > 1 else {}), "MLX_RANK": str(rank)}
            for rank in range(count)
        ]


def run_ranks(count: int, module: str, *arguments: str) -> list[Any]:
    """What each rank's last line says, as JSON. A rank that fails fails them all, with what it
    said."""
    command = [sys.executable, "-m", module, *arguments]
    with environments(count) as each:
        processes = [_start(command, environment) for environment in each]
        try:
            return [_answer(rank, process) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer(rank: int, process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{out}\n{err}"
    return json.loads(out.strip().splitlines()[-1])
