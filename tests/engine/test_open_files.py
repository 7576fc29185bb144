"""The limit on open files survives the import of mlx-lm, and a low one does not end it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
set_limit = resource.setrlimit
import trouper.engine
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard), "only that one call has no effect"
import trouper.engine.host, mlx_lm.utils
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
assert resource.setrlimit is set_limit, "it is put back"
"""


@pytest.mark.parametrize(
    ("given", "kept"),
    [((600, 600), (600, 600)), ((256, 3000), (2048, 3000)), ((3000, 3500), (3000, 3500))],
)
def test_it_is_only_raised(given: tuple[int, int], kept: tuple[int, int]) -> None:
    """Found by use: with `ulimit -n 1024`, which sets both limits, no server started."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < given[1]:
        pytest.skip("this process may not open so many files itself")
    command = [sys.executable, "-c", SCRIPT, *map(str, given)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [*map(str, kept)]
