"""A few mixes; `just spec-mixes 300` plays more, on every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drafts.mixes import play
from tests.drafts.models import saved


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("gpt_oss", 3), ("llama", 2)])
async def test_r9_f22_the_same_with_drafts_as_without(name: str, seed: int, tmp_path: Path) -> None:
    facts = await play(saved(name, tmp_path), name, seed)
    assert 0 < facts.accepted < facts.drafted
