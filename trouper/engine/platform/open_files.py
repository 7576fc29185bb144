"""The limit on open files, which importing mlx-lm would set to 2,048 whatever it was.

mlx_lm/utils.py calls `setrlimit(RLIMIT_NOFILE, (2048, 4096))`. That fails where the hard limit is lower (`ulimit -n 1024`), so that nothing
starts, and takes from a server what `--max-connections` needs where it is higher. Here the soft limit is only ever raised.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

from trouper.engine.platform.import_hook import around_import

LARGE_MODEL_FILES = 2048
"""What a large model with many files may need; as in mlx-lm."""


def keep_limit() -> None:
    """Let the import of mlx-lm, whenever it comes, leave the limit alone. To be called before it."""
    around_import("mlx_lm.utils", _with_limit_kept)


def _with_limit_kept(run: Callable[[], None], _: ModuleType) -> None:
    with _limit_kept():
        run()


@contextmanager
def _limit_kept() -> Iterator[None]:
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda which, limits, /: None  # noqa: ARG005
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = LARGE_MODEL_FILES if hard == resource.RLIM_INFINITY else min(LARGE_MODEL_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(ValueError, OSError):  # A container may forbid it: then the limit is what it is.
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
