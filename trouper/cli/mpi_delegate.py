"""`mlx.launch` as a process of `trouper launch`: `python -m trouper.cli.mpi_delegate ARGUMENTS`. When the launcher has gone
it ends with all that it has started, which mlx.launch alone would not do."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from threading import Thread

from trouper.cli.rank_commands import LAUNCHER


def _end_with(descriptor: int) -> None:
    while os.read(descriptor, 64):
        pass
    os.killpg(0, signal.SIGTERM)


def main() -> None:
    """Run mlx.launch without the variable of the launcher's descriptor: the ranks do not inherit the descriptor, so they
    must not look for it."""
    launcher = os.environ.pop(LAUNCHER, "")
    if launcher:
        Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    script = Path(sys.executable).with_name("mlx.launch")
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
