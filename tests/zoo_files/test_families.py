"""Families in their makers' forms; `just zoo-files` plays all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.family_configs import LONG
from tests.zoo_files.checking import play
from tests.zoo_files.families import FAMILIES, SHORT
from tests.zoo_files.table import PAGE, states


@pytest.mark.parametrize("name", FAMILIES if LONG else SHORT)
@pytest.mark.long(but=("Qwen 3.5, small", "Llama 3.1, 3.2, 3.3", "Gemma 2", "DeepSeek V3.1"))
def test_a_family_is_loaded_prompted_and_parsed(name: str, tmp_path: Path) -> None:
    outcome = play(FAMILIES[name], tmp_path / "model")
    assert outcome.faults == ()
    assert states(PAGE.read_text("utf-8"), outcome)


def test_there_are_many() -> None:
    page = PAGE.read_text("utf-8")
    assert len(FAMILIES) >= 60
    assert all(f"\n| {name} | " in page or f" {name} (`" in page for name in FAMILIES)
