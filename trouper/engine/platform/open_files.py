"""The limit on open files, which importing mlx-lm would set to 2,048 whatever it was.

mlx_lm/utils.py calls `setrlimit(RLIMIT_NOFILE, (2048, 4096))`. That fails where the hard limit is lower (`ulimit -n 1024`), so that nothing
starts, and takes from a server what `--max-connections` needs where it is higher. Here the soft limit is only ever raised.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MODULE = "mlx_lm.utils"
LARGE_MODEL_FILES = 2048
"""What a large model with many files may need; as in mlx-lm."""


def keep_limit() -> None:
    """Let the import of mlx-lm, whenever it comes, leave the limit alone. To be called before it."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds that one module, once, and has it run without the call."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_with_limit_kept(module: ModuleType) -> None:
            with _limit_kept():
                run(module)

        spec.loader.exec_module = run_with_limit_kept  # type: ignore[method-assign]
        return spec


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
