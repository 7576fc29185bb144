"""The suites of other projects, from `suites.json`: which version, which files, and why a test is
left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs
import cattrs

DATA = Path(__file__).parent / "suites.json"
OVERLAYS = Path(__file__).parent / "programs" / "overlays"


@attrs.frozen
class Suite:
    """`in_archive` and `in_repository`: where the root that the paths below begin at lies in each.
    `sources`: files and directories that are laid out. `tests`: patterns of the files with tests
    among them."""

    title: str
    requirement: str
    sha256: str
    in_archive: str
    in_repository: str
    sources: Sequence[str]
    tests: Sequence[str]
    files_left_out: Mapping[str, Sequence[str]]
    """Patterns of files by the reason for which they are not collected."""
    left_out: Mapping[str, Sequence[str]]
    """Patterns of tests, as `file.py::test[parameter]`, by the reason for which they do not run."""
    packages: Sequence[str]
    """Of the environment in which the tests run."""
    stand_ins: Sequence[str] = ()
    """Packages that are imported and that nothing here runs."""
    platform: Sequence[str] = ()
    """Flags that find the archive, where it is a wheel of one platform."""
    server: Sequence[str] = ()
    """Flags of `trouper serve`; those that a test's own server has come on top."""
    url_variable: str = ""
    """The variable by which the suite finds a server, if there is one."""

    @property
    def version(self) -> str:
        return self.requirement.partition("==")[2]


@cache
def read_suites() -> Mapping[str, Suite]:
    data = json.loads(DATA.read_text("utf-8"))
    return {name: cattrs.structure(suite, Suite) for name, suite in data.items()}
