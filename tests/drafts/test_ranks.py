"""A mix at two ranks, which are processes; `just spec-mixes-ranks 60` plays more, of every family
that ranks can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drafts.ranks import play
from tests.family_configs import LONG
from trouper.engine.platform import device

MIXES = [("qwen3_5", 3), ("deepseek_v3", 8)] if LONG else [("qwen3_5", 3)]
"""Drafts of deepseek_v3 at two ranks, right and wrong, are in tests/ranks/test_parity.py, too."""


@pytest.mark.skipif(not device.is_cpu(), reason="float32 is the reference, and that is for CPUs")
@pytest.mark.parametrize(("name", "seed"), MIXES)
@pytest.mark.long
def test_r8_r9_f21_the_same_with_drafts_at_two_ranks_as_without_at_one(
    name: str, seed: int, tmp_path: Path
) -> None:
    drafted, right = play(tmp_path, name, seed)
    assert 0 < right < drafted
