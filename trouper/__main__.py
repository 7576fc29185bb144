"""`python -m trouper` is `trouper`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

if not sys.flags.safe_path:  # `-m` puts the working directory first: a stranger's modules.
    with suppress(OSError):
        if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - as the interpreter writes it
            del sys.path[0]

from trouper.cli import main

main(prog_name="trouper")
