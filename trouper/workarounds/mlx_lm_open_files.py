"""mlx-lm sets the limit on open files to 2,048 when it is imported.

Fault: mlx_lm/utils.py calls `setrlimit(RLIMIT_NOFILE, (2048, 4096))`. The call raises where the
hard limit is lower (`ulimit -n 1024`), and takes descriptors away where the soft limit is higher.
Seen: mlx-lm 0.32.2.
Upstream: no report is known; none was searched for.
Without: no start where the hard limit is below 4,096; `--max-connections` beyond 2,048 has no
effect.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from functools import cache

from trouper import workarounds

LARGE_MODEL_FILES = 2048
"""What a large model with many files may need; as in mlx-lm."""
CALL = resource.RLIMIT_NOFILE, (LARGE_MODEL_FILES, 4096)
"""Arguments of mlx-lm's call."""


@cache
def keep_limit() -> None:
    """Let the import of mlx-lm only ever raise the soft limit. Must precede that import.

    `resource.setrlimit` is replaced until mlx-lm calls it. Other calls have their effect.
    """
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
    """Raise the soft limit to what a large model needs, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = LARGE_MODEL_FILES if hard == resource.RLIM_INFINITY else min(LARGE_MODEL_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(ValueError, OSError):  # A container may forbid it: the limit then stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
