"""The list of suggested models, and the pages that have it."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import get_args

from trouper.protocol.suggested_models import EVERY, FILE, SUGGESTED, Purpose, SuggestedModel

DOCS = Path(__file__).parents[1] / "docs"


def day() -> object:
    return tomllib.loads(FILE.read_text("utf-8"))["looked_at"]


def gigabytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB"


def test_the_file_has_a_date_and_a_model_for_each_purpose() -> None:
    assert isinstance(day(), date)
    assert {purpose for model in EVERY for purpose in model.purposes} == {*get_args(Purpose)}
    assert all(model.licence and "/" in model.name for model in EVERY)
    assert all(bool(model.calls) == ("agent" in model.purposes) for model in EVERY)


def test_the_table_by_memory_has_them_with_what_they_take() -> None:
    page = (DOCS / "choosing-a-model.md").read_text("utf-8")
    rows = re.findall(r"^\| [^|]* \| `([^`]+)` \| ([\d.]+ GB) \|", page, re.MULTILINE)
    assert rows == [
        (model.name, gigabytes(model.needed_bytes(float32=False))) for model in SUGGESTED
    ]
    assert all(f"`{model.name}`" in page for model in EVERY)
    assert f"They were looked at on {day()}" in page
    assert {model.licence for model in SUGGESTED} == {"Apache 2.0"}, "the page says so of all"


def test_pages_for_newcomers_name_models_of_the_list() -> None:
    pages = [DOCS.parent / "README.md", DOCS / "index.md", DOCS / "tutorial-agent.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    named = set(re.findall(r"mlx-community/[\w.-]+", text))
    assert named and named <= {model.name for model in SUGGESTED}


def row(model: SuggestedModel) -> str:
    cells = [
        f"`{model.name}`",
        gigabytes(model.weights_bytes),
        f"{model.context_length:,}",
        gigabytes(model.needed_bytes(float32=False)),
        gigabytes(model.needed_bytes(float32=True)),
        model.calls,
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_models_for_agents_is_the_list() -> None:
    page = (DOCS / "choosing-a-model.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `mlx-community/")]
    assert rows == [row(model) for model in SUGGESTED]
