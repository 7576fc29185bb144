"""Whether the system has what a kernel's compiler takes: descriptors, a process, memory for it.

MLX tells nothing but that a compiler or a file could not be opened, and not why. So the same is tried again.
"""

from __future__ import annotations

import errno
import subprocess

SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
TRIAL_S = 5.0


def system_shortage() -> str:
    """Return what is missing, in the system's words; empty: nothing. Takes milliseconds."""
    try:
        subprocess.run(["/bin/sh", "-c", ":"], stdout=subprocess.PIPE, timeout=TRIAL_S, check=False)
    except OSError as error:
        return str(error.strerror) if error.errno in SHORT else ""
    except subprocess.TimeoutExpired:
        return ""
    return ""


def is_shortage(error: BaseException) -> bool:
    """Whether the system refused a descriptor, a process or memory."""
    return isinstance(error, OSError) and error.errno in SHORT
