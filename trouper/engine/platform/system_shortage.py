"""Whether a compiler lacks descriptors, processes or memory, which MLX does not report."""

from __future__ import annotations

import subprocess
from contextlib import suppress

from trouper.protocol.problems import is_shortage

NOTHING = ("/bin/sh", "-c", ":")
TRIAL_S = 5.0


def system_shortage() -> str:
    """The shortage in the system's words, or "". Takes milliseconds."""
    try:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603 - the shell that a compiler is started by
                NOTHING, stdout=subprocess.PIPE, timeout=TRIAL_S, check=False
            )
    except OSError as error:
        return str(error.strerror) if is_shortage(error) else ""
    return ""
