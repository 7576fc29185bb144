"""Whether the system has what a kernel's compiler takes: descriptors, a process, memory for it.

MLX says that a compiler or a file could not be opened, and not why. So the same is tried again.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress

from trouper.protocol.problems import is_shortage

NOTHING = ("/bin/sh", "-c", ":")
TRIAL_S = 5.0


def system_shortage() -> str:
    """Return what is missing, in the system's words; empty: nothing. Takes milliseconds."""
    try:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603 - the shell that a compiler is started by
                NOTHING, stdout=subprocess.PIPE, timeout=TRIAL_S, check=False
            )
    except OSError as error:
        return str(error.strerror) if is_shortage(error) else ""
    return ""
