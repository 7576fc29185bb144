"""docs/speculation.md says which modules keep padding out of their states when calls are repeated
after drafts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.zoo.building import build
from tests.zoo.mixes import words
from tests.zoo.playing import Play
from trouper.engine.kv.recorded_calls import keeps_padding_out
from trouper.engine.kv.slot_rows import SlotRows

PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"


def listed(kind: str) -> list[str]:
    [line] = re.findall(rf"^\| {kind}[^|]*\|([^|]*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return re.findall(r"`([^`]+)`", line)


SHARED, ALONE = listed("shared"), listed("one for each")


@pytest.mark.parametrize("name", [*SHARED, *ALONE])
def test_the_page_says_which_modules_keep_padding_out(name: str) -> None:
    play = Play(build(name))
    rows = play.rows
    assert isinstance(rows, SlotRows)
    row = play.open(0, words(40, 1))
    play.prefill({row: 5})
    play.promote(row)
    play.verify({row: (3, 1)})
    passed = rows._states._verified[-1]
    assert passed is not None
    assert keeps_padding_out(passed.layers, passed.recording) == (name in SHARED)
