"""`just ranks-campaign 500` is the long one."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.campaign import compare
from tests.ranks.models import save


def test_f19_f21_answers_at_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    """Every step's digest was compared: one that differs would have ended the group. Then all drain, with exit code 0."""
    differ, kinds = compare(save("llama", tmp_path / "llama"), 30, 0)
    assert differ == []
    assert set(kinds) == {"answered", "left"}
