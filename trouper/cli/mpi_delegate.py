"""`mlx.launch` as a process of `trouper launch`: `python -m trouper.cli.mpi_delegate ARGUMENTS`.
When the launcher has gone it ends with all that it has started, which mlx.launch alone would not
do."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from trouper.lifeline import watch_launcher


def main() -> None:
    """Run mlx.launch, and end it and its children, which are one process group, with the
    launcher."""
    watch_launcher(lambda: os.killpg(0, signal.SIGTERM))
    script = Path(sys.executable).with_name("mlx.launch")
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
