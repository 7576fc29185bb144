"""Ranks on this machine as `trouper launch` starts them, for programs that are no server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from trouper.cli.process_group import LocalRanks


def run_ranks(count: int, backend: str, arguments: Sequence[str], timeout_s: float = 3600) -> str:
    """What rank 0 of `python -m ...` prints. What the ranks say of errors is seen as it comes."""
    with LocalRanks(count, backend, (sys.executable, "-m", *arguments)).processes() as ranks:
        processes = [
            subprocess.Popen(
                one.command,
                env=one.environment,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank, one in enumerate(ranks)
        ]
        try:
            said, _ = processes[0].communicate(timeout=timeout_s)
            if any(process.wait(30) for process in processes):
                sys.exit(f"ranks ended with {[process.returncode for process in processes]}")
            return said
        finally:
            for process in processes:
                process.kill()
                process.wait()
