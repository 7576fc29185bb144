"""`just ranks-campaign 500` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.campaign import EXPECTED, compare
from tests.ranks.models import save


@pytest.mark.long
def test_f19_f21_r12_answers_at_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    """With drafts, and with requests that meet a time limit. Every step's digest was compared: one
    that differs would have ended the group. Then all drain, with exit code 0."""
    told = compare(save("llama", tmp_path / "llama"), 30, 4, eager=True, limit_s=4)
    assert told.differ == []
    assert {"answered", "left", "request_timeout"} <= set(told.kinds) <= EXPECTED
    assert told.drafted
