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
from trouper.process import prepare_process
prepare_process()
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard), "only that one call has no effect"
import mlx_lm.utils
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
assert resource.setrlimit is set_limit, "it is put back"
"""


@pytest.mark.parametrize(
    ("given", "kept"),
    [((600, 600), (600, 600)), ((256, 3000), (2048, 3000)), ((3000, 3500), (3000, 3500))],
)
@pytest.mark.long(but=("given1*",))
def test_it_is_only_raised(given: tuple[int, int], kept: tuple[int, int]) -> None:
    """Found by use: with `ulimit -n 1024`, which sets both limits, no server started."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < given[1]:
        pytest.skip("this process may not open so many files itself")
    command = [sys.executable, "-c", SCRIPT, *map(str, given)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [*map(str, kept)]


def test_it_is_still_needed() -> None:
    """The import of mlx-lm alone lowers a soft limit of 3,000."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 4096)); "
        "import mlx_lm.utils; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(ended.stdout) < 3000
