"""`mlx.launch` as a process that ends with `trouper launch`, and the ranks too."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from trouper.system.lifeline import watch_launcher


def main() -> None:
    watch_launcher(lambda: os.killpg(0, signal.SIGTERM))
    script = Path(sys.executable).with_name("mlx.launch")
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
