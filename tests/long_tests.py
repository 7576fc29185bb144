"""Which tests the short version leaves out: those with the marker `long`, but for a few parameters.

`@pytest.mark.long` leaves a test out. `@pytest.mark.long(but=("llama*",))` keeps the parameters
whose id matches one of the patterns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

import pytest

from tests.family_configs import EVERY

PLAYED = EVERY or bool(os.environ.get("TROUPER_UNSHRUNK"))
"""Mutants, too, are played with all tests that they name."""


def examples(number: int) -> int:
    """As many examples of Hypothesis; a third of them in the short version."""
    return number if PLAYED else -(-number // 3)


def patterns_of(item: pytest.Item) -> tuple[str, ...] | None:
    """The parameters that the short version keeps; none for a test that it always plays."""
    marker = item.get_closest_marker("long")
    return None if marker is None else tuple(marker.kwargs.get("but", ()))


def is_left_out(item: pytest.Item) -> bool:
    patterns = patterns_of(item)
    return patterns is not None and not any(fnmatchcase(_id(item), pattern) for pattern in patterns)


def unmatched_patterns(items: Sequence[pytest.Item]) -> list[str]:
    """Patterns that no parameter of their test has any more: all of it would be left out."""
    ids: dict[tuple[str, str], set[str]] = {}
    for item in items:
        for pattern in patterns_of(item) or ():
            ids.setdefault((item.nodeid.partition("[")[0], pattern), set()).add(_id(item))
    return [
        f"{test}: no parameter is like {pattern!r}"
        for (test, pattern), has in ids.items()
        if not any(fnmatchcase(each, pattern) for each in has)
    ]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long tests, unless they are to be played or a test is named by its own name."""
    if PLAYED or any("::" in argument for argument in config.args):
        return
    if stale := unmatched_patterns(items):
        raise pytest.UsageError("\n".join(stale))
    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


def _id(item: pytest.Item) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""
