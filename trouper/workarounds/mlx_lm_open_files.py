"""mlx-lm sets the limit on open files to 2,048 when it is imported.

Fault: `setrlimit(RLIMIT_NOFILE, (2048, 4096))` in mlx_lm/utils.py raises under a lower hard limit,
and reduces a higher soft one.
Seen: mlx-lm 0.32.2.
Upstream: https://github.com/ml-explore/mlx-lm/issues/1589.
Without: no start under a hard limit below 4,096; `--max-connections` ends at 2,048.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from functools import cache

from trouper import workarounds

LARGE_MODEL_FILES = 2048
CALL = resource.RLIMIT_NOFILE, (LARGE_MODEL_FILES, 4096)


@cache
def keep_limit() -> None:
    """Let mlx-lm's later import only raise the soft limit."""
    if "mlx_lm.utils" in sys.modules or not workarounds.is_active(__name__):
        return
    setrlimit = resource.setrlimit

    def ignore_once(which: int, limits: tuple[int, int], /) -> None:
        if (which, limits) != CALL:
            setrlimit(which, limits)
            return
        resource.setrlimit = setrlimit
        raise_soft_limit()

    resource.setrlimit = ignore_once


def raise_soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = LARGE_MODEL_FILES if hard == resource.RLIM_INFINITY else min(LARGE_MODEL_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(ValueError, OSError):  # A container may forbid it: the limit then stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
